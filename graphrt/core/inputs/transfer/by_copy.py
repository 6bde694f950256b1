"""A step's inputs, copied into the slab before its launch: by the host itself, or from staging."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import memmove
from typing import Any

import torch

from graphrt.core.base import copy_all
from graphrt.core.device import Platform
from graphrt.core.inputs.layout import FieldMove, StepMoves
from graphrt.core.inputs.spec import LOWEST_ADDRESS, check_other
from graphrt.core.inputs.transfer.staging import Slot, Staging
from graphrt.core.inputs.transfer.writes import PadSource, Slab, has_lazy_bits, repeat

_Tensor = torch.Tensor


class ByCopy:
    """Copies live rows into the slab, and pads them: on a `platform` all that comes from the host
    in one copy, and what is there already in another; without one the host writes the slab."""

    def __init__(self, slab: Slab, pads: Mapping[str, PadSource], platform: Platform | None):
        self._slab = slab
        self._pads = pads
        self._staging = None if platform is None else Staging(platform, slab.nbytes)

    @property
    def waits(self) -> int:
        """How often the host had to wait until its staging memory was free."""
        return 0 if self._staging is None else self._staging.waits

    def fill(self, values: Mapping[str, Any], moves: StepMoves, stream: Any) -> None:
        """Copy the packed inputs of a step, checked before anything is written."""
        slab = self._slab
        sources: list[torch.Tensor | None] = []
        kinds = ""
        for move in moves.fields:
            value = values[move.name]
            if (
                type(value) is not _Tensor
                or value.dtype is not move.dtype
                or value.shape != move.shape
            ):
                check_other(move.name, move.field.spec, value, tuple(move.shape))
            address = value.data_ptr()
            if address < LOWEST_ADDRESS:
                # To read there would end the process.
                check_other(move.name, move.field.spec, value, tuple(move.shape))
            if slab.low <= address < slab.high:
                if address == slab.low + move.offset and move.lies_in(value):
                    sources.append(None)
                    kinds += "k"
                    continue
                # What is written next may lie under it.
                value = value.detach().clone()
            if not value.is_cpu:
                sources.append(value)
                kinds += "d"
                continue
            if not value.is_contiguous() or (move.may_negate and has_lazy_bits(value)):
                value = value.detach().resolve_conj().resolve_neg().contiguous()
            sources.append(value)
            kinds += "h"
        if self._staging is None:
            self._write(moves.fields, sources, kinds, slab.low)
        else:
            spans = moves.whole if kinds.count("h") == len(kinds) else moves.spans(kinds)
            if spans:
                slot = self._staging.take()
                self._write(moves.fields, sources, kinds, slot.address)
                slot.copy_to(slab.window, spans, stream)
        if "d" in kinds or (self._staging is not None and "k" in kinds):
            self._write_on_device(moves.fields, sources, kinds)

    def take(self) -> Slot | None:
        """Memory for the inputs of a step, packed; None where that is the slab itself."""
        return None if self._staging is None else self._staging.take()

    def give(self, slot: Slot | None, moves: StepMoves, stream: Any) -> None:
        """Pad what was written to the memory of `take`, and copy it into the slab."""
        base = self._slab.low if slot is None else slot.address
        for move in moves.fields:
            if move.pads:
                self._pads[move.name].write(base, move.pads)
            for start, to, size in move.repeats:
                repeat(base + start, base + to, move.field.row_bytes, size)
        if slot is not None:
            slot.copy_to(self._slab.window, moves.whole, stream)

    def _write(
        self,
        moves: list[FieldMove],
        sources: list[torch.Tensor | None],
        kinds: str,
        base: int,
    ) -> None:
        """Write live rows and padding to the host memory at `base`: the slab, or a slot for it."""
        in_slab = self._staging is None
        for move, source, kind in zip(moves, sources, kinds, strict=True):
            if kind == "h" and source is not None:
                address = source.data_ptr()
                for to, start, size in move.copies:
                    memmove(base + to, address + start, size)
            if move.pads:
                self._pads[move.name].write(base, move.pads)
            elif move.repeats and (kind == "h" or in_slab):
                for start, to, size in move.repeats:
                    repeat(base + start, base + to, move.field.row_bytes, size)

    def _write_on_device(
        self, moves: list[FieldMove], sources: list[torch.Tensor | None], kinds: str
    ) -> None:
        """Copy what lives on a device already, in one fused copy, and pad what needs it there."""
        # Tensors of one dtype are one kernel; of several, torch would copy each by itself.
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for move, source, kind in zip(moves, sources, kinds, strict=True):
            if kind == "d" and source is not None:
                places, values = copies.setdefault(move.dtype, ([], []))
                places.append(move.views[0])
                values.append(source.detach() if source.requires_grad else source)
        for places, values in copies.values():
            if len(places) == 1:
                places[0].copy_(values[0])
            else:
                copy_all(places, values)
        for move, kind in zip(moves, kinds, strict=True):
            # Constant padding came with the copy from the host, but for tails in several pieces.
            padded = move.repeats or (kind == "k" and move.pads and not move.one_block)
            if kind in "dk" and padded:
                move.pad_on_device()
