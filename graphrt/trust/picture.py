"""One look at Python: what a forward reaches, as it was, and what of it is another now.

1. A walk (places/) lists places: each is a name, a container, a position, and what was there.
2. `Reading.take` reads all of them by C, a container at a time, into one list.
3. Two such lists are compared: most values by identity; sizes, and where tensors are, by Python's
   own `==`. No code of a user runs. `moved` finds which differ, and compares plain values.

A `Picture` is all that a capture may have baked in. Its `look` names what has changed. Trials save
and compare more: see `PythonState`.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.option_values import told as short
from graphrt.core.runner.findings import Change, Look
from graphrt.trust.places import slots
from graphrt.trust.places.slots import KEYS, MISSING, Place, call
from graphrt.trust.places.walk import Kind, Places, shape_of, where_is

_TABLES = {id(way) for way in (slots.ITEM, slots.ELEMENT, slots.CLASS_ATTRIBUTE)}
"""Ways of places of which one container has many."""
_IN_C = (dict, OrderedDict, list, MappingProxyType)
"""Types of containers that `itemgetter` reads without code of a user."""
_FIRST = operator.itemgetter(0)
MOST_BAKED_BYTES = 1 << 16
"""A larger array is not compared between steps."""
_MOST_GLANCED_BYTES = 1 << 12
"""A larger array is compared by looks alone: a step would take microseconds for it."""
_LONGEST_TEXT = 60
"""Longer texts are told by their length: they may be prompts."""

Changed = tuple[Place, Any, Any]
"""A place, its value before, and its value now."""

# Reading ------------------------------------------------------------------------------------------


def getter_of(place: Place) -> Callable[[], Any]:
    """A call that returns the value of a place, in C where there is one. Where a tensor is, and an
    object's `__dict__`, it may fail to return."""
    _, _, way, holder, key = place
    if way is slots.ATTRIBUTES or way is slots.PART:
        return functools.partial(key, holder)
    if way is slots.ITEM or way is slots.DEFAULT:
        return functools.partial(dict.get, holder, key, MISSING)
    if way is slots.MEMORY:
        return functools.partial(torch.Tensor.data_ptr, holder)
    if way is slots.TYPE:
        return functools.partial(type, holder)
    if way is slots.LENGTH:
        return functools.partial(key.__len__, holder)
    if way is KEYS:
        return functools.partial(len, key.table)
    if way is slots.FIELD and type(holder) is FunctionType:
        return functools.partial(key.__get__, holder)
    return functools.partial(way.get, holder, key)


def _readers(groups: Iterable[Sequence[Place]]) -> list[Callable[[], Iterable[Any]]]:
    """Calls that return the values of some places each."""
    readers: list[Callable[[], Iterable[Any]]] = []
    alone: list[Callable[[], Any]] = []
    for group in groups:
        _, _, way, holder, key = group[0]
        table = slots.namespace_of(holder) if way is slots.CLASS_ATTRIBUTE else holder
        if len(group) == 1 and way is slots.ELEMENT and type(table) is list:
            alone.append(functools.partial(operator.getitem, table, key))
            continue
        if len(group) == 1 or type(table) not in _IN_C:
            alone += map(getter_of, group)
            continue
        if alone:
            readers.append(functools.partial(map, call, alone))
            alone = []
        get = operator.itemgetter(*[place.key for place in group])
        readers.append(functools.partial(get, table))
    return [*readers, functools.partial(map, call, alone)]


class Reading:
    """Places that are read together. `was` has the values of the beginning, in their order: what is
    in one container together, and at the end what is made anew by each reading."""

    def __init__(self, places: Iterable[Place]) -> None:
        groups: dict[tuple[int, int], list[Place]] = {}
        made: list[list[Place]] = []
        for place in places:
            way = place.way
            if way.anew:
                made.append([place])
            else:
                of_many = id(way) in _TABLES
                key = (id(way), id(place.holder)) if of_many else (0, id(place))
                groups.setdefault(key, []).append(place)
        self.slots = [*chain.from_iterable(groups.values())]
        # How many values are compared by identity.
        self._kept = len(self.slots)
        self.slots += chain.from_iterable(made)
        self._readers = _readers([*groups.values(), *made])
        self.was = self.take()

    def take(self) -> list[Any]:
        """The values at this moment."""
        try:
            return [*chain.from_iterable(map(call, self._readers))]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # Some place is gone.
            return [place.get() for place in self.slots]

    def are_same(self, was: Sequence[Any], now: Sequence[Any]) -> bool:
        """Whether each place has the same object, or what is made anew is equal."""
        kept = self._kept
        return all(map(is_, islice(was, kept), now)) and was[kept:] == now[kept:]

    def moved_slots(self, was: Sequence[Any], now: Sequence[Any]) -> list[int]:
        """The indices of the places whose value has changed."""
        # Most often the same objects are there: a comparison in C.
        first = self._kept if all(map(is_, islice(was, self._kept), now)) else 0
        pairs = zip(was[first:], now[first:], strict=True)
        return [
            at
            for at, (before, after) in enumerate(pairs, first)
            if after is not before and not self.slots[at].way.same(before, after)
        ]


