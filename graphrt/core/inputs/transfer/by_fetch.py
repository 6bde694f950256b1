"""A step's inputs, written into a slot from which the device fetches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import memmove
from typing import Any

import torch

from graphrt.core.device import RingFormat
from graphrt.core.inputs.layout import FieldMove, StepMoves
from graphrt.core.inputs.spec import LOWEST_ADDRESS, check_other
from graphrt.core.inputs.transfer.alike import MOST_KINDS, MOST_MADE, mover_of, writer_of
from graphrt.core.inputs.transfer.moves import Fills, MoveTable
from graphrt.core.inputs.transfer.ring import SlotRing
from graphrt.core.inputs.transfer.writes import (
    PadSource,
    Slab,
    copy_bytes,
    has_lazy_bits,
    repeat,
)

_Tensor = torch.Tensor
_WHOLE, _FIRST_MOVE = RingFormat.WHOLE, RingFormat.FIRST_MOVE


class ByFetch:
    """Writes what comes from the host into a slot, padded, and says there where the rest is: the
    one operation that fetches the slot moves and pads that too."""

    def __init__(self, ring: SlotRing, slab: Slab, pads: Mapping[str, PadSource]) -> None:
        self.ring = ring
        self._slab = slab
        self._pads = pads
        # Copies on the device that have yet to be fetched.
        self._kept: list[torch.Tensor] = []

    def fill(
        self,
        values: Mapping[str, Any],
        moves: StepMoves,
        fetch: Callable[[], None],
        in_graph: bool,
    ) -> bool:
        """Write the slot of a step, and have it fetched; False if it cannot hold such a step.

        What is wrong with an input raises before anything is given to the device.
        """
        for alike in moves.kinds:
            if alike(values, fetch, in_graph):
                moves.alike = alike
                return True
        ring = self.ring
        word, base = ring.take()
        elsewhere: dict[int, int] | None = None
        plain = True
        # All are looked at before any is copied: one may be a view of the slot.
        sources: list[tuple[torch.Tensor, int, FieldMove]] = []
        for name, dtype, shape, _, _, may_negate, move in moves.rows:
            value = values[name]
            if type(value) is not _Tensor or value.dtype is not dtype or value.shape != shape:
                check_other(name, move.field.spec, value, tuple(shape))
                plain = False
            if value.requires_grad:
                plain = False  # steps that are alike one without a gradient are plain hits
            if not value.is_cpu:
                if elsewhere is None:
                    elsewhere = {}
                    self._kept.clear()
                elsewhere[move.number] = self._address(move, value)
                continue
            address = value.data_ptr()
            if address < LOWEST_ADDRESS:
                # To read there would end the process.
                check_other(name, move.field.spec, value, tuple(shape))
            if not value.is_contiguous() or (may_negate and has_lazy_bits(value)):
                value = value.detach().resolve_conj().resolve_neg().contiguous()
                plain = False
            address = value.data_ptr()
            if ring.address <= address < ring.end:
                value = value.detach().clone()
                address = value.data_ptr()
                plain = False
            if not address:  # an empty one
                plain = False
                continue
            sources.append((value, address, move))
        for _, address, move in sources:
            if move.few_bytes:
                copy_bytes(base + move.offset, address, move.few_bytes)
            else:
                for to, start, size in move.copies:
                    memmove(base + to, address + start, size)
        if plain and elsewhere is None and moves.made < MOST_MADE:
            moves.learn(writer_of(values, moves, ring, self._fills(moves), self._pad), MOST_KINDS)
        if elsewhere is None:
            self.give_padded(moves, fetch, word, base, in_graph)
            return True
        table = self._table(moves, elsewhere)
        if table is None:
            return False
        alone = plain and len(elsewhere) == len(moves.fields) and not self._kept
        if alone and moves.made < MOST_MADE:
            moves.learn(mover_of(values, moves, ring, self._slab, self._table), MOST_KINDS)
        for move in moves.fields:
            if move.number not in elsewhere:
                self._pad(move, base)
        if table.count or in_graph:
            table.write(ring.words, word + _FIRST_MOVE, elsewhere)
            ring.give(fetch, word, table.count, in_graph)
        return True

    def give_padded(
        self,
        moves: StepMoves,
        fetch: Callable[[], None],
        word: int,
        base: int,
        in_graph: bool,
    ) -> None:
        """Have a slot fetched in which all live rows are; `base` is the address of its payload."""
        ring, fills = self.ring, moves.fills or self._fills(moves)
        if fills.count:
            fills.write(ring.words, word + _FIRST_MOVE, base - ring.address)
        for move in fills.others:
            self._pad(move, base)
        ring.give(fetch, word, _WHOLE + fills.count, in_graph)

    def _fills(self, moves: StepMoves) -> Fills:
        """The padding of these moves, as the ring has it done."""
        fills: Fills | None = moves.fills
        if fills is None:
            ring = self.ring
            fills = moves.fills = Fills(moves.fields, self._pads, ring.rows, ring.moves)
        return fills

    def _pad(self, move: FieldMove, base: int) -> None:
        if move.pads:
            self._pads[move.name].write(base, move.pads)
        for start, to, size in move.repeats:
            repeat(base + start, base + to, move.field.row_bytes, size)

    def _table(self, moves: StepMoves, elsewhere: Mapping[int, int]) -> MoveTable | None:
        """The moves of a step of which these fields are on the device; None where there are too
        many, or some that no move can do."""
        key = "".join(
            [
                "h" if (at := elsewhere.get(n)) is None else "d" if at else "k"
                for n in range(len(moves.fields))
            ]
        )
        if key not in moves.tables:
            padded = [move for move in moves.fields if move.number in elsewhere and move.pads]
            found: MoveTable | None = None
            if all(self._pads[move.name].word is not None for move in padded):
                found = MoveTable(moves.fields, key, self._slab.low, self._pads)
            fits = found is not None and found.count <= self.ring.moves
            moves.tables[key] = found if fits else None
        table: MoveTable | None = moves.tables[key]
        return table

    def _address(self, move: FieldMove, given: torch.Tensor) -> int:
        """Where the rows of an input that is on a device lie, one after the other; 0 if that is
        where they are to be."""
        slab, value = self._slab, given
        if value.device != slab.device:
            value = value.to(slab.device)
        address = value.data_ptr()
        if address < LOWEST_ADDRESS:
            check_other(move.name, move.field.spec, given, tuple(move.shape))
        if move.may_negate and has_lazy_bits(value):
            value = value.detach().resolve_conj().resolve_neg()
            address = value.data_ptr()
        if slab.low <= address < slab.high:
            if address == slab.low + move.offset and move.lies_in(value):
                return 0
            # What is written next may lie under it.
            value = value.detach().clone(memory_format=torch.contiguous_format)
        if not value.is_contiguous():
            value = value.detach().contiguous()
        if value is not given:
            self._kept.append(value)
        return value.data_ptr()
