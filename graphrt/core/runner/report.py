"""The report of a runner: figures of its captures and of its steps, as values."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphrt._version import __version__
from graphrt.core.base.files import write_whole
from graphrt.core.base.texts import aligned, counted, listed, printable, seconds_text, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.limit import LimitReport
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.findings import TrialRecord, TrustReport
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord, GraphTable

FORMAT = 2
"""The version of `to_dict()`: it grows when a key is removed or means something else. New keys may
come at any time."""

# The attributes of a report that `to_dict()` copies as they are.
_FIGURES = (
    *("device", "capture_s", "pool_bytes", "driver_bytes"),
    *("live_tokens", "padded_tokens", "padding", "staging_waits", "platform", "axis"),
)
_MOST_ROWS = 24
"""The most graphs with a row in the printed table, so that it fits on a screen: those that served
the most steps."""


@dataclass(frozen=True, repr=False)
class RunnerReport:
    """A snapshot of one runner; every figure is a count, in seconds or in bytes, as named.

    `print` shows it as a table. For its findings, plain data, files and pages see
    `docs/how-to/observing.md`. `steps` counts batches by graph, `reasons` by
    why they ran as they did; NO_CONTEXT and SEALED count calls of the runner's wrappers,
    MISSING_GRAPH steps. `live_tokens` and `padded_tokens` are over the steps that a graph served,
    or should have.
    """

    graphs: tuple[GraphRecord, ...]
    steps: dict[tuple[GraphMode, BatchDescriptor], int]
    reasons: dict[Reason, int]
    live_tokens: int
    pool_bytes: int | None
    dropped: tuple[DroppedGraph, ...] = ()
    """Planned graphs that did not fit on the device."""
    staging_waits: int = 0
    """Steps whose host had to wait until the memory that stages inputs was free again."""
    trust: TrustReport = field(default_factory=TrustReport)
    mode: GraphMode = GraphMode.NONE
    device: str = ""
    sizes: dict[tuple[GraphMode, BatchDescriptor] | Reason, dict[int, int]] = field(
        default_factory=dict
    )
    """Live tokens to batches: of those that were dispatched to a graph, whether it served them or
    not, and of those that no graph serves, by reason."""
    not_served: dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]] = field(
        default_factory=dict
    )
    """The batches that were dispatched to a graph and ran otherwise, such as QUARANTINED ones."""
    limit: LimitReport | None = None
    """What graphs hold under `max_graphs` or `graph_bytes`; None without a limit."""
    platform: str = ""
    """The platform's name, and the package that it is from if that is not graphrt."""
    uncompiled: tuple[str, ...] = ()
    """Why compiled modules ran uncompiled in steps: a line for each cause."""
    axis: str = "tokens"
    """"rows" if the inputs have rows, and none has tokens."""

    @property
    def capture_s(self) -> float:
        """The seconds of all captures."""
        return sum(record.capture_s for record in self.graphs)

    @property
    def driver_bytes(self) -> int | None:
        """What the driver took for the executables of all graphs: see `GraphRecord`."""
        figures = [each.driver_bytes for each in self.graphs if each.driver_bytes is not None]
        return sum(figures) if figures else None

    @property
    def padded_tokens(self) -> int:
        """The tokens that graphs computed, padding included; 0 if no live tokens were counted."""
        if not self.live_tokens:
            return 0
        steps = Counter(self.steps)
        for key, reasons in self.not_served.items():
            steps[key] += reasons.get(Reason.MISSING_GRAPH, 0)
        return sum(key[1].num_tokens * count for key, count in steps.items())

    @property
    def padding(self) -> float:
        """The share of the tokens that graphs computed which were padding, 0 to 1."""
        return 1 - self.live_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for `json` and for programs; see `docs/how-to/observing.md`."""
        trials = {(each.mode, each.descriptor): each for each in self.trust.trials}
        reached = {(each.mode, each.descriptor) for each in self.graphs}
        reached |= {(each.mode, each.descriptor) for each in self.dropped}
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "graphrt_report": FORMAT,
            "versions": {"graphrt": __version__, "torch": torch.__version__},
            "mode": self.mode.name,
            "graphs": [_graph(self, record, trials) for record in self.graphs],
            "dropped": [
                {**_named(each.mode, each.descriptor), "reason": each.reason}
                for each in self.dropped
            ],
            "missing": [_named(*key) for key in self.steps if key not in reached],
            "steps": [
                {
                    "reason": reason.name,
                    "meaning": reason.value,
                    "steps": count,
                    "sizes": [*map(list, self.sizes.get(reason, {}).items())],
                }
                for reason, count in self.reasons.items()
                if count
            ],
            "limit": self.limit and {**self.limit._asdict(), "line": str(self.limit)},
            "trust": _plain_trust(self.trust),
            "uncompiled": list(self.uncompiled),
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json()` to a file, of which `graphrt report` makes a page. Raises
        `InvalidOptionError` if it cannot be written, or is a link."""
        write_whole(path, self.to_json() + "\n", what="the report")

    def __str__(self) -> str:
        return printable("\n".join(report_lines(self.to_dict())))

    def __repr__(self) -> str:
        steps, hits = sum(self.reasons.values()), self.reasons.get(Reason.HIT, 0)
        return (
            f"RunnerReport({self.mode.name}, {len(self.graphs)} graphs, {steps} steps, {hits} by "
            "graphs)"
        )


