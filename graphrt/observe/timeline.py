"""`trace`: the steps, captures and trials of runners as a timeline for Perfetto.

The file is in Chrome's trace format (https://ui.perfetto.dev opens it). Each runner is a process
with four tracks: captures and trials, steps by graphs, eager steps, findings. Captures that were
over before the trace are drawn right before its beginning. The report of each runner is in the file
too, so that `graphrt report trace.json` makes a page of the run.

Times are the host's. On a device a step returns once it is launched. torch's profiler shows what
the device does: it gets a range for every step and capture.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.files import write_whole
from graphrt.core.base.option_values import check_kind, count_of, refused
from graphrt.core.base.texts import counted
from graphrt.core.runner.report import RunnerReport
from graphrt.observe.findings import Finding, findings_of
from graphrt.observe.tap import Observer, SpanSeen, StepSeen, attach

MOST_STEPS = 100_000
"""Steps that a trace keeps of each runner, the last ones."""
TRACKS = ("captures and trials", "steps by graphs", "eager steps", "findings")
_CAPTURES, _STEPS, _EAGER, _FINDINGS = range(len(TRACKS))

Event = dict[str, Any]


def trace(
    path: str | os.PathLike[str],
    *runners: GraphRunner[Any],
    most_steps: int = MOST_STEPS,
    nvtx: bool = False,
) -> Trace:
    """Observe `runners` in a `with` block and write a timeline to `path` at its end, also after an
    error. The last `most_steps` steps of each are kept. With `nvtx` steps and captures are NVTX
    ranges too, for Nsight Systems.

    Raises `InvalidOptionError` for anything but runners, for `nvtx` without a CUDA device, and at
    the end of the block for a file that cannot be written, or is a link.
    """
    return Trace(path, runners, most_steps=most_steps, nvtx=nvtx)


class Trace(AbstractContextManager["Trace"]):
    """A timeline under way: see `trace`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        runners: Iterable[GraphRunner[Any]],
        *,
        most_steps: int = MOST_STEPS,
        nvtx: bool = False,
    ) -> None:
        try:
            self.path = Path(path)
        except TypeError as error:
            advice = 'trace("trace.json", runner)'
            raise refused("a trace needs a path", path, "a str or a path", advice) from error
        self._runners = tuple(runners)
        if not self._runners:
            raise InvalidOptionError(
                "trace() got something that is no runner",
                got="none",
                advice='trace("trace.json", runner)',
            )
        for runner in self._runners:
            check_kind("runner", runner, GraphRunner, optional=False, example="trace(path, runner)")
        if nvtx and not torch.cuda.is_available():
            raise InvalidOptionError(
                "NVTX ranges need a CUDA device",
                got="nvtx=True, and none is available",
                advice="nvtx=False; torch's profiler sees the ranges of steps in any case",
            )
        most = count_of("most_steps", most_steps, least=1)
        self._tracks = [_Track(most, nvtx=nvtx) for _ in self._runners]
        self._detach: list[Callable[[], None]] = []

    def __enter__(self) -> Trace:
        self._detach = [
            attach(runner, track) for runner, track in zip(self._runners, self._tracks, strict=True)
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for detach in self._detach:
            detach()
        write_whole(self.path, json.dumps(self.to_dict()), what="the trace")

    def to_dict(self) -> dict[str, Any]:
        """The timeline so far, in Chrome's format."""
        reports = [runner.report() for runner in self._runners]
        summaries = [report.to_dict() for report in reports]
        spans = [
            track.with_captures(report) for track, report in zip(self._tracks, reports, strict=True)
        ]
        zero = min(track.began_s for track in self._tracks)
        zero = min([zero, *(seen.began_s for each in spans for seen in each)])
        events: list[Event] = []
        for pid, (track, summary) in enumerate(zip(self._tracks, summaries, strict=True), 1):
            name = f"{summary['mode']} on {summary['device']}"
            events += _names(pid, name if len(reports) == 1 else f"runner {pid}: {name}")
            slices = [_span(seen, zero, pid) for seen in spans[pid - 1]]
            slices += [_step(seen, zero, pid) for seen in track.steps]
            last = max((each["ts"] + each["dur"] for each in slices), default=0.0)
            events += [*slices, *_findings(findings_of(summary), track, last, pid)]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"graphrt_reports": summaries},
        }


