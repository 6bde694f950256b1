"""What deserves a look in a report, and what to try: rules over the plain data of a report.

A rule names a fault only where it costs something: a graph in quarantine, a step that ran eagerly
although graphs are on, rows that were computed for nothing. What is by design is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.observe.figures import in_its_words

Figures = Mapping[str, Any]
"""The data of `RunnerReport.to_dict()`, of this process or from a file."""

_MUCH_PADDING = 0.4
"""A larger share of padding is too much; 5 rows in a graph of 8 have less."""
_LEAST_SHARE = 0.05
"""Such padding is a finding if it is at least this share of all computed rows."""
_IDLE_STEPS = 200
"""After so many steps, a graph that served none is not needed."""

_ADVICE = {
    "NO_GRAPH": "print(runner.plan) lists the kinds of graphs; plan one for this kind of batch "
    "(mode=, query_lens=, loras=, bounds=, variants=), or for more requests (max_num_reqs=)",
    "EXCLUDED": "Batch(exclude=) or the host's exclude= left out the modes that could serve it",
    "PADDING": "raise GraphOptions(max_padding=), or add sizes nearer to these batches",
    "NOT_CAPTURED": "call runner.capture(), or capture_next() until nothing is left",
    "RANKS_DISAGREE": "agree on a graph that every rank has: same sizes and budget on all ranks",
    "MISSING_GRAPH": "a wrapper inside the forward was replaced, or has no graph; recapture()",
    "SETTINGS_CHANGED": "call capture() under the settings of the steps (autocast, gradients, ...)",
    "FAILED": "the error of these steps was raised to the caller; see the host's log",
    "NO_CONTEXT": "call wrappers inside a forward context",
    "SEALED": "capture this descriptor before seal(), or plan it",
}


@dataclass(frozen=True)
class Finding:
    """One thing that deserves a look: `level` says how much, `advice` what to try."""

    level: Literal["error", "warning", "note"]
    what: str
    """A line."""
    why: str
    """The lines below it."""
    advice: str

    def __str__(self) -> str:
        return self.what


def findings_of(figures: Figures) -> tuple[Finding, ...]:
    """All findings of a report, the worst first."""
    rules = (_quarantines, _dropped, _eager, _padding, _memory, _trials, _ended, _idle)
    by_rule = [
        Finding(each.level, *(in_its_words(figures, t) for t in (each.what, each.why, each.advice)))
        for rule in rules
        for each in rule(figures)
    ]
    levels = ("error", "warning", "note")
    return tuple(sorted(by_rule, key=lambda finding: levels.index(finding.level)))


def _quarantines(figures: Figures) -> Iterator[Finding]:
    by_failure: dict[str, list[Figures]] = {}
    for graph in figures["graphs"]:
        if graph["failure"] is not None:
            by_failure.setdefault(graph["failure"], []).append(graph)
    for failure, graphs in by_failure.items():
        steps = sum(graph["not_served"].get("QUARANTINED", 0) for graph in graphs)
        lines = [line.strip() for line in failure.splitlines()]
        advice = [line.removeprefix("try: ") for line in lines if line.startswith("try: ")]
        yield Finding(
            "error",
            f"{_graphs(graphs)} in quarantine: {counted(steps, 'step')} ran eagerly",
            "\n".join(line for line in lines if not line.startswith("try: ")),
            f"{advice[0] if advice else 'mend what it says'}; then recapture()",
        )


def _ended(figures: Figures) -> Iterator[Finding]:
    """Quarantines of before: the steps stay counted, and `recapture()` forgets why."""
    ended = [
        graph
        for graph in figures["graphs"]
        if graph["failure"] is None and graph["not_served"].get("QUARANTINED")
    ]
    if ended:
        steps = sum(graph["not_served"]["QUARANTINED"] for graph in ended)
        yield Finding(
            "note",
            f"a quarantine of {_graphs(ended)} has ended: {counted(steps, 'step')} ran eagerly",
            "recapture() ended it: the graphs stand for the forward as it is now",
            "nothing, if the change was meant; its GraphQuarantinedWarning says what it was",
        )


def _dropped(figures: Figures) -> Iterator[Finding]:
    dropped = figures["dropped"]
    if dropped:
        yield Finding(
            "error",
            f"{_graphs(dropped)} did not fit on the device",
            dropped[0]["reason"],
            "capture fewer sizes, or leave the device more memory; these batches take a larger "
            "graph, or run eagerly",
        )


def _eager(figures: Figures) -> Iterator[Finding]:
    total = sum(each["steps"] for each in figures["steps"])
    for each in figures["steps"]:
        reason, steps = each["reason"], each["steps"]
        # Quarantines have a finding of their own; mode NONE was asked for.
        if reason in ("HIT", "QUARANTINED", "MODE_NONE"):
            continue
        came_to = "raised" if reason == "FAILED" else "ran eagerly"
        yield Finding(
            "warning",
            f"{counted(steps, 'step')} of {total:,} {came_to}, as {reason}"
            f"{_sizes_text(each['sizes'])}",
            each["meaning"],
            _ADVICE.get(reason) or _larger(figures, each["sizes"]),
        )


def _larger(figures: Figures, sizes: Sequence[Sequence[int]]) -> str:
    largest = max((graph["tokens"] for graph in figures["graphs"]), default=0)
    tokens = max((tokens for tokens, _ in sizes), default=0)
    if not tokens:
        return "plan a larger size"
    return (
        f"plan a size of {tokens} (the largest is {largest}): add it to sizes=, or raise "
        "max_num_tokens= or max_num_reqs="
    )


def _padding(figures: Figures) -> Iterator[Finding]:
    """Findings for batches that are much smaller than their graph."""
    computed = figures["padded_tokens"]
    for graph in figures["graphs"]:
        rows = graph["tokens"]
        sizes = [
            (size, count) for size, count in graph["sizes"] if rows - size >= _MUCH_PADDING * rows
        ]
        steps = sum(count for _, count in sizes)
        padding = sum((rows - size) * count for size, count in sizes)
        if not graph["steps"] or not sizes or padding < _LEAST_SHARE * computed:
            continue
        best, saved = _best_size(rows, sizes)
        yield Finding(
            "warning",
            f"{counted(steps, 'step')}{_sizes_text(sizes)} ran in {graph['graph']}: "
            f"{padding / (rows * steps):.0%} padding",
            f"{padding:,} of {computed:,} computed rows are their padding",
            f"add {best} to sizes=, which saves {saved:,} rows, or give traffic= to have sizes "
            "fitted; GraphOptions(max_padding=) runs such batches eagerly",
        )


def _best_size(rows: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The one further size that saves most rows of these batches, and how many."""
    saved = {
        best: sum((rows - best) * count for size, count in sizes if size <= best)
        for best, _ in sizes
    }
    best = max(saved, key=lambda size: saved[size])
    return best, saved[best]


