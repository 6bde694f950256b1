"""The report of a runner as plain data, as text with what deserves a look, and as a file.

`report_data` is the one form that leaves the process: plain data, with the findings in it. Text,
saved files and pages are made of it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphrt._version import __version__
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.texts import aligned, counted, seconds_text, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.checks import TrialRecord
from graphrt.core.runner.graph_table import GraphRecord
from graphrt.core.runner.report import RunnerReport, TrustReport
from graphrt.core.trust.compare import listed
from graphrt.observe.findings import Finding, findings_of

FORMAT = 2
"""Of `report_data()`: it grows when a key goes or means something else. New keys may come at any
time."""

_MOST_ROWS = 24
"""Graphs with a row; of more, those that took most steps have one."""
_MARKS = {"error": "!!", "warning": "! ", "note": "- "}


def report_data(report: RunnerReport) -> dict[str, Any]:
    """A report as plain data, for `json` and for programs; see `docs/how-to/observing.md`."""
    figures = _figures(report)
    return {**figures, "findings": [asdict(each) for each in findings_of(figures)]}


def findings(report: RunnerReport) -> tuple[Finding, ...]:
    """What deserves a look: quarantines, eager steps, padding, each with something to try; the
    worst first."""
    return findings_of(_figures(report))


def report_text(report: RunnerReport | Mapping[str, Any]) -> str:
    """A report, or the plain data of one, in lines of text: what deserves a look first, then a row
    for each graph, then totals."""
    figures = report_data(report) if isinstance(report, RunnerReport) else report
    return "\n".join(_lines(figures))


def save_report(path: str | os.PathLike[str], report: RunnerReport) -> None:
    """Write `report_data()` to a file as JSON, of which `graphrt report` makes a page."""
    path = Path(path)
    if path.suffix in (".html", ".htm"):
        raise InvalidOptionError(
            "a report is saved as JSON",
            got=str(path),
            expected="a name such as run.json",
            advice="graphrt.observe.write_page(path, report) writes a page",
        )
    path.write_text(json.dumps(report_data(report), indent=1) + "\n", encoding="utf-8")


# Plain data ---------------------------------------------------------------------------------------


def _figures(report: RunnerReport) -> dict[str, Any]:
    began = min((record.began_s for record in report.graphs), default=0.0)
    trials = {(each.mode, each.descriptor): each for each in report.trust.trials}
    captured = {(each.mode, each.descriptor) for each in report.graphs}
    dropped = {(each.mode, each.descriptor) for each in report.dropped}
    missing = [key for key in report.steps if key not in captured | dropped]
    return {
        "graphrt_report": FORMAT,
        "versions": {"graphrt": __version__, "torch": torch.__version__},
        "mode": report.mode.name,
        "device": report.device,
        "capture_s": report.capture_s,
        "pool_bytes": report.pool_bytes,
        "driver_bytes": report.driver_bytes,
        "graphs": [_graph(report, record, trials, began) for record in report.graphs],
        "dropped": [
            {**_named(each.mode, each.descriptor), "reason": each.reason} for each in report.dropped
        ],
        "missing": [_named(*key) for key in missing],
        "steps": [
            {
                "reason": reason.name,
                "meaning": reason.value,
                "steps": count,
                "sizes": _pairs(report.sizes.get(reason, {})),
            }
            for reason, count in report.reasons.items()
            if count
        ],
        "live_tokens": report.live_tokens,
        "padded_tokens": report.padded_tokens,
        "padding": report.padding,
        "staging_waits": report.staging_waits,
        "trust": _trust(report.trust),
    }


def _graph(
    report: RunnerReport,
    record: GraphRecord,
    trials: dict[CaptureKey, TrialRecord],
    began: float,
) -> dict[str, Any]:
    key = record.mode, record.descriptor
    sizes, trial = report.sizes.get(key, {}), trials.get(key)
    return {
        **_named(*key),
        "capture_s": record.capture_s,
        "warm_up_s": record.warm_up_s,
        "began_s": record.began_s - began,
        "pool_bytes": record.pool_bytes,
        "driver_bytes": record.driver_bytes,
        "streams": record.streams,
        "steps": report.steps.get(key, 0),
        "not_served": {why.name: n for why, n in report.not_served.get(key, {}).items()},
        "sizes": _pairs(sizes),
        "live_tokens": sum(tokens * count for tokens, count in sizes.items()),
        "padded_tokens": record.descriptor.num_tokens * sum(sizes.values()),
        "trial": "unchecked" if trial is None else trial.status,
        "tried_steps": 0 if trial is None else trial.steps,
        "deterministic": trial is None or trial.deterministic,
        "failure": None if trial is None else trial.failure,
        "notes": [] if trial is None else list(trial.notes),
    }


def _trust(trust: TrustReport) -> dict[str, Any]:
    """As plain data; trials are with their graphs."""
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


def _pairs(sizes: dict[int, int]) -> list[list[int]]:
    # Keys of JSON are strings.
    return [[tokens, count] for tokens, count in sizes.items()]


# Text -----


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
    yield from aligned([titles, *(_row(graph) for graph in graphs if graph in shown)])
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
