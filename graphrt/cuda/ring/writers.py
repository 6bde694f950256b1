"""Compiled writers of slots, for inputs that are like those of an earlier step.

Inputs that were found right once are not checked one by one again: a writer compares all of them
with the earlier ones by torch's tensor guards, and writes the slot in one call. It returns False,
with nothing done, for inputs of other types, dtypes, devices, shapes or strides, or without memory.
`RingTransport.fill` then writes the slot, as it always does where native/ is not built.
"""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base._native_door import MOST_INPUTS, NativeWriter
from graphrt.core.base.torch_names import tensor_guards
from graphrt.core.inputs.layout import StepMoves
from graphrt.core.inputs.spec import LOWEST_ADDRESS
from graphrt.core.inputs.transport import Slab, Sources
from graphrt.cuda.ring.format import RingFormat
from graphrt.cuda.ring.moves import MoveTable, packed
from graphrt.cuda.ring.slots import SlotRing

MOST_KINDS, MOST_MADE = 4, 16
"""For one number of rows, so many writers are remembered, and so many are ever made: hosts that mix
kinds of inputs would pay for trying more, or for making one at every step."""

_UNLIKE = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""What using a wrong input raises, such as a list for a tensor: the writer returns False."""


class Prepared:
    """What the ring keeps for steps of some number of rows: `tables` of moves by kinds of places,
    the compiled `writers` of the last kinds that were seen, and how many were `made`."""

    __slots__ = ("made", "tables", "writers")

    def __init__(self) -> None:
        self.tables: dict[str, MoveTable] = {}
        self.writers: list[Any] = []
        self.made = 0


def learn(
    moves: StepMoves,
    sources: Sources,
    ring: SlotRing,
    slab: Slab,
    apart: MoveTable,
    home: MoveTable | None,
) -> None:
    """Remember a writer for inputs like these, if there can be one.

    There can for inputs that are all on the host; and with `home` for inputs that are all on the
    slab's device, in place in the slab (moved as `home` says) or outside of it (as `apart` says).
    """
    prepared: Prepared = moves.prepared
    if NativeWriter is None or not tensor_guards or prepared.made >= MOST_MADE:
        return
    if not sources.used_as_given or len(moves.fields) > MOST_INPUTS:
        return
    if any(each.requires_grad for each in sources.tensors):
        # A step in C marks no outputs for gradients. It runs only where a writer accepts its
        # inputs, so no writer may accept these.
        return
    writer = None
    if home is not None or (moves.short is not None and not apart.by_host):
        writer = _writer(moves, sources, ring, slab, apart, home)
        prepared.writers = [*prepared.writers[-MOST_KINDS + 1 :], writer]
    prepared.made += 1
    moves.alike = writer


def _writer(
    moves: StepMoves,
    sources: Sources,
    ring: SlotRing,
    slab: Slab,
    apart: MoveTable,
    home: MoveTable | None,
) -> Any:
    device, memory = ring.device, ring.device.memory
    address = memory.data_ptr()
    if home is None:
        firsts = [move.copies[0] for move in moves.fields]
        where: dict[str, Any] = {
            "bounds": (LOWEST_ADDRESS, address, address + memory.nbytes),
            "copies": packed((number, 0, to, size) for number, (to, _, size) in enumerate(firsts)),
            "home": None,
            "homes": None,
        }
    else:
        in_place = all(
            move.lies_in(tensor) for move, tensor in zip(moves.fields, sources.tensors, strict=True)
        )
        homes = packed([[slab.low + move.field.offset for move in moves.fields]])
        where = {
            "bounds": (LOWEST_ADDRESS, slab.low, slab.high),
            "copies": None,
            "home": home.packed() if in_place else None,
            "homes": homes if in_place else None,
        }
    assert NativeWriter is not None
    return NativeWriter(
        ring=ring,
        names=tuple(move.field.name for move in moves.fields),
        check=tensor_guards(
            *sources.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check,
        address_of=torch.Tensor.data_ptr,
        unlike=_UNLIKE,
        memory=memory,
        # The address of the ring, its number of slots, the bytes before the first slot, from one to
        # the next and from a slot's start to its payload, and two words of the control page.
        places=(
            address,
            device.slots,
            RingFormat.CONTROL_BYTES,
            device.stride,
            device.payload,
            RingFormat.FAULT,
            RingFormat.GIVEN,
        ),
        apart=apart.packed(),
        **where,
    )
