"""`page`: a run on one page, or two runs compared.

Top down: what deserves a look, with what to try; the figures that count most; each graph by
replays, padding, seconds and bytes; the time of a step over its size; steps by reason; padding over
batch size; where capture time went; memory over captures; the memory that graphs read. Perfetto has
the timeline of a traced run.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graphrt._version import __version__
from graphrt.core.base.files import write_whole
from graphrt.core.base.option_values import check_kind
from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.core.runner.report import RunnerReport, gain_of
from graphrt.observe.figures import in_its_words
from graphrt.observe.files import Run, runs_of
from graphrt.observe.findings import findings_of
from graphrt.observe.layers import LayerTimes
from graphrt.observe.memory import taken_and_predicted
from graphrt.observe.pages.parts import (
    Cell,
    curves,
    escaped,
    findings,
    keys,
    table,
    tiles,
)
from graphrt.observe.pages.style import POLICY, SCRIPT, STYLE

_MOST_ROWS = 24
"""Rows of a chart; more sizes are put together."""
_MOST_CURVES = 6
"""Kinds of graphs that have curves of their times; the table has all."""
_MUCH_PADDING = 0.4
"""A larger share of padding is marked by colour and weight."""

Figures = Mapping[str, Any]


def page(
    *reports: RunnerReport | Mapping[str, Any] | str | os.PathLike[str],
    title: str = "graphrt run",
    times: Sequence[LayerTimes] = (),
) -> str:
    """HTML of reports, of their plain data, or of files of them; two runs are compared. `times` are
    results of `layers`, each of which gets a table.

    Raises `InvalidOptionError` for anything but reports, and for `times` that are no list.
    """
    check_kind("times", times, Sequence, optional=False, example="[layers(runner)]")
    found = [run for at, each in enumerate(reports, 1) for run in runs_of(each, f"run {at}")]
    runs = [Run(run.label, in_its_words(run.figures, run.figures)) for run in found]
    parts = [*_compared(*runs)] if len(runs) == 2 else []
    for number, run in enumerate(runs):
        parts += _run(run, f"r{number}", alone=len(runs) == 1)
    parts += map(_layers, times)
    named = [_mode_and_device(runs[0].figures)] if len(runs) == 1 else [run.label for run in runs]
    heading = f"{title}: {' and '.join(named)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(heading)}</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#main">Skip to the findings</a>'
        f"<header><h1>{escaped(heading)}</h1></header>"
        f'<main id="main">{"".join(parts)}</main>'
        f"<footer>Made by graphrt {escaped(__version__)}. Times are the host's.</footer>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def write_page(
    path: str | os.PathLike[str],
    *reports: RunnerReport | Mapping[str, Any] | str | os.PathLike[str],
    title: str = "graphrt run",
    times: Sequence[LayerTimes] = (),
) -> None:
    """Write `page(*reports, times=)` to a file, which needs no other file. Raises
    `InvalidOptionError` if it cannot be written, or is a link."""
    write_whole(path, page(*reports, title=title, times=times), what="the page")


def _mode_and_device(figures: Figures) -> str:
    return f"{figures['mode']} on {figures['device'] or 'no device'}"


def _run(run: Run, key: str, *, alone: bool) -> Iterator[str]:
    figures = run.figures
    if not alone:
        yield f'<h2 id="{key}">{escaped(run.label)}: {escaped(_mode_and_device(figures))}</h2>'
    told = [f"{name} {version}" for name, version in figures["versions"].items()]
    told += [f"platform {figures['platform']}"] if figures["platform"] else []
    yield f'<p class="soft">{escaped(", ".join(told))}</p>'
    level = 2 if alone else 3
    sections: tuple[tuple[str, Callable[[Run], str]], ...] = (
        ("What deserves a look", lambda run: findings(findings_of(run.figures))),
        ("In figures", _tiles),
        ("Graphs", _graphs),
        ("Time of a step over its size", _times),
        ("Steps by reason", _reasons),
        ("Padding over batch size", _padding),
        ("Where capture time went", _captures),
        ("Memory over captures", _memory),
        ("Memory that graphs read", _reads),
    )
    for title, make in sections:
        body = make(run)
        if body:
            yield f"<h{level}>{title}</h{level}>{body}"


def _totals(figures: Figures) -> dict[str, float]:
    """Figures by which two runs are compared."""
    steps = sum(each["steps"] for each in figures["steps"])
    hits = sum(each["steps"] for each in figures["steps"] if each["reason"] == "HIT")
    quarantined = sum(graph["trial"] == "quarantined" for graph in figures["graphs"])
    return {
        "graphs": len(figures["graphs"]),
        "quarantined": quarantined,
        "steps": steps,
        "eager": steps - hits,
        "share": hits / steps if steps else 0.0,
        "padding": figures["padding"],
        "capture_s": figures["capture_s"],
        "bytes": (figures["pool_bytes"] or 0) + (figures["driver_bytes"] or 0),
    }


def _tiles(run: Run) -> str:
    totals, figures = _totals(run.figures), run.figures
    quarantined, dropped = int(totals["quarantined"]), len(figures["dropped"])
    remarks = [f"{quarantined} in quarantine"] if quarantined else []
    remarks += [f"{dropped} dropped"] if dropped else []
    driver, beforehand = figures["driver_bytes"], taken_and_predicted(figures)
    memory = [f"{size_text(driver)} of the driver"] if driver else []
    memory += [f"{beforehand[1]} predicted"] if beforehand else []
    return tiles(
        [
            ("Graphs", f"{int(totals['graphs']):,}", ", ".join(remarks)),
            ("Steps", f"{int(totals['steps']):,}", ""),
            ("By graphs", f"{totals['share']:.1%}", f"{int(totals['eager']):,} eager"),
            (
                "Padding",
                f"{totals['padding']:.1%}",
                f"{figures['live_tokens']:,} live of {figures['padded_tokens']:,}",
            ),
            ("Capture", seconds_text(totals["capture_s"]), ""),
            (
                "Graph memory",
                size_text(int(totals["bytes"])),
                ", ".join(memory),
            ),
        ]
    )


def _graphs(run: Run) -> str:
    graphs = run.figures["graphs"]
    if not graphs:
        return '<p class="soft">None is captured.</p>'
    most_steps = max(graph["steps"] + _eager_of(graph) for graph in graphs) or 1
    most_s = max(graph["capture_s"] for graph in graphs) or 1.0
    most_bytes = max(_bytes(graph) for graph in graphs) or 1
    rows = []
    for graph in graphs:
        seconds, size = graph["capture_s"], _bytes(graph)
        rows.append(
            [
                Cell(graph["graph"], graph["tokens"]),
                _replays(graph, most_steps),
                _padding_cell(graph),
                Cell(seconds_text(seconds), seconds, "n", bar=[("live", seconds / most_s, "")]),
                Cell(size_text(size), size, "n", bar=[("live", size / most_bytes, "")]),
                Cell(graph["trial"], None, _badge(graph["trial"]), graph["failure"] or ""),
            ]
        )
    heads = [
        ("Graph", ""), ("Replays", "n"), ("Padding", "n"), ("Capture", "n"), ("Memory", "n"),
        ("Trial", ""),
    ]  # fmt: skip
    return table("Graphs", heads, rows, sortable=True)


def _badge(trial: str) -> str:
    """The classes of a trial's status, of which two have a colour."""
    return f"badge {trial}" if trial in ("tried", "quarantined") else "badge"


