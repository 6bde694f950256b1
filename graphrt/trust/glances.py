"""What a step looks at: a few places in turn, so that a change is found within a bounded count.

CPython tells of dicts alone, and from 3.12 on. Each step glances at a few places that it does not
tell of, and at one tensor that graphs read: tenths of a microsecond, in C. All places come up in
one order (`ring_of`), in which a change of many layers is found by one of the first glances.

`ReadSet.glances` has the tensors, `HostWatch.glances` the places. `Glances` of checks.py puts
torch's settings before them: that is what a runner asks at each step.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, repeat
from operator import eq, is_
from typing import Any, NamedTuple

from graphrt.core.base import tree
from graphrt.core.base._native_door import NativeGlances
from graphrt.trust.picture import getter_of
from graphrt.trust.places import slots
from graphrt.trust.places.slots import KEYS, MISSING, Place, PlaceValue, call
from graphrt.trust.places.walk import where_is

PLACES = {True: 3, False: 10}
"""Places that a step glances at, by whether CPython tells of changes in dicts: if not, each item of
a dict is a place to glance at too."""
_SMALL = 257
"""CPython has one object for each smaller length."""
_IN_C = (slots.ITEM, slots.DEFAULT, slots.CELL, slots.ATTRIBUTES)
"""Ways of places that `NativeGlances` reads itself."""

_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, lie apart however many there are."""
_OTHERS_PER_READ = 9
"""Glances at other places for each glance at one of a tensor that graphs read."""


def ring_of(reads: Sequence[PlaceValue], others: Iterable[PlaceValue]) -> list[PlaceValue]:
    """The order in which places are compared, so that of one change of many places one of the first
    glances finds one, wherever the last glance was.

    Places of one kind, as the same list of each layer, are a group: it is spread over the whole
    ring, and neighbours in it are taken apart. `reads`, the places of graphs' tensors, are one
    group and come again and again: a model may have hundreds of other places for each.
    """
    others = [*others]
    with_dict = {id(place.holder) for place, _ in others if place.way is slots.ATTRIBUTES}
    groups = dict[tuple[object, ...], list[PlaceValue]]()
    for entry in others:
        owner, label, way, holder, _ = entry[0]
        # An object's `__dict__` shows its class too.
        if way is slots.TYPE and id(holder) in with_dict:
            continue
        # Whatever the layer: by way, and by the end of the path without numbers. Lengths of dicts
        # and of lists are one kind.
        above = "" if owner is None else owner.label
        label = "[]" if label[1:-1].isdigit() else label
        above = "[]" if above[1:-1].isdigit() else above
        kind = id(slots.LENGTH if way is KEYS else way), label, above
        groups.setdefault(kind, []).append(entry)
    count = sum(map(len, groups.values()))
    apart = [index * _GOLDEN % 1 for index in range(max(count, len(reads)))]
    repeats = -(-count // (_OTHERS_PER_READ * len(reads))) if reads else 0
    turns: list[tuple[float, PlaceValue]] = []
    for at, group in enumerate((reads, *groups.values())):
        times = max(repeats, 1) if group is reads else 1
        order = sorted(range(len(group)), key=apart.__getitem__) * times
        first = at * _GOLDEN % 1
        turns += [((turn + first) / len(order), group[at]) for turn, at in enumerate(order)]
    turns.sort(key=operator.itemgetter(0))
    return [entry for _, entry in turns]


class Read(NamedTuple):
    """What graphs read at a place, as it was: a tensor, with its storage's key, or packed
    weights."""

    place: Place
    held: Any
    was: Any
    key: int | None = None


_Glance = tuple[Any, Any, Any]
"""One thing that a step compares: (holder, key, value) of a place that `NativeGlances` reads
itself, ((container,), None, (length,)), or (a call, None, what it returned), by identity. Of a
tensor it is (tensor, what gives a part of where it is, this part as it was)."""


def glances(
    read: Sequence[Read], places: Iterable[PlaceValue], at_once: int, over: Iterator[bool]
) -> tuple[Iterator[bool], int]:
    """Answers without end, one for each step: whether the answer of `over` is true, the next few
    places, `at_once`, hold what they did, and the next tensor that graphs `read` is where it was.
    Also how many steps it takes until all had their turn."""
    ring = [_glance_at(*each) for each in places]
    parts: list[_Glance] = []
    for _, held, was, key in read:
        if type(held) in tree.BARE and was is not None:
            # A transposed tensor, or one cut short, has the address that it had.
            parts += zip(repeat(held), tree.PLACEMENT, was, strict=False)
        elif key is not None:
            # Of a subclass each part may run a user's code, so it is asked at once.
            parts.append((held, where_is, was))
    # A step glances at no place twice, and at all parts of one tensor.
    counts = min(at_once, len(ring) or 1), len(tree.PLACEMENT)
    rounds = max(-(-len(ring) // counts[0]), -(-len(parts) // counts[1]))
    if NativeGlances is not None:
        return NativeGlances(tuple(ring), tuple(parts), counts, MISSING, over), rounds
    # Made of iterators that run in C, as every step takes an answer.
    of_places = in_rotation(is_, [(get, was) for get, _, was in ring])
    of_tensors = in_rotation(eq, [(functools.partial(get, held), was) for held, get, was in parts])
    turns = [of_places] * counts[0] + [of_tensors] * counts[1]
    return map(all, zip(over, *turns, strict=False)), rounds


def _glance_at(place: Place, was: Any) -> _Glance:
    _, _, way, holder, key = place
    if NativeGlances is not None:
        if way in _IN_C or (way is slots.ELEMENT and type(holder) is list):
            return holder, type(holder) if way is slots.ATTRIBUTES else key, was
        if way is KEYS or (way is slots.LENGTH and key is not deque):
            return (holder,), None, (was,)
    if way is slots.LENGTH and was < _SMALL:
        # By identity, as `_holds` takes 0.2 us more.
        return functools.partial(key.__len__, holder), None, was
    if way is slots.ATTRIBUTES:
        return functools.partial(_attributes, holder, type(holder), key), None, was
    if way.anew:
        return functools.partial(_holds, place, was), None, True
    return getter_of(place), None, was


def _attributes(holder: object, of: type, dict_of: Callable[[Any], Any]) -> object:
    """The `__dict__` of an object, as long as it is of this class."""
    return dict_of(holder) if type(holder) is of else MISSING


def _holds(place: Place, was: object) -> bool:
    """Whether a place, whose value is another object at each glance, has an equal one still."""
    return place.way.same(was, place.get())


def in_rotation(
    same: Callable[[Any, Any], bool], of: Sequence[tuple[Callable[[], Any], Any]]
) -> Iterator[bool]:
    """Answers without end, for one thing after the other: whether it returns what it did."""
    gets, was = [*zip(*of, strict=True)] or ((), ())
    return map(same, map(call, cycle(gets)), cycle(was)) if gets else repeat(True)
