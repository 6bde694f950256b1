"""A report on a terminal: what deserves a look first, then a row for each graph, then totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.core.trust.compare import listed

_MOST_ROWS = 24
"""Graphs with a row; of more, those that took most steps have one."""
_MARKS = {"error": "!!", "warning": "! ", "note": "- "}


def report_text(figures: Mapping[str, Any]) -> str:
    """The plain data of a report, in lines of text."""
    return "\n".join(_lines(figures))


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    graphs, driver = figures["graphs"], figures["driver_bytes"]
    memory = [f"{size_text(figures['pool_bytes'])} of pool"] if figures["pool_bytes"] else []
    memory += [f"{size_text(driver)} of the driver"] if driver else []
    yield ", ".join(
        [
            f"{figures['mode']} on {figures['device'] or 'no device'}",
            counted(len(graphs), "graph"),
            f"captured in {seconds_text(figures['capture_s'])}",
            *memory,
        ]
    )
    if figures["unbroken"]:
        yield f"{figures['unbroken']} PIECEWISE without an eager break, captured as FULL ones"
    for finding in figures["findings"]:
        yield f"{_MARKS[finding['level']]} {finding['what']}"
        yield from (f"     {line}" for line in finding["why"].splitlines())
        yield f"     try: {finding['advice']}"
    if graphs:
        yield ""
        yield from _table(graphs)
        yield ""
    total = sum(each["steps"] for each in figures["steps"])
    reasons = ", ".join(f"{each['steps']:,} {each['reason']}" for each in figures["steps"])
    yield f"Steps: {total:,}" + (f": {reasons}" if reasons else "")
    if figures["padded_tokens"]:
        yield (
            f"Padding: {figures['padding']:.0%}, {figures['live_tokens']:,} live of "
            f"{figures['padded_tokens']:,} computed tokens"
        )
    trials = Counter(graph["trial"] for graph in graphs)
    yield "Trials: " + (", ".join(f"{n} {status}" for status, n in trials.items()) or "none")
    yield from _changes(figures["trust"])


def _changes(trust: Mapping[str, Any]) -> Iterator[str]:
    """How changes in Python are seen."""
    if not trust["glance_steps"]:
        return
    watched = trust["dicts_watched"]
    seen = f"{watched} dicts watched" if watched else f"not told of: {trust['not_watched']}"
    yield f"Changes in Python: {seen}; others seen after {trust['glance_steps']} steps at most"
    if trust["harmless"]:
        yield f"  make no difference, and are looked at no more: {listed(trust['harmless'])}"


def _table(graphs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shown = sorted(graphs, key=lambda graph: -graph["steps"])[:_MOST_ROWS]
    titles: tuple[str, ...] = "graph", "steps", "padding", "capture", "pool", "trial"
    rows = [titles, *(_row(graph) for graph in graphs if graph in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield "  ".join([f"{row[0]:<{widths[0]}}", *cells, row[-1]]).rstrip()
    if len(shown) < len(graphs):
        yield f"... and {len(graphs) - len(shown)} graphs with fewer steps"


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
    )