def report_of(graphs: GraphTable, live_tokens: int, *, quick: bool = False) -> RunnerReport:
    """The figures of a runner's graphs, and of its steps with so many live tokens. A `quick` report
    says nothing of the memory that graphs read, which takes a walk to find."""
    setup, dispatcher = graphs.setup, graphs.dispatcher
    reasons = Counter(dispatcher.counts())
    for owner in graphs.owners():
        # MISSING_GRAPH is left to the dispatcher, which counts it once a step: wrappers count it
        # once for each piece.
        reasons.update({**owner.eager_calls, Reason.MISSING_GRAPH: 0})
    trust = graphs.checks.report(graphs, quick=quick)
    platform, specs = setup.pool.platform, setup.inputs.declared.specs.values()
    package, sizes = (
        type(platform).__module__.partition(".")[0],
        {s for x in specs for s in x.shape},
    )
    return RunnerReport(
        graphs=tuple(graphs.records),
        steps=dispatcher.hits(),
        reasons={reason: reasons[reason] for reason in Reason},
        live_tokens=live_tokens,
        pool_bytes=setup.pool.bytes(),
        dropped=graphs.dropped,
        staging_waits=setup.inputs.transport.waits,
        trust=replace(trust, mixes_rows=setup.host.mixes_rows),
        mode=setup.plan.mode,
        device=str(setup.pool.device),
        sizes=dispatcher.sizes(),
        not_served=dispatcher.not_served_by(),
        limit=None if graphs.limit is None else graphs.limit.report(),
        platform=platform.name + ("" if package == "graphrt" else f" of {package}"),
        uncompiled=tuple(line for module in setup.compiled for line in module.uncompiled),
        axis="rows" if "rows" in sizes and "tokens" not in sizes else "tokens",
    )


# Plain data ---------------------------------------------------------------------------------------


def _graph(
    report: RunnerReport, record: GraphRecord, trials: dict[CaptureKey, TrialRecord]
) -> dict[str, Any]:
    key = record.mode, record.descriptor
    sizes, trial = report.sizes.get(key, {}), trials.get(key, TrialRecord(*key))
    figures = {name: value for name, value in vars(record).items() if name != "descriptor"}
    return {
        **figures,
        **_named(*key),
        "began_s": record.began_s - min(each.began_s for each in report.graphs),
        "steps": report.steps.get(key, 0),
        "not_served": {why.name: n for why, n in report.not_served.get(key, {}).items()},
        "sizes": [*map(list, sizes.items())],  # keys of JSON are strings
        "live_tokens": sum(tokens * count for tokens, count in sizes.items()),
        "padded_tokens": record.descriptor.num_tokens * sum(sizes.values()),
        "trial": trial.status if key in trials else "unchecked",
        "tried_steps": trial.steps,
        "deterministic": trial.deterministic,
        "failure": trial.failure,
        "notes": list(trial.notes),
    }


def _plain_trust(trust: TrustReport) -> dict[str, Any]:
    """The findings on trust as plain data, without the trials: each stands in its graph's row."""
    unknown = trust.unknown
    return {
        "only_graphs_bytes": trust.only_graphs_bytes,
        "mixes_rows": trust.mixes_rows,
        "protected": list(trust.protected),
        "dicts_watched": trust.watched,
        "not_watched": trust.not_watched,
        "glance_steps": trust.glance_steps,
        "harmless": list(trust.harmless),
        "reads": [
            {**use._asdict(), "dtype": str(use.dtype), "shape": list(use.shape)}
            for use in trust.reads
        ],
        "unknown": None
        if unknown is None
        else {"blocks": list(map(str, unknown.blocks)), "unread": unknown.unread},
    }


