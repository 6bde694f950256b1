"""`MemoryWatch`: predicts the memory of all graphs of a runner while the first ones are captured.

1. Graphs are captured from the largest to the smallest, into one pool. The first takes what a step
   needs at its peak, and the next ones use it again.
2. After the second graph all are predicted (`predicted`): the memory of the captured ones; and for
   each graph that is left a share of the pool by its tokens, and as much of the driver's memory as
   graphs took on average, where the first counts at most 2 MiB. Each further graph corrects that.
3. Where this is more than the device has free, or than `limit_bytes` or the plan's budget allow, a
   `GraphMemoryWarning` says so, once. As an error (`warnings.simplefilter`) it ends the capture;
   the graphs before it serve.

Limits: the first graph of another mode is predicted like the ones after it. What other processes
take of the device meanwhile counts as the graphs'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import GraphMemoryWarning, warn_caller
from graphrt.core.base.option_values import check_kind, count_of
from graphrt.core.base.texts import counted, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.runner.capture_session import progress_bar

_SEGMENT_BYTES = 20 << 20
"""The least that an allocator takes from the device. A pool that grew by less may have room for the
graphs that follow, so these need not take as much."""

_CHUNK_BYTES = 2 << 20
"""The least that CUDA's driver takes for graphs."""


@dataclass(frozen=True)
class GraphMemory:
    """Memory of one graph: bytes by which the pool and the driver grew, None if unknown."""

    mode: str
    tokens: int
    pool_bytes: int | None = None
    driver_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Both together."""
        return (self.pool_bytes or 0) + (self.driver_bytes or 0)


@dataclass(frozen=True)
class Forecast:
    """The predicted memory of all graphs (`bytes`), after some of them.

    So many are `captured`, with `captured_bytes`, of all `graphs`.
    """

    bytes: int
    captured_bytes: int
    captured: int
    graphs: int

    @property
    def left_bytes(self) -> int:
        """Bytes that the graphs that are left will take."""
        return self.bytes - self.captured_bytes


def predicted(captured: Sequence[GraphMemory], left: Iterable[tuple[str, int]]) -> Forecast | None:
    """The memory of all graphs: those `captured`, in their order, and those `left`, by mode and
    tokens. None before the second one, and if bytes are unknown."""
    if len(captured) < 2 or any(graph.pool_bytes is None for graph in captured):
        return None
    by_mode: dict[str, list[GraphMemory]] = {}
    for graph in captured:
        by_mode.setdefault(graph.mode, []).append(graph)
    left = [*left]
    first = max(0, captured[0].driver_bytes or 0)
    rest = 0.0
    for mode, tokens in left:
        graphs = by_mode.get(mode, [])
        graphs = graphs if len(graphs) > 1 else [*captured]
        grown = sum(graph.pool_bytes or 0 for graph in graphs[1:])
        rest += max(0, grown - _SEGMENT_BYTES) * tokens / sum(graph.tokens for graph in graphs[1:])
        rest += _driver_bytes(graphs, first)
    taken = sum(graph.bytes for graph in captured)
    return Forecast(round(taken + rest), taken, len(captured), len(captured) + len(left))


def _driver_bytes(graphs: Sequence[GraphMemory], first: int) -> float:
    """Bytes that the driver will take for one graph more than `graphs`. `first` is what it took for
    the first graph of all, with the kernels that were loaded with it."""
    taken = [graph.driver_bytes or 0 for graph in graphs]
    later = min(sum(taken[1:]) / len(taken[1:]), first)
    # A graph that took nothing fitted into a chunk of an earlier one.
    return max(0.0, later, min(sum(taken) / len(taken), _CHUNK_BYTES))


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


class MemoryWatch:
    """For `runner.capture(progress=MemoryWatch(runner))`: the bar of `progress=True`, with the
    memory that is predicted, and a warning where there is not enough."""

    def __init__(
        self,
        runner: GraphRunner[Any],
        *,
        limit_bytes: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """`limit_bytes` is what all graphs may take, by default the `device_bytes` of the plan's
        budget; a bar is written to `stream`, by default to stderr where that is a terminal. Raises
        `InvalidOptionError`."""
        check_kind("runner", runner, GraphRunner, optional=False, example="MemoryWatch(runner)")
        budget = runner.plan.arguments["budget"]
        if limit_bytes is not None:
            limit_bytes = count_of("limit_bytes", limit_bytes, least=1)
        elif budget is not None:
            limit_bytes = budget.device_bytes
        self._runner = runner
        self._limit = limit_bytes
        # Whether this capture has had its warning.
        self._warned = False
        self._bar = progress_bar(stream)
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
        self._bar(done, total, descriptor, "" if forecast is None else _text(forecast))
        if forecast is not None and not self._warned:
            self._warn_if_short(forecast)

    def _forecast(self) -> Forecast | None:
        graphs = self._runner.graphs
        captured = [
            GraphMemory(
                each.mode.name, each.descriptor.num_tokens, each.pool_bytes, each.driver_bytes
            )
            for each in graphs.records
        ]
        done_keys = {(each.mode, each.descriptor) for each in graphs.records}
        done_keys |= {(each.mode, each.descriptor) for each in graphs.dropped}
        left = [key for key in self._runner.plan.keys if key not in done_keys]
        return predicted(captured, [(mode.name, each.num_tokens) for mode, each in left])

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


def _text(forecast: Forecast) -> str:
    if forecast.captured == forecast.graphs:
        return size_text(forecast.bytes)
    return f"{size_text(forecast.captured_bytes)} of {size_text(forecast.bytes)} predicted"
