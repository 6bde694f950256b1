"""Counts the streams that graphs take of a device, and refuses a graph that has too few left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from graphrt.core.base import errors
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import is_listed
from graphrt.core.capture.operators import facts_of
from graphrt.core.device.contract import GraphWork, StreamRoom
from graphrt.core.device.platform import Platform
from graphrt.core.replay.recording import counted
from graphrt.core.runner.graph_table import PreparedStep

T = TypeVar("T")

_COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of operators by which ranks communicate."""


class WorkCount(ThreadMode):
    """Counts the operators of an eager run by stream, so that a platform can tell what a graph of
    it will take. Operators in `breaks` count as breaks too. Kernels outside of torch's operators
    are not seen, nor a stream that only they use."""

    supports_higher_order_operators = True

    def __init__(self, stream_id: Callable[[], int], breaks: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = GraphWork()
        self._stream_id = stream_id
        self._breaks = breaks

    @undoing
    def run(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, and count its operators in `work`."""
        undo.set(counted, self.work)
        return self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.work.collectives |= getattr(func, "namespace", "") in _COLLECTIVES
        if is_listed(func, self._breaks):
            self.work.breaks += 1
        if not facts_of(func).is_view:
            stream, operators = self._stream_id(), self.work.operators
            operators[stream] = operators.get(stream, 0) + 1
        return func(*args, **kwargs)


class StreamLedger:
    """Refuses graphs that the device has too few free streams for: a capture that runs out of
    streams in its middle may cost the process (see the platform).

    Around each graph: `check`, its warm-up under `counter`, `check` with the work of that, the
    capture, then `took`, or `failed` if streams ran out. The first graph of a mode and kind needs
    what its warm-up shows, further ones what the last one took. Where the device does not tell its
    streams, nothing is refused.
    """

    def __init__(self, platform: Platform, breaks: tuple[str, ...] = ()) -> None:
        self._platform = platform
        self._breaks = frozenset(breaks)
        # The room before this graph, and before the session; None where the device does not tell.
        # The reserve is always the first one's: the platform's shrinks with the free streams.
        self._before = self._first = platform.stream_room()
        # (mode, kind) -> the streams that the last such graph took.
        self._needs: dict[Hashable, int] = {}

    def counter(self, graph: PreparedStep) -> WorkCount | None:
        """A mode that counts the work of this graph's warm-up; None where the device does not tell
        its streams."""
        if self._first is None:
            return None
        count = WorkCount(self._platform.stream_id_reader(), self._breaks)
        count.work.in_pieces = graph.mode is GraphMode.PIECEWISE
        return count

    def check(self, graph: PreparedStep, work: GraphWork | None = None) -> None:
        """Note the free streams, and raise `StreamBudgetError` if the graph will take more than it
        may. Called before the graph, when the needs of the first one of a kind are unknown; and
        after its warm-up, with the `work` which that issued.
        """
        room = self._before = self._room()
        needed = self._needs.get((graph.mode, graph.descriptor.kind))
        if needed is None and work is not None:
            needed = self._platform.streams_needed(work)
        if room is not None and needed is not None and needed > room.usable:
            raise _too_few_streams(needed, room)

    def took(self, graph: PreparedStep) -> int | None:
        """Note how many streams a graph took since `check`, and return that; raises
        `StreamBudgetError` if fewer are free now than the reserve."""
        before, after = self._before, self._room()
        if before is None or after is None:
            return None
        taken = self._needs[graph.mode, graph.descriptor.kind] = max(0, before.free - after.free)
        if after.free < after.reserve:
            raise _too_few_streams(taken, before)
        return taken

    def failed(self, graph: PreparedStep) -> None:
        """Note that a graph ran out of streams after its capture had begun."""
        if self._before is not None:
            # More than there were: further graphs of its kind are refused before their capture.
            self._needs[graph.mode, graph.descriptor.kind] = self._before.usable + 1

    def _room(self) -> StreamRoom | None:
        """The free streams now, with the reserve of the session's beginning."""
        if self._first is None:
            return None
        room = self._platform.stream_room()
        return None if room is None else StreamRoom(room.free, self._first.reserve)


def _too_few_streams(needed: int, room: StreamRoom) -> errors.StreamBudgetError:
    return errors.StreamBudgetError(
        "the device has too few free streams for this graph",
        got=f"{room.free} free, {room.reserve} of them kept in reserve",
        expected=f"{needed}, by its warm-up or by a graph of the same kind",
        advice="capture fewer sizes or fewer pieces; what is captured serves",
    )