def _eager_of(graph: Figures) -> int:
    """Batches for which the graph was chosen, but which ran eagerly."""
    return sum(graph["not_served"].values())


def _replays(graph: Figures, most: int) -> Cell:
    steps, eager = graph["steps"], _eager_of(graph)
    text = f"{steps:,} (+{eager:,} eager)" if eager else f"{steps:,}"
    bar = [("live", steps / most, f"{steps} replays"), ("eager", eager / most, f"{eager} eager")]
    return Cell(text, steps, "n hot" if eager else "n", bar=bar)


def _padding_cell(graph: Figures) -> Cell:
    share = _share(graph)
    if share is None:
        return Cell("", 0.0, "n")
    css = "n hot" if share >= _MUCH_PADDING else "n"
    return Cell(f"{share:.0%}", share, css, bar=[("pad", share, "padding")])


def _share(graph: Figures) -> float | None:
    """The share of a graph's rows that was padding; None if it had no batch."""
    rows = graph["padded_tokens"]
    return 1 - graph["live_tokens"] / rows if rows else None


def _bytes(graph: Figures) -> int:
    return max((graph["pool_bytes"] or 0) + (graph["driver_bytes"] or 0), 0)


def _times(run: Run) -> str:
    """The curves and the table of a step by its graph, and of its forward run eagerly."""
    graphs = sorted(run.figures["graphs"], key=lambda graph: (graph["mode"], graph["tokens"]))
    timed = [graph for graph in graphs if graph["replay_s"] and graph["eager_s"]]
    untimed = len(graphs) - len(timed)
    how = "runner.measure() times the smallest and the largest of each mode, measure(sizes) others."
    if not graphs:
        return ""
    if not timed:
        return f'<p class="soft">No graph was timed. {how}</p>'
    kinds: dict[str, list[Figures]] = {}
    for graph in timed:
        kinds.setdefault(_kind(graph), []).append(graph)
    figures = "".join(_curves_of(kind, each) for kind, each in [*kinds.items()][:_MOST_CURVES])
    rows = []
    for graph in timed:
        by_graph, eager, gain = gain_of(graph)
        times = graph["eager_s"] / graph["replay_s"]
        rows.append(
            [
                Cell(graph["graph"], graph["tokens"]),
                Cell(by_graph, graph["replay_s"], "n"),
                Cell(eager, graph["eager_s"], "n"),
                Cell(gain, times, "badge" if gain.endswith("times") else "badge hot"),
            ]
        )
    heads = [("Graph", ""), ("By graph", "n"), ("Eager", "n"), ("Gain", "")]
    rest = f'<p class="soft">{counted(untimed, "graph")} not timed. {how}</p>' if untimed else ""
    return (
        keys(("live", "by its graph"), ("eager", "the forward run eagerly"))
        + f'<div class="charts">{figures}</div>'
        + table("Time of a step over its size", heads, rows, sortable=True)
        + rest
    )


