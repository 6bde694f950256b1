"""Inputs that graphs fetch: written into a slot of a ring, from which the device takes them.

1. What comes from the host is copied into the payload of the next slot. For what is on the device
   already the slot has the address. Padding is a part of the moves.
2. The graph that is launched next fetches the slot, as its first operation; or, without a graph,
   the fetch is launched by itself.
3. Inputs that are too large, or of which there are too many, are copied by a `StagedCopy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.core.base._native_door import NativeWriter
from graphrt.core.base.errors import GraphRTError, InputRingWarning
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.layout import StepMoves
from graphrt.core.inputs.transport import (
    MAX_BYTES,
    MAX_SLOTS,
    InputTransport,
    Slab,
    StagedCopy,
    copy_rows,
    sources_of,
)
from graphrt.cuda.ring.format import RingDevice, RingFormat, slot_bytes
from graphrt.cuda.ring.moves import MoveTable
from graphrt.cuda.ring.slots import SlotRing
from graphrt.cuda.ring.writers import Prepared, learn

_MOVES_OF_A_FIELD = 3


class RingTransport(InputTransport):
    """Brings a step's inputs through a slot of the ring: rows from the host are written into it,
    those on the device are named there by their address. One operation fetches and pads all."""

    def __init__(self, ring: SlotRing, staged: StagedCopy) -> None:
        self.ring: SlotRing = ring
        self.staged = staged
        super().__init__(staged.slab)
        self.device_memory = ring.device.device_memory
        memory = ring.device.memory
        self._memory = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        # Copies on the device, kept alive until the fetch has read them.
        self._kept: list[torch.Tensor] = []

    @property
    def waits(self) -> int:
        return self.staged.waits + self.ring.waits

    def fetch_of(self, nbytes: int) -> Callable[[], None] | None:
        return self.ring.fetch_of(nbytes)

    def fill(
        self, values: Mapping[str, Any], moves: StepMoves, stream: Any, in_graph: bool
    ) -> None:
        fetch = moves.fetch
        if fetch is not None:
            for writer in self._prepared(moves).writers:
                if writer(values, fetch, in_graph):
                    moves.alike = writer
                    return
            if self._write(values, moves, fetch, in_graph):
                return
        # A fetch that a failed step has left would overwrite these copies.
        self.ring.pending = None
        self.staged.fill(values, moves, stream, in_graph)
        if fetch is not None and in_graph:
            self.ring.give_nothing(fetch)

    def _write(
        self,
        values: Mapping[str, Any],
        moves: StepMoves,
        fetch: Callable[[], None],
        in_graph: bool,
    ) -> bool:
        """Write the slot of a step, and have it fetched; False if it cannot hold such a step."""
        slot = self.ring.take()
        sources = sources_of(values, moves, self.slab)
        kinds = sources.kinds
        table = self._table(moves, kinds)
        if not table.fits:
            return False
        base = self._memory[0] + slot[1]
        copy_rows(moves, sources, base)
        if kinds == moves.from_host:
            if NativeWriter is not None:
                learn(moves, sources, self.ring, self.slab, table, None)
            self._give(table, fetch, slot, (), in_graph)
            return True
        made: list[torch.Tensor] = []
        # A copy: what is known of the last inputs stays.
        addresses = [*sources.addresses]
        for number, kind in enumerate(kinds):
            if kind == "d":
                addresses[number] = self._address(sources.tensors[number], made)
        self._kept = made if sources.used_as_given else [*sources.tensors, *made]
        if NativeWriter is not None and "h" not in kinds and not made:
            apart, home = (self._table(moves, kind * len(kinds)) for kind in "dk")
            if apart.fits and all(each.device == self.slab.device for each in sources.tensors):
                learn(moves, sources, self.ring, self.slab, apart, home)
        if table.count or in_graph:
            self._give(table, fetch, slot, addresses, in_graph)
        return True

    def _give(
        self,
        table: MoveTable,
        fetch: Callable[[], None],
        slot: tuple[int, int],
        addresses: Any,
        in_graph: bool,
    ) -> None:
        """Pad a slot whose live rows are written, and have it fetched."""
        word, payload = slot
        for move in table.by_host:
            move.pad_at(self._memory[0] + payload)
        table.write(self.ring.rows, word, addresses, payload)
        self.ring.give(fetch, word, table.count, in_graph)

    def _table(self, moves: StepMoves, kinds: str) -> MoveTable:
        tables = self._prepared(moves).tables
        table = tables.get(kinds)
        if table is None:
            table = MoveTable(moves.fields, kinds, self.slab.low, self.ring.moves)
            tables[kinds] = table
        return table

    def _prepared(self, moves: StepMoves) -> Prepared:
        prepared: Prepared | None = moves.prepared
        if prepared is None:
            prepared = moves.prepared = Prepared()
        return prepared

    def _address(self, source: torch.Tensor, made: list[torch.Tensor]) -> int:
        """The address of an input's contiguous rows on the slab's device. A copy that this takes is
        added to `made`."""
        value = source
        if value.device != self.slab.device:
            value = value.to(self.slab.device)
        if not value.is_contiguous():
            value = value.detach().contiguous()
        if value is not source:
            made.append(value)
        return value.data_ptr()


def ring_transport(
    platform: Platform,
    slab: Slab,
    new_device: Callable[[torch.Tensor, int, int, int], RingDevice],
    *,
    most_bytes: int,
    limit_s: float | None,
) -> RingTransport | None:
    """A ring for the inputs of a slab; None, with an `InputRingWarning`, where the device at hand
    cannot have one. `new_device(slab, slots, nbytes, moves)` makes the device's side. Inputs of
    more than `most_bytes` are copied, and those that take longer than `limit_s` to fetch."""
    largest = min(slab.nbytes, most_bytes)
    moves = min(RingFormat.MAX_MOVES, _MOVES_OF_A_FIELD * slab.fields + 1)
    slots = max(2, min(MAX_SLOTS, MAX_BYTES // slot_bytes(largest, moves)[1]))
    try:
        ring = SlotRing(new_device(slab.buffer, slots, largest, moves), largest, moves)
        if limit_s is not None:
            ring.limit(limit_s)
    except GraphRTError as error:
        warnings.warn(
            f"graphs do not fetch their inputs, which are copied instead: {error}",
            InputRingWarning,
            stacklevel=5,
        )
        return None
    return RingTransport(ring, StagedCopy(slab, platform))