def _memory(figures: Figures) -> Iterator[Finding]:
    held, waits = figures["trust"]["only_graphs_bytes"], figures["staging_waits"]
    if held:
        names = [use["name"] or "memory without a name" for use in figures["trust"]["reads"]]
        moved = [n for n, use in zip(names, figures["trust"]["reads"], strict=True) if use["moved"]]
        yield Finding(
            "warning",
            f"graphs keep {size_text(held)} alive that the forward has let go of",
            ", ".join(moved[:4]),
            "recapture() after weights were replaced",
        )
    if waits:
        yield Finding(
            "note",
            f"the host waited in {counted(waits, 'step')} for the memory that stages inputs",
            "the device was behind by as many steps as there are staging buffers",
            "nothing, where the device is the bottleneck",
        )


def _trials(figures: Figures) -> Iterator[Finding]:
    shaky = [graph for graph in figures["graphs"] if not graph["deterministic"]]
    if shaky:
        yield Finding(
            "note",
            f"{_graphs(shaky)} gave other values in two eager runs of one step",
            "the eager result, with which a trial compares the replay, varies from run to run",
            "torch.use_deterministic_algorithms(True), to see which operator it is",
        )
    # Only a trial that could not be made leaves a note on an untried graph.
    unchecked = [g for g in figures["graphs"] if g["trial"] == "untried" and g["notes"]]
    if unchecked:
        yield Finding(
            "warning",
            f"{_graphs(unchecked)} never checked: replays were not compared with eager steps",
            unchecked[0]["notes"][0],
            "leave the KV cache less memory; or Host(example=), which checks graphs in capture()",
        )


def _idle(figures: Figures) -> Iterator[Finding]:
    if sum(each["steps"] for each in figures["steps"]) < _IDLE_STEPS:
        return
    idle = [graph for graph in figures["graphs"] if not (graph["sizes"] or graph["steps"])]
    if idle and len(idle) < len(figures["graphs"]):
        seconds = sum(graph["capture_s"] for graph in idle)
        yield Finding(
            "note",
            f"{_graphs(idle)} served no step; capturing took {seconds_text(seconds)}",
            "no batch was dispatched to them so far",
            "leave their sizes out, if the traffic stays like this",
        )


def _graphs(graphs: Sequence[Figures]) -> str:
    """The name of the first graph, and how many more there are."""
    first, more = graphs[0]["graph"], len(graphs) - 1
    return f"{first} and {more} more" if more else str(first)


def _sizes_text(sizes: Sequence[Sequence[int]]) -> str:
    tokens = sorted(size for size, _ in sizes)
    if not tokens:
        return ""
    span = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
    return f" ({span} tokens)"