def _layers(times: LayerTimes) -> str:
    """The table of the layers of one graph."""
    total = times.total_ms or 1.0
    rows = [
        [
            Cell(row.name, at, "mono"),
            Cell(css="wide", bar=[("live", row.ms / total, f"{row.ms:.4f} ms")]),
            Cell(f"{row.ms:.4f} ms", row.ms, "n"),
            Cell(f"{row.ms / total:.0%}", row.ms / total, "n"),
        ]
        for at, row in enumerate(times.rows)
    ]
    title = f"Layers of a replay of {times.graph}: {times.total_ms:.4f} ms"
    heads = [("Module", ""), ("", "wide"), ("Time", "n"), ("Share", "n")]
    return f"<h2>{escaped(title)}</h2>" + table(title, heads, rows, sortable=True)


def _kind(graph: Figures) -> str:
    """The name of a graph without its size: of such graphs a curve is made."""
    return re.sub(r"\d+ (tokens|rows|reqs) ?", "", graph["graph"]).replace(" []", "")


def _curves_of(kind: str, graphs: Sequence[Figures]) -> str:
    """The two curves of one kind, over the logarithm of the size."""
    sizes = sorted({graph["tokens"] for graph in graphs})
    most = max(max(graph["replay_s"], graph["eager_s"]) for graph in graphs)
    places = [math.log(size) for size in sizes]
    span = places[-1] - places[0] or 1.0
    right = {size: (at - places[0]) / span for size, at in zip(sizes, places, strict=True)}
    lines = [
        (
            css,
            [
                (right[g["tokens"]], g[name] / most, f"{g['graph']}: {seconds_text(g[name])} {how}")
                for g in graphs
            ],
        )
        for css, name, how in (("live", "replay_s", "by graph"), ("eager", "eager_s", "eagerly"))
    ]
    heights = [seconds_text(most * part) if part else "0" for part in (0, 0.5, 1)]
    label = f"{kind}: time of a step over its size; the table below has the same figures"
    drawn = curves(label, lines, [(right[size], f"{size:,}") for size in sizes], heights)
    return f"<figure><figcaption>{escaped(kind)}</figcaption>{drawn}</figure>"


