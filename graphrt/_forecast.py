"""`CaptureBar` shows a capture in one line of a terminal, and forecasts its rest.

1. After the second graph the memory of all is predicted (`graphrt/core/plan/memory.py`). Each
   further graph corrects that.
2. Each graph that is left takes as long as the last one of its mode, or as those after the first on
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
from graphrt.core.plan.memory import GraphMemory, next_bytes
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.graph_table import GraphTable

_WIDTH, _MOST = 12, 79
"""Characters of a bar and of a line. A terminal breaks a longer one, and then cannot rewrite it."""


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
    left = [*left]
    rest = sum(next_bytes(captured, mode, tokens) for mode, tokens in left)
    taken = sum(graph.bytes for graph in captured)
    return Forecast(round(taken + rest), taken, len(captured), len(captured) + len(left))


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
        return [key for key in self._graphs.plan().keys if key not in done]

    def _forecast(self) -> Forecast | None:
        captured = [
            GraphMemory(
                each.mode.name, each.descriptor.num_tokens, each.pool_bytes, each.driver_bytes
            )
            for each in self._graphs.records
        ]
        return predicted(captured, [(mode.name, each.num_tokens) for mode, each in self._left()])