def _named(mode: GraphMode, descriptor: BatchDescriptor) -> dict[str, Any]:
    return {
        "graph": f"{mode.name} [{descriptor}]",
        "mode": mode.name,
        "tokens": descriptor.num_tokens,
        "reqs": descriptor.num_reqs,
    }


# Text ---------------------------------------------------------------------------------------------


def report_lines(figures: Mapping[str, Any], between: Iterable[str] = ()) -> Iterator[str]:
    """`to_dict()` as lines of text: a title, the lines `between`, a table of graphs, totals."""
    graphs = figures["graphs"]
    title = (
        f"{figures['mode']} on {figures['device'] or 'no device'}, {counted(len(graphs), 'graph')}"
    )
    title += f", captured in {seconds_text(figures['capture_s'])}"
    for whose, size in (("pool", figures["pool_bytes"]), ("the driver", figures["driver_bytes"])):
        title += f", {size_text(size)} of {whose}" if size else ""
    yield title
    yield from between
    is_timed = any(graph.get("replay_s") for graph in graphs)
    if graphs:
        yield from _table(graphs, is_timed=is_timed)
    total = sum(each["steps"] for each in figures["steps"])
    reasons = ", ".join(f"{each['steps']:,} {each['reason']}" for each in figures["steps"])
    yield f"Steps: {total:,}" + (f": {reasons}" if reasons else "")
    if figures["padded_tokens"]:
        live, computed = figures["live_tokens"], figures["padded_tokens"]
        yield f"Padding: {figures['padding']:.0%}, {live:,} live of {computed:,} computed tokens"
    limit = figures.get("limit")  # older files lack it
    if isinstance(limit, Mapping):
        yield f"Limit: {limit.get('line')}"
    trials = Counter(graph["trial"] for graph in graphs)
    yield "Trials: " + (", ".join(f"{n} {status}" for status, n in trials.items()) or "none")
    yield from _changes(figures["trust"])
    yield from (f"Uncompiled: {line}" for line in figures["uncompiled"])
    if graphs and not is_timed:
        yield "Times: none; runner.measure() compares steps by graphs with eager ones"


def _table(graphs: Sequence[Mapping[str, Any]], *, is_timed: bool) -> Iterator[str]:
    """The graphs with the most steps, between empty lines."""
    shown = sorted(graphs, key=lambda graph: -graph["steps"])[:_MOST_ROWS]
    titles = ("graph", "steps", "padding", "capture", "pool", "trial", *GAIN_TITLES)
    rows = [titles, *(_row(graph) for graph in graphs if graph in shown)]
    yield from ("", *aligned(rows if is_timed else [row[: -len(GAIN_TITLES)] for row in rows]))
    if len(shown) < len(graphs):
        yield f"... and {len(graphs) - len(shown)} graphs with fewer steps"
    yield ""


def _changes(trust: Mapping[str, Any]) -> Iterator[str]:
    """Lines on how soon a change in Python is seen."""
    if not trust["glance_steps"]:
        return
    watched, delay = trust["dicts_watched"], f"within {trust['glance_steps']} steps"
    changed = "A Python value changed after the capture: noticed"
    if watched:
        yield f"{changed} at the next step in {watched} watched dicts, else {delay}"
    else:
        yield f"{changed} {delay} ({trust['not_watched']})"
    if trust["harmless"]:
        yield f"  make no difference, and are looked at no more: {listed(trust['harmless'])}"


def _row(graph: Mapping[str, Any]) -> tuple[str, ...]:
    rows, size = graph["padded_tokens"], graph["pool_bytes"]
    eager = sum(graph["not_served"].values())
    return (
        graph["graph"],
        f"{graph['steps']:,}" + (f" (+{eager:,} eager)" if eager else ""),
        f"{1 - graph['live_tokens'] / rows:.0%}" if rows else "",
        seconds_text(graph["capture_s"]),
        "" if size is None else size_text(size),
        graph["trial"],
        *gain_of(graph),
    )


GAIN_TITLES = ("by graph", "eager", "gain")
"""The titles of the columns of `gain_of`."""


def gain_of(graph: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of one graph in `to_dict()`: a step by it, its forward eagerly, and the gain, as texts."""
    by_graph, eager = graph.get("replay_s"), graph.get("eager_s")
    if not by_graph or not eager:
        return "", "", "not timed"
    gain = eager / by_graph
    text = f"{gain:.1f} times" if gain >= 1.05 else f"no gain: eager takes {seconds_text(eager)}"
    return seconds_text(by_graph), seconds_text(eager), text