def _memory(run: Run) -> str:
    """The curve of the memory that all graphs took, after each capture."""
    graphs = sorted(run.figures["graphs"], key=lambda graph: graph["began_s"])
    totals = [
        *itertools.accumulate(
            (graph["pool_bytes"] or 0) + (graph["driver_bytes"] or 0) for graph in graphs
        )
    ]
    most = max(totals, default=0)
    if most <= 0 or len(graphs) < 2:
        return ""
    last = len(graphs) - 1
    points = [
        (at / last, total / most, f"{graph['graph']}: {size_text(total)}")
        for at, (graph, total) in enumerate(zip(graphs, totals, strict=True))
    ]
    below = [(at / last, f"{at + 1}") for at in range(len(graphs))]
    heights = [size_text(most * part // 2) if part else "0" for part in (0, 1, 2)]
    told = (
        f"{size_text(totals[0])} after the first graph, {size_text(totals[-1])} after all "
        f"{len(graphs)}, from the largest to the smallest of each mode."
    )
    return f'<p class="soft">{told}</p>' + curves(told, [("live", points)], below, heights)


def _reasons(run: Run) -> str:
    steps = run.figures["steps"]
    total = sum(each["steps"] for each in steps)
    if not total:
        return '<p class="soft">There was no step.</p>'
    rows = []
    for each in sorted(steps, key=lambda each: -each["steps"]):
        hit, share = each["reason"] == "HIT", each["steps"] / total
        sizes = sorted(tokens for tokens, _ in each["sizes"])
        span = "" if not sizes else f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else f"{sizes[0]}"
        bar = [("live" if hit else "eager", share, f"{share:.1%}")]
        rows.append(
            [
                Cell(each["reason"], None, "" if hit else "hot", below=each["meaning"]),
                Cell(css="wide", bar=bar),
                Cell(f"{each['steps']:,}", each["steps"], "n"),
                Cell(f"{share:.1%}", share, "n"),
                Cell(span, None, "n"),
            ]
        )
    heads = [
        ("Reason", ""), ("", "wide"), ("Steps", "n"), ("Share", "n"), ("Batch sizes", "n")
    ]  # fmt: skip
    legend = keys(("live", "by a graph"), ("eager", "eagerly"))
    return legend + table("Steps by reason", heads, rows)


def _padding(run: Run) -> str:
    """The chart of live and padded rows, by the live tokens of the batch."""
    by_size: dict[int, list[int]] = {}
    for graph in run.figures["graphs"]:
        for tokens, count in graph["sizes"]:
            entry = by_size.setdefault(tokens, [0, 0, 0])
            entry[0] += count
            entry[1] += tokens * count
            entry[2] += (graph["tokens"] - tokens) * count
    if not by_size:
        return ""
    groups = _grouped(sorted(by_size), _MOST_ROWS)
    rows, sums = [], []
    for group in groups:
        sums.append([sum(by_size[tokens][at] for tokens in group) for at in range(3)])
    most = max(live + pad for _, live, pad in sums) or 1
    for group, (steps, live, pad) in zip(groups, sums, strict=True):
        share = pad / (live + pad) if live + pad else 0.0
        name = f"{group[0]}" if len(group) == 1 else f"{group[0]} to {group[-1]}"
        bar = [
            ("live", live / most, f"{live:,} live"),
            ("pad", pad / most, f"{pad:,} padding"),
        ]
        rows.append(
            [
                Cell(name, group[0], "n"),
                Cell(css="wide", bar=bar),
                Cell(f"{steps:,}", steps, "n"),
                Cell(f"{live + pad:,}", live + pad, "n"),
                Cell(f"{share:.0%}", share, "n hot" if share >= _MUCH_PADDING else "n"),
            ]
        )
    heads = [("Batch", "n"), ("", "wide"), ("Steps", "n"), ("Rows", "n"), ("Padding", "n")]
    legend = keys(("live", "live rows"), ("pad", "padding rows"))
    return legend + table("Padding over batch size", heads, rows)


def _grouped(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Sizes in at most so many groups of neighbours."""
    each = -(-len(sizes) // most)
    return [list(sizes[at : at + each]) for at in range(0, len(sizes), each)]


def _captures(run: Run) -> str:
    graphs = sorted(run.figures["graphs"], key=lambda graph: -graph["capture_s"])
    if not graphs:
        return ""
    total = sum(graph["capture_s"] for graph in graphs) or 1.0
    shown, rest = graphs[:_MOST_ROWS], graphs[_MOST_ROWS:]
    named = [(g["graph"], g["warm_up_s"], g["capture_s"]) for g in shown]
    if rest:
        warm, seconds = (sum(g[name] for g in rest) for name in ("warm_up_s", "capture_s"))
        named.append((f"{len(rest)} others", warm, seconds))
    most = max(seconds for _, _, seconds in named) or 1.0
    rows = [
        [
            Cell(name),
            Cell(
                css="wide",
                bar=[
                    ("warm", warm / most, f"warm-up {seconds_text(warm)}"),
                    ("live", (seconds - warm) / most, f"capture {seconds_text(seconds - warm)}"),
                ],
            ),
            Cell(seconds_text(warm), warm, "n"),
            Cell(seconds_text(seconds - warm), seconds - warm, "n"),
            Cell(f"{seconds / total:.0%}", seconds / total, "n"),
        ]
        for name, warm, seconds in named
    ]
    heads = [("Graph", ""), ("", "wide"), ("Warm-up", "n"), ("Capture", "n"), ("Share", "n")]
    legend = keys(("warm", "warm-up"), ("live", "capture"))
    return legend + table("Where capture time went", heads, rows)


def _reads(run: Run) -> str:
    reads = sorted(run.figures["trust"]["reads"], key=lambda use: -use["bytes"])
    if not reads:
        return ""
    rows = [
        [
            Cell(use["name"] or "no name was found", None, "mono"),
            Cell(f"{use['dtype'].removeprefix('torch.')} {use['shape']}", None, "mono"),
            Cell(size_text(use["bytes"]), use["bytes"], "n"),
            Cell("written" if use["written"] else "read"),
            Cell("only graphs have it" if use["moved"] else "", None, "hot"),
        ]
        for use in reads[:_MOST_ROWS]
    ]
    heads = [("Name", ""), ("Tensor", ""), ("Bytes", "n"), ("Use", ""), ("", "")]
    total = size_text(sum(use["bytes"] for use in reads))
    return (
        f"<details><summary>{counted(len(reads), 'tensor')}, {total}</summary>"
        + table("Memory that graphs read", heads, rows)
        + "</details>"
    )


# Two runs ----------------------------------------------------------------------------------------


def _compared(first: Run, second: Run) -> Iterator[str]:
    yield "<h2>Both runs</h2>"
    before, after = _totals(first.figures), _totals(second.figures)
    # Name, how it is written, and whether less of it is better (None: neither).
    figures: tuple[tuple[str, str, Callable[[float], str], bool | None], ...] = (
        ("graphs", "Graphs", _count, None),
        ("quarantined", "Graphs in quarantine", _count, True),
        ("steps", "Steps", _count, None),
        ("share", "Steps by graphs", _percent, False),
        # Of two runs one is longer, so that only the share of eager steps is better or worse.
        ("eager", "Eager steps", _count, None),
        ("padding", "Padding", _percent, True),
        ("capture_s", "Capture", seconds_text, True),
        ("bytes", "Graph memory", lambda value: size_text(int(value)), True),
    )
    rows = [
        [
            Cell(title),
            Cell(write(before[key]), before[key], "n"),
            Cell(write(after[key]), after[key], "n"),
            _change(before[key], after[key], write, less_is_better),
        ]
        for key, title, write, less_is_better in figures
    ]
    heads = [("", ""), (first.label, "n"), (second.label, "n"), ("Change", "")]
    yield table("Both runs", heads, rows)
    yield "<h3>Graph by graph</h3>"
    yield _graph_by_graph(first, second)


def _count(value: float) -> str:
    return f"{int(value):,}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _change(
    before: float, after: float, write: Callable[[float], str], less_is_better: bool | None
) -> Cell:
    if before == after:
        return Cell("same", None, "soft")
    size = write(abs(after - before)).replace("%", " points")
    difference = ("+" if after > before else "-") + size
    if less_is_better is None:
        return Cell(difference, None, "soft")
    better = (after < before) is less_is_better
    words = f"{difference}, {'better' if better else 'worse'}"
    return Cell(words, None, f"level {_css(better=better)}")


def _css(*, better: bool) -> str:
    return "good" if better else "error"


def _graph_by_graph(first: Run, second: Run) -> str:
    both = [{graph["graph"]: graph for graph in run.figures["graphs"]} for run in (first, second)]
    names = list(dict.fromkeys([*both[0], *both[1]]))
    rows = []
    for name in names:
        cells = [Cell(name)]
        pair = [graphs.get(name) for graphs in both]
        for write in (_steps_of, _padding_of, _seconds_of, _size_of):
            cells += [Cell("none" if each is None else write(each), None, "n") for each in pair]
        rows.append(cells)
    heads = [("Graph", "")]
    for title in ("Replays", "Padding", "Capture", "Memory"):
        heads += [(f"{title} {label}", "n") for label in ("1", "2")]
    legend = f'<p class="soft">1: {escaped(first.label)}, 2: {escaped(second.label)}</p>'
    return legend + table("Graph by graph", heads, rows)


def _steps_of(graph: Figures) -> str:
    return f"{graph['steps']:,}"


def _padding_of(graph: Figures) -> str:
    share = _share(graph)
    return "" if share is None else f"{share:.0%}"


def _seconds_of(graph: Figures) -> str:
    return seconds_text(graph["capture_s"])


def _size_of(graph: Figures) -> str:
    return size_text(_bytes(graph))
