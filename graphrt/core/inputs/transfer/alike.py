"""Inputs that are like those of an earlier step: what was found right is not looked at again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_size_t, c_void_p, memmove
from operator import itemgetter
from typing import Any

import torch

from graphrt.core.base import tensor_guards
from graphrt.core.device import RingFormat
from graphrt.core.inputs.layout import FieldMove, StepMoves
from graphrt.core.inputs.spec import LOWEST_ADDRESS
from graphrt.core.inputs.transfer.moves import Fills, MoveTable
from graphrt.core.inputs.transfer.ring import SlotRing
from graphrt.core.inputs.transfer.writes import Slab, copy_bytes

MOST_KINDS = 4
"""So often the kind that is remembered is replaced; more would cost hosts that mix them."""

Write = Callable[[Mapping[str, Any], Callable[[], None], bool], bool]

_WHOLE, _FIRST_MOVE = RingFormat.WHOLE, RingFormat.FIRST_MOVE
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
    take, give, words, memory = ring.take, ring.give, ring.words, ring.address
    whole = _WHOLE + padding
    places, offsets = moves.places, [move.offset for move in fields]
    # What is a C type already a call takes in less time than a number.
    sizes = tuple(c_size_t(move.few_bytes) for move in fields)
    # Inputs that are large, or in several blocks.
    by_parts = [(number, move) for number, move in enumerate(fields) if not move.few_bytes]

    def write(values: Mapping[str, Any], fetch: Callable[[], None], in_graph: bool) -> bool:
        word, base = take()
        try:
            tensors = pick(values)
            if not check(*tensors):
                return False
            starts = [*map(_address_of, tensors)]
            # A storage that was resized to nothing: to read there would end the process.
            if min(starts) < LOWEST_ADDRESS:
                return False
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
    pick = itemgetter(*(move.name for move in fields))
    alone = len(fields) == 1
    low, high = slab.low, slab.high
    take, give, words = ring.take, ring.give, ring.words

    def write(values: Mapping[str, Any], fetch: Callable[[], None], in_graph: bool) -> bool:
        try:
            given = (pick(values),) if alone else pick(values)
            if not check(*given):
                return False
            starts = [*map(_address_of, given)]
        except _UNLIKE:
            return False
        if home is not None and starts == homes:
            table = home
        elif [start for start in starts if low <= start < high or start < LOWEST_ADDRESS]:
            return False
        else:
            table = apart
        if table.count or in_graph:
            word, _ = take()
            table.write(words, word + _FIRST_MOVE, starts)
            give(fetch, word, table.count, in_graph)
        return True

    return write
