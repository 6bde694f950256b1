"""What one wrapper has captured so far."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.core.base import GraphsCapturedError, check_hashable, check_kind
from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture._hot import Hot
from graphrt.core.capture.bridges import Bridges
from graphrt.core.device import DeviceGraph
from graphrt.core.replay import Entry, GraphPool, graphs_of


class Kept:
    """The entries of a wrapper, by descriptor and by slot, and the buffers between their parts."""

    __slots__ = ("_hot", "bridges", "entries", "statics")

    def __init__(self, hot: Hot) -> None:
        self._hot = hot
        self.entries: dict[BatchDescriptor, Entry] = {}
        self.bridges = Bridges()
        self.statics = Bridges()

    def find_at(self, slot: int, entry: Entry) -> None:
        """Let steps of this slot find `entry` without looking it up; -1 is no slot."""
        if slot >= 0:
            by_slot = self._hot.by_slot
            by_slot.extend([None] * (slot + 2 - len(by_slot)))
            by_slot[slot] = entry

    def check_move(self, old: GraphPool, new: GraphPool) -> None:
        """Raise what `GraphWrapper.move_to` does where it cannot be moved."""
        check_kind("pool", new, GraphPool, optional=False)
        new.check_open()
        new.check_like(old)
        if self.entries:
            raise GraphsCapturedError(
                "a wrapper cannot be moved to another pool: its graphs lie in this one",
                got=", ".join(map(str, self.entries)),
                expected="no graphs",
                advice="call clear_graphs() before; what is captured next lies in the new pool",
            )

    def take(self, descriptor: BatchDescriptor) -> Sequence[DeviceGraph]:
        """The graphs of one descriptor, which no step finds any more."""
        check_hashable("descriptor", descriptor)
        entry = self.entries.get(descriptor)
        if entry is None:
            return []
        hot = self._hot
        entry.graph = None
        hot.by_slot = [None if other is entry else other for other in hot.by_slot]
        self.entries.pop(descriptor, None)
        return graphs_of(entry.parts)

    def take_all(self) -> Sequence[DeviceGraph]:
        """The graphs of all descriptors, which no step finds any more."""
        parts = [part for entry in self.entries.values() for part in entry.parts]
        for entry in self.entries.values():
            entry.graph = None
        self._hot.by_slot = [None]
        self.entries.clear()
        return graphs_of(parts)

    def clear_buffers(self) -> None:
        """Let go of the buffers if no graph is left: they may lie in the pool, and keep what the
        graphs had there."""
        if not self.entries:
            self.bridges.clear()
            self.statics.clear()
