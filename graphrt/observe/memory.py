"""`MemoryWatch`: the bar of a capture, with a warning where its memory is not there.

Where the graphs will take more than the device has free, or than `limit_bytes` or the plan's budget
allow, a `GraphMemoryWarning` says so, once. As an error (`warnings.simplefilter`) it ends the
capture; the graphs before it serve. How memory is predicted: `graphrt/_forecast.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TextIO

from graphrt._forecast import CaptureBar, Forecast, predicted
from graphrt._runner import GraphRunner
from graphrt.core.base.errors import GraphMemoryWarning, InvalidOptionError, warn_caller
from graphrt.core.base.option_values import check_kind, count_of
from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.plan.memory import GraphMemory
from graphrt.core.plan.sizes import graph_name
from graphrt.core.runner.report import RunnerReport
from graphrt.observe.files import runs_of


def taken_and_predicted(figures: Mapping[str, Any]) -> tuple[str, str] | None:
    """Memory that all graphs of a report took, and the prediction after the first two, as texts;
    None if unknown."""
    graphs = sorted(figures["graphs"], key=lambda graph: graph["began_s"])
    captured = [
        GraphMemory(each["mode"], each["tokens"], each["pool_bytes"], each["driver_bytes"])
        for each in graphs
    ]
    forecast = predicted(captured[:2], [(each.mode, each.tokens) for each in captured[2:]])
    # Not the size of the pool, which may hold graphs of other runners, and earlier ones.
    took = sum(graph.bytes for graph in captured)
    if forecast is None or not took:
        return None
    return size_text(took), size_text(forecast.bytes)


class MemoryWatch(CaptureBar):
    """For `runner.capture(progress=MemoryWatch(runner))`: the bar of `progress=True`, with a
    warning where the memory that is predicted is not there."""

    def __init__(
        self,
        runner: GraphRunner[Any],
        *,
        limit_bytes: int | None = None,
        stream: TextIO | None = None,
        report: RunnerReport | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        """`limit_bytes` is what all graphs may take, by default the `device_bytes` of the plan's
        budget; a bar is written to `stream`, by default to stderr where that is a terminal. A
        `report` of an earlier capture, or its file, says what is left before two graphs are
        captured. Raises `InvalidOptionError`."""
        check_kind("runner", runner, GraphRunner, optional=False, example="MemoryWatch(runner)")
        super().__init__(runner.graphs, stream)
        budget = runner.plan.arguments["budget"]
        if limit_bytes is not None:
            limit_bytes = count_of("limit_bytes", limit_bytes, least=1)
        elif budget is not None:
            limit_bytes = budget.device_bytes
        self._runner = runner
        self._limit = limit_bytes
        # What each graph of the report took, by its name.
        self._before = {} if report is None else _took(report)
        if report is not None and not self._before.keys() & {*map(graph_name, runner.plan.keys)}:
            raise InvalidOptionError(
                "the report has none of the graphs that are to be captured",
                got=", ".join([*self._before][:3]) or "no graphs",
                expected=", ".join([*map(graph_name, runner.plan.keys)][:3]),
                advice="a report of a runner with this plan",
            )
        # Whether this capture has had its warning.
        self._warned = False
        self.forecasts: list[Forecast] = []
        """One after each graph, from the second on. The last one has the memory that they took."""

    def __call__(self, done: int, total: int, descriptor: BatchDescriptor) -> None:
        """See `graphrt.GraphRunner.capture`."""
        forecast = self._forecast()
        if forecast is None:
            # This is the first graph of a new capture.
            self._warned = False
            self.forecasts.clear()
        else:
            self.forecasts.append(forecast)
        self._show(done, total, descriptor, forecast)
        if forecast is not None and not self._warned:
            self._warn_if_short(forecast)

    def _rest(self, forecast: Forecast | None) -> str:
        rest, left = super()._rest(forecast), [*map(graph_name, self._left())]
        known = [self._before[name] for name in left if name in self._before]
        if rest or not known:
            return rest
        of = "" if len(known) == len(left) else f" for {len(known)} of {len(left)}"
        seconds, size = (sum(each[at] for each in known) for at in (0, 1))
        return f"{seconds_text(seconds)}, {size_text(int(size))} by the report{of}"

    def _warn_if_short(self, forecast: Forecast) -> None:
        runner = self._runner
        figures = runner.platform.memory_figures()
        limits = []
        if self._limit is not None and forecast.bytes > self._limit:
            limits.append(f"{size_text(self._limit)} is the limit for graphs")
        if figures is not None and forecast.left_bytes > figures.free_bytes:
            free, left = size_text(figures.free_bytes), size_text(forecast.left_bytes)
            limits.append(f"{left} of it are still to come, and {free} of the device are free")
        if limits:
            self._warned = True
            warn_caller(
                f"the graphs will take {size_text(forecast.bytes)}, predicted after "
                f"{forecast.captured} of {counted(forecast.graphs, 'graph')}; {'; '.join(limits)}. "
                "Capture fewer or smaller sizes, or leave more memory free",
                GraphMemoryWarning,
            )


def _took(
    report: RunnerReport | Mapping[str, Any] | str | os.PathLike[str],
) -> dict[str, tuple[float, int]]:
    """The seconds and the bytes of each graph of a report, by its name."""
    return {
        graph["graph"]: (
            graph["capture_s"],
            (graph["pool_bytes"] or 0) + (graph["driver_bytes"] or 0),
        )
        for graph in runs_of(report)[0].figures["graphs"]
    }
