"""Compiled writers of slots, for inputs that are like those of an earlier step.

What was found right is not looked at again: a writer compares the inputs with the earlier ones at
once, by torch's tensor guards, and writes the slot in one call. It returns False, with nothing
done, for inputs of other types, dtypes, devices, shapes or strides, or without memory: they are
looked at one by one then. `RingTransport.fill` does all of it where native/ is not built.
"""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base import MOST_INPUTS, NativeWriter, tensor_guards
from graphrt.core.inputs import LOWEST_ADDRESS, Slab, Sources, StepMoves
from graphrt.cuda.ring.format import RingFormat
from graphrt.cuda.ring.moves import MoveTable, packed
from graphrt.cuda.ring.slots import SlotRing

MOST_KINDS, MOST_MADE = 4, 16
"""So many kinds are remembered for one number of rows, and so many made: to try more, or to make
one at every step, would cost hosts that mix them."""

_UNLIKE = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""What looking at inputs raises that are none."""


def learn(
    moves: StepMoves, sources: Sources, ring: SlotRing, slab: Slab, apart: MoveTable,
    home: MoveTable | None,
) -> None:  # fmt: skip
    """Remember a writer of inputs like these, if there is such a thing."""
    if NativeWriter is None or not tensor_guards or moves.made >= MOST_MADE:
        return
    if not sources.plain or len(moves.fields) > MOST_INPUTS:
        return
    own = _writer(moves, sources, ring, slab, apart, home)
    moves.made += 1
    moves.alike = own
    if own is not None:
        moves.writers = [*moves.writers[-MOST_KINDS + 1 :], own]


def _writer(
    moves: StepMoves, sources: Sources, ring: SlotRing, slab: Slab, apart: MoveTable,
    home: MoveTable | None,
) -> Any:  # fmt: skip
    """Of inputs that are all the host's, or all on the device of the slab: there all elsewhere,
    written by the moves `apart`, or all in place, by `home`."""
    device, memory = ring.device, ring.device.memory
    address = memory.data_ptr()
    if home is None:
        single = [move.copies[0] for move in moves.fields if len(move.copies) == 1]
        if len(single) < len(moves.fields) or apart.by_host:
            return None
        copies = packed((number, 0, to, size) for number, (to, _, size) in enumerate(single))
        where: dict[str, Any] = {
            "bounds": (LOWEST_ADDRESS, address, address + memory.nbytes),
            "copies": copies,
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
        # Where slots are, how many, the bytes before the first, from one to the next and before a
        # payload, and the words of the control page that are used.
        places=(
            address, device.slots, RingFormat.CONTROL_BYTES, device.stride, device.payload,
            RingFormat.FAULT, RingFormat.GIVEN,
        ),
        apart=apart.packed(),
        **where,
    )  # fmt: skip
