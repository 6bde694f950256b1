"""`CaptureBar` shows a capture in one line of a terminal, and forecasts its rest.

1. Graphs are captured from the largest to the smallest, into one pool. The first takes what a step
   needs at its peak, and the next ones use it again.
2. After the second graph all are predicted (`predicted`): the memory of the captured ones; and for
   each graph that is left a share of the pool by its tokens, and as much of the driver's memory as
   graphs took on average, where the first counts at most 2 MiB. Each further graph corrects that.
3. Each graph that is left takes as long as the last one of its mode, or as those after the first on
   average, whichever is shorter: smaller graphs do not take longer.

Limits: the first graph of another mode is predicted like the ones after it. What other processes
take of the device meanwhile counts as the graphs'. Trials after the last graph are not predicted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.graph_table import GraphTable

_WIDTH, _MOST = 12, 79
"""Characters of a bar and of a line. A terminal breaks a longer one, and then cannot rewrite it."""

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
    """Predict the memory of all graphs. `captured` are graphs in the order of their captures;
    `left` has (mode, tokens) of the others. None before the second graph, and if bytes are
    unknown."""
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
    """Predict the driver's bytes for the graph after `graphs`. `first` is the bytes of the first
    graph of all, which include the kernels loaded with it."""
    taken = [graph.driver_bytes or 0 for graph in graphs]
    later = min(sum(taken[1:]) / len(taken[1:]), first)
    # A graph that took nothing fitted into a chunk of an earlier one.
    return max(0.0, later, min(sum(taken) / len(taken), _CHUNK_BYTES))


def seconds_left(captured: Sequence[tuple[str, float]], left: Iterable[str]) -> float | None:
    """Predict the seconds of the graphs that are `left`, given by mode, from the modes and seconds
    of those `captured`. None before the second graph."""
    if len(captured) < 2:
        return None
    total = 0.0
    for mode in left:
        times = [seconds for each, seconds in captured[1:] if each == mode]
        times = times or [seconds for _, seconds in captured[1:]]
        total += min(times[-1], sum(times) / len(times))
    return total


class CaptureBar:
    """A callback for `graphrt.GraphRunner.capture` that rewrites one line of a terminal before each
    graph, and ends it after the last. The line is written to `stream`, by default to stderr where
    that is a terminal."""

    def __init__(self, graphs: GraphTable, stream: TextIO | None = None) -> None:
        if stream is None and sys.stderr.isatty():
            stream = sys.stderr
        self._graphs, self._stream = graphs, stream
        self._began, self._written = time.perf_counter(), 0

    def __call__(self, done: int, total: int, descriptor: BatchDescriptor) -> None:
        """See `graphrt.GraphRunner.capture`."""
        if self._stream is not None:
            self._show(done, total, descriptor, self._forecast())

    def _show(
        self, done: int, total: int, descriptor: BatchDescriptor, forecast: Forecast | None
    ) -> None:
        if self._stream is None:
            return
        if not done:
            self._began = time.perf_counter()
        took = seconds_text(time.perf_counter() - self._began)
        if done < total:
            bar, rest, end = "#" * (_WIDTH * done // total), self._rest(forecast), ""
            took += f", left: {rest}" if rest else ""
            line = f"[{bar:.<{_WIDTH}}] {done}/{total}, {took}, next: {descriptor}"[:_MOST]
        else:
            memory = "" if forecast is None else f", {size_text(forecast.bytes)}"
            line, end = f"captured {counted(total, 'graph')} in {took}{memory}", "\n"
        # Padded, so that nothing stays of a longer line before it.
        self._stream.write(f"\r{line:<{self._written}}{end}")
        self._stream.flush()
        self._written = len(line)

    def _rest(self, forecast: Forecast | None) -> str:
        """The seconds and the bytes that the graphs which are left will take; "" if unknown."""
        captured = [(each.mode.name, each.capture_s) for each in self._graphs.records]
        seconds = seconds_left(captured, [mode.name for mode, _ in self._left()])
        told = [] if seconds is None else [f"about {seconds_text(seconds)}"]
        return ", ".join(told + ([] if forecast is None else [size_text(forecast.left_bytes)]))

    def _left(self) -> list[CaptureKey]:
        done = {(each.mode, each.descriptor) for each in self._graphs.records}
        done |= {(each.mode, each.descriptor) for each in self._graphs.dropped}
        return [key for key in self._graphs.setup.plan.keys if key not in done]

    def _forecast(self) -> Forecast | None:
        captured = [
            GraphMemory(
                each.mode.name, each.descriptor.num_tokens, each.pool_bytes, each.driver_bytes
            )
            for each in self._graphs.records
        ]
        return predicted(captured, [(mode.name, each.num_tokens) for mode, each in self._left()])