class _Track(Observer):
    """Keeps the steps, captures and trials of one runner."""

    def __init__(self, most_steps: int, *, nvtx: bool) -> None:
        self.began_s = perf_counter()
        self.steps: deque[StepSeen] = deque(maxlen=most_steps)
        self.spans: list[SpanSeen] = []
        self.lost = 0
        """Steps that made room for later ones."""
        self._nvtx = nvtx

    def with_captures(self, report: RunnerReport) -> list[SpanSeen]:
        """The trace's captures and trials, with warm-ups, and the captures from before the trace.
        These are moved to right before it, as hours without a step may have followed them."""
        records = report.graphs
        early = [record for record in records if record.began_s < self.began_s]
        shift = self.began_s - max((each.began_s + each.capture_s for each in early), default=0.0)
        spans = list(self.spans)
        for record in records:
            graph = f"{record.mode.name} [{record.descriptor}]"
            began = record.began_s + (max(shift, 0.0) if record in early else 0.0)
            if record in early:
                spans.append(SpanSeen("capture", graph, began, began + record.capture_s))
            if record.warm_up_s:
                spans.append(SpanSeen("warm-up", graph, began, began + record.warm_up_s))
        return spans

    def step(self, seen: StepSeen) -> None:
        self.lost += len(self.steps) == self.steps.maxlen
        self.steps.append(seen)

    def span(self, seen: SpanSeen) -> None:
        self.spans.append(seen)

    def around(self, what: str, graph: str) -> AbstractContextManager[object]:
        name = f"graphrt {what} {graph}".rstrip()
        if not self._nvtx:
            return torch.profiler.record_function(name)
        stack = ExitStack()
        stack.enter_context(torch.cuda.nvtx.range(name))
        stack.enter_context(torch.profiler.record_function(name))
        return stack


def _names(pid: int, name: str) -> list[Event]:
    tracks = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        for tid, track in enumerate(TRACKS)
    ]
    return [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}, *tracks]


def _slice(name: str, track: int, pid: int, at: tuple[float, float], args: Event) -> Event:
    """A slice of a track; times in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": TRACKS[track],
        "pid": pid,
        "tid": track,
        "ts": round(at[0] * 1e6, 3),
        "dur": round((at[1] - at[0]) * 1e6, 3),
        "args": args,
    }


def _span(seen: SpanSeen, zero: float, pid: int) -> Event:
    at = seen.began_s - zero, seen.ended_s - zero
    return _slice(f"{seen.what} {seen.graph}", _CAPTURES, pid, at, {"graph": seen.graph})


def _step(seen: StepSeen, zero: float, pid: int) -> Event:
    args: Event = {"live_tokens": seen.live_tokens, "trial": seen.tried}
    dispatch, name = seen.dispatch, f"{seen.error} before dispatch"
    if dispatch is not None:
        graph, reason = f"{dispatch.mode.name} [{dispatch.descriptor}]", dispatch.reason
        padded = dispatch.descriptor.num_tokens
        args |= {"reason": reason.name, "meaning": reason.value, "padded_tokens": padded}
        pads = f", {seen.live_tokens} live" if padded != seen.live_tokens else ""
        name = f"{graph}{pads}" if seen.by_graph else f"{reason.name} [{dispatch.descriptor}]"
    if seen.error is not None:
        args["error"] = seen.error
    track = _STEPS if seen.by_graph else _EAGER
    return _slice(name, track, pid, (seen.began_s - zero, seen.ended_s - zero), args)


def _findings(findings: Sequence[Finding], track: _Track, last: float, pid: int) -> list[Event]:
    """Each finding as a slice that is as long as the timeline, so that its text can be read."""
    if track.lost:
        lost = f"{counted(track.lost, 'earlier step')} are not in this timeline"
        note = Finding("note", lost, "", "trace(most_steps=)")
        findings = [*findings, note]
    events = []
    for number, finding in enumerate(findings):
        args = {"why": finding.why, "try": finding.advice}
        name = f"{finding.level}: {finding.what}"
        # Slices of one track nest: each a little shorter than the one around it.
        begin, end = number * 1e-6, max(last * 1e-6 - number * 1e-6, number * 1e-6)
        events.append(_slice(name, _FINDINGS, pid, (begin, end), args))
    return events
