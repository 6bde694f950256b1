"""Whether the next graph of a session fits into the streams of the device, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from graphrt.core.base.errors import StreamBudgetError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.device.figures import GraphWork, StreamRoom
from graphrt.core.device.platform import Platform
from graphrt.core.trust.watching.count import WorkCount

T = TypeVar("T")

_FEWER = "capture fewer sizes or fewer pieces; what is captured serves"


class StreamLedger:
    """What graphs of each mode and kind take of the device's streams: counted in the warm-up, then
    as measured around the last capture. Where the device does not tell, nothing is refused.

    A capture that runs out of streams in its middle may cost the process: see the platform.
    """

    def __init__(self, platform: Platform, breaks: tuple[str, ...] = ()) -> None:
        self._platform = platform
        self._breaks = frozenset(breaks)
        room = platform.stream_room()
        self._reserve = 0 if room is None else room.reserve
        self.counts = room is not None
        self._work: dict[Hashable, GraphWork] = {}
        self._needs: dict[Hashable, tuple[int, str]] = {}

    def count(self, kind: Hashable, run: Callable[[], T]) -> T:
        """Run an eager forward of this kind, and count what it issues."""
        if not self.counts:
            return run()
        count = WorkCount(self._platform.stream_id_reader(), self._breaks)
        result = count.run(run)
        self._work[kind] = count.work
        return result

    def check(
        self, mode: GraphMode, descriptor: BatchDescriptor, kind: Hashable
    ) -> GraphWork | None:
        """What the warm-up of that kind issued, if one was counted: without, nothing is known of
        the first graph of a mode.

        Raises `StreamBudgetError` if the graph will take more streams than it may.
        """
        room = self.room()
        needed = self._needs.get((mode, descriptor.kind))
        work = self._work.get(kind)
        if needed is None and work is not None:
            work = replace(work, in_pieces=mode is GraphMode.PIECEWISE)
            needed = self._platform.streams_needed(work), "at most, by what its warm-up issued"
        if room is not None and needed is not None and needed[0] > room.usable:
            raise self._too_few(*needed, room)
        return work

    def took(
        self, mode: GraphMode, descriptor: BatchDescriptor, before: StreamRoom | None
    ) -> int | None:
        """Note what a graph took that was just captured, and return it; raises
        `StreamBudgetError` if that is of what must stay free."""
        after = self.room()
        if before is None or after is None:
            return None
        taken = max(0, before.free - after.free)
        self._needs[mode, descriptor.kind] = taken, f"as many as {mode.name} [{descriptor}] took"
        if after.free < after.reserve:
            raise self._too_few(taken, "found at its end", before)
        return taken

    def failed(
        self, mode: GraphMode, descriptor: BatchDescriptor, before: StreamRoom | None
    ) -> None:
        """Note that a graph ran out of streams after its capture had begun with `before`."""
        if before is not None:
            what = f"more than {mode.name} [{descriptor}] found"
            self._needs[mode, descriptor.kind] = before.usable + 1, what

    def room(self) -> StreamRoom | None:
        """What is free now; what must stay free is that of the session's beginning."""
        room = self._platform.stream_room() if self.counts else None
        return None if room is None else StreamRoom(room.free, self._reserve)

    def _too_few(self, needed: int, why: str, room: StreamRoom) -> StreamBudgetError:
        kept = f", {room.reserve} of them kept in reserve" if room.reserve else ""
        return StreamBudgetError(
            "the device has too few free streams for this graph",
            got=f"{room.free} free{kept}",
            expected=f"{needed} ({why})",
            advice=_FEWER,
        )
