"""Inputs that are like those of an earlier step: what was found right is not looked at again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_size_t, c_void_p, memmove
from operator import itemgetter
from typing import Any

import torch

from graphrt.core.base import MOST_INPUTS, NativeWriter, tensor_guards
from graphrt.core.device import RingFormat
from graphrt.core.inputs.layout import FieldMove, StepMoves
from graphrt.core.inputs.spec import LOWEST_ADDRESS
from graphrt.core.inputs.transfer.moves import Fills, MoveTable, packed
from graphrt.core.inputs.transfer.ring import SlotRing
from graphrt.core.inputs.transfer.writes import Slab, copy_bytes

Write = Callable[[Mapping[str, Any], Callable[[], None], bool], bool]

MOST_KINDS, MOST_MADE = 4, 16
"""So many kinds are remembered for one number of rows, and so many made: to try more, or to make
one at every step, would cost hosts that mix them."""

_WHOLE, _FIRST_MOVE, _FAULT = RingFormat.WHOLE, RingFormat.FIRST_MOVE, RingFormat.FAULT
_address_of = torch.Tensor.data_ptr
_UNLIKE = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""What looking at inputs raises that are none."""


def writer_of(
    right: Mapping[str, torch.Tensor],
    moves: StepMoves,
    ring: SlotRing,
    fills: Fills,
    pad: Callable[[FieldMove, int], None],
) -> Write | None:
    """What writes the slot of a step whose inputs are like `right`, all of which are the host's, in
    rows without gaps, and has it fetched by `fetch`; None where torch cannot compare them at once.
    `pad` is how the host pads an input in the memory that begins at an address.

    It returns False, with nothing done, for inputs of other types, dtypes, devices, shapes or
    strides, or without memory: they are looked at one by one, and what is wrong is named.
    """
    fields = moves.fields
    if not tensor_guards:
        return None
    names = [move.name for move in fields]
    check = tensor_guards(
        *(right[name] for name in names), dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]] = (
        itemgetter(*names) if len(names) > 1 else lambda values: (values[names[0]],)
    )
    padding, others = fills.count, fills.others
    give, words, memory = ring.give, ring.words, ring.address
    slots, count_of_slots, end = ring.places, ring.slots, ring.end
    whole = _WHOLE + padding
    places, offsets = moves.places, [move.offset for move in fields]
    # What is a C type already a call takes in less time than a number.
    sizes = tuple(c_size_t(move.few_bytes) for move in fields)
    # Inputs that are large, or in several blocks.
    by_parts = [(number, move) for number, move in enumerate(fields) if not move.few_bytes]
    if NativeWriter is not None and len(fields) <= MOST_INPUTS and not by_parts and not others:
        copies = packed((n, 0, move.offset, move.few_bytes) for n, move in enumerate(fields))
        return NativeWriter(
            **_looks(ring, names, check),
            bounds=(LOWEST_ADDRESS, memory, ring.end),
            copies=copies,
            apart=fills.packed(_WHOLE),
            home=None,
            homes=None,
        )
    # Where the last inputs were: hosts mostly have theirs in the same place.
    last: list[int] = []

    def write(values: Mapping[str, Any], fetch: Callable[[], None], in_graph: bool) -> bool:
        nonlocal last
        # What `take` looks at, without a call.
        if ring.unsure or words[_FAULT] or ring.count >= ring.free_until:
            ring.take()
        word, base = slots[ring.count % count_of_slots]
        try:
            tensors = pick(values)
            if not check(*tensors):
                return False
            starts = [*map(_address_of, tensors)]
            if starts != last:
                # A storage that was resized to nothing: to read there would end the process. And
                # views of a slot, which is written before all of them are read.
                if [start for start in starts if start < LOWEST_ADDRESS or memory <= start < end]:
                    return False
                last = starts
            into = places.get(base)
            if into is None:
                into = places[base] = tuple(c_void_p(base + offset) for offset in offsets)
            # Each returns None, so that `any` has all of them done, without a loop in Python.
            any(map(copy_bytes, into, starts, sizes))
            for number, move in by_parts:
                for to, start, size in move.copies:
                    memmove(base + to, starts[number] + start, size)
        except _UNLIKE:
            return False
        if padding:
            fills.write(words, word + _FIRST_MOVE, base - memory)
        for move in others:
            pad(move, base)
        give(fetch, word, whole, in_graph)
        return True

    return write


def mover_of(
    right: Mapping[str, torch.Tensor],
    moves: StepMoves,
    ring: SlotRing,
    slab: Slab,
    table_of: Callable[[StepMoves, Mapping[int, int]], MoveTable | None],
) -> Write | None:
    """`writer_of`, for inputs that are all on the device of the buffers, in rows without gaps: all
    elsewhere there, or all in place. None where torch cannot compare them at once."""
    fields = moves.fields
    tensors = [right[move.name] for move in fields]
    if not tensor_guards or any(each.device != slab.device for each in tensors):
        return None
    numbers = range(len(fields))
    homes = [slab.low + move.offset for move in fields]
    apart = table_of(moves, dict.fromkeys(numbers, 1))
    home = table_of(moves, dict.fromkeys(numbers, 0))
    if apart is None:
        return None
    if not all(move.lies_in(right[move.name]) for move in fields):
        home = None
    check = tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    names = [move.name for move in fields]
    if NativeWriter is not None and len(fields) <= MOST_INPUTS:
        return NativeWriter(
            **_looks(ring, names, check),
            bounds=(LOWEST_ADDRESS, slab.low, slab.high),
            copies=None,
            apart=apart.packed(),
            home=None if home is None else home.packed(),
            homes=None if home is None else packed([homes]),
        )
    pick = itemgetter(*names)
    alone = len(fields) == 1
    low, high = slab.low, slab.high
    give, words = ring.give, ring.words
    slots, count_of_slots = ring.places, ring.slots
    last: list[int] = []

    def write(values: Mapping[str, Any], fetch: Callable[[], None], in_graph: bool) -> bool:
        try:
            given = (pick(values),) if alone else pick(values)
            if not check(*given):
                return False
            starts = [*map(_address_of, given)]
        except _UNLIKE:
            return False
        nonlocal last
        if home is not None and starts == homes:
            table = home
        elif starts == last:
            table = apart
        elif [start for start in starts if low <= start < high or start < LOWEST_ADDRESS]:
            return False
        else:
            table, last = apart, starts
        if table.count or in_graph:
            if ring.unsure or words[_FAULT] or ring.count >= ring.free_until:
                ring.take()
            word = slots[ring.count % count_of_slots][0]
            table.write(words, word + _FIRST_MOVE, starts)
            give(fetch, word, table.count, in_graph)
        return True

    return write


def _looks(ring: SlotRing, names: Sequence[str], check: Any) -> dict[str, Any]:
    """What every `NativeWriter` is given."""
    return {
        "ring": ring,
        "names": tuple(names),
        "check": check,
        "address_of": _address_of,
        "unlike": _UNLIKE,
        "memory": ring.memory,
        "places": ring.shape(),
    }