class Picture(Reading):
    """What a capture may have baked in of all that a forward reaches: which object or tensor is at
    each place, plain values, the class and `__dict__` of objects, how long containers are, which
    keys dicts and classes have, the contents of small arrays, and where tensors are."""

    def __init__(self, places: Places, counts: Callable[[Place], bool] | None = None) -> None:
        """Of the places only those that the caller `counts`, if it does."""
        self.keys = places.keys
        """id of a dict or class -> its place of `KEYS`."""
        lengths = {
            id(held): Place(place, "", slots.LENGTH, held, slots.base_of(held))
            for place, held in places.containers
        }
        # Those of containers keep their order.
        lengths |= places.keys
        found = map(_FIRST, (*places.objects, *places.outline))
        small, large = list[Place](), list[Place]()
        for place, array in places.arrays:
            if array.nbytes <= MOST_BAKED_BYTES:
                rows = small if array.nbytes <= _MOST_GLANCED_BYTES else large
                rows.append(Place(place, "", slots.BYTES, array))
        self.glanced = [*found, *places.numbers, *lengths.values(), *small]
        """The places that steps glance at, in the order of the walk, which `ring_of` goes by."""
        rows = [*self.glanced, *map(_FIRST, places.tensors), *places.aside, *large]
        for place, tensor in {id(each[1]): each for each in reversed(places.tensors)}.values():
            is_bare = type(tensor) in tree.BARE and tensor.layout is torch.strided
            parts = tree.PLACEMENT if is_bare and where_is(tensor) is not None else (where_is,)
            rows += [Place(place, "", slots.PART, tensor, part) for part in parts]
        super().__init__(filter(counts, rows))

    def changes(self, was: Sequence[Any], now: Sequence[Any]) -> Iterator[Changed]:
        """Each place whose value has changed, with both values; of a dict or class each new key.
        All new items of a container are one place, whose key is `dict`."""
        tables: dict[int, Place] = {}
        for at in self.moved_slots(was, now):
            place, before, after = self.slots[at], was[at], now[at]
            if place.way is not KEYS:
                yield place, before, after
            # A new key may be there in place of one that is gone: then the length is the same.
            if place.way is KEYS or (after is MISSING and id(place.holder) in self.keys):
                tables[id(place.holder)] = self.keys[id(place.holder)]
        for place in tables.values():
            way = slots.ITEM if isinstance(place.holder, dict) else slots.CLASS_ATTRIBUTE
            for key in slots.new_keys(place):
                home: Any = place.owner
                label = f"{home.label}{key if type(key) is str else '(any)'}"
                new = Place(home.owner, label, way, place.holder, key)
                yield place._replace(key=dict) if place.key.items else new, MISSING, new.get()

    def look(self) -> Look:
        """What has changed since the picture was taken."""
        now = self.take()
        if self.are_same(self.was, now):
            return Look()
        return look_of(self.changes(self.was, now))


def look_of(changes: Iterable[Changed]) -> Look:
    """What callers are told of changes."""
    by_name: dict[str, Change] = {}
    for place, was, now in changes:
        by_name.setdefault(place.path, Change(place.path, told(was), told(now)))
    return Look(by_name.values())


# Words --------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """Stands for a value that is not kept: a tensor takes memory, and an object may lead to one."""

    text: str

    def __repr__(self) -> str:
        return self.text


def is_scalar(value: object) -> bool:
    return shape_of(type(value)).kind is Kind.PLAIN


def told(value: Any) -> Any:
    """A value as changes tell it: itself if it is plain and short, else a `Told`."""
    if value is MISSING:
        return Told("nothing")
    if type(value) is str and len(value) > _LONGEST_TEXT:
        return Told(short(value))
    if is_scalar(value) or type(value) is Told:
        return value
    return Told(_words_of(value))


def _words_of(value: Any) -> str:
    """An object without its address: its kind, and its name or how large it is. Of other classes
    nothing is asked, as that would run a user's code."""
    kind = type(value)
    if kind in tree.BARE:
        return f"{kind.__name__} {value.dtype} {tuple(value.shape)}"
    if kind in (FunctionType, BuiltinFunctionType, MethodType):
        return f"{kind.__name__} {value.__qualname__}"
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    if kind in (list, tuple, dict, set, frozenset, deque):
        return f"{kind.__name__} of {len(value)}"
    return kind.__name__
