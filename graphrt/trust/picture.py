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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.option_values import told as short
from graphrt.core.base.torch_names import global_hooks
from graphrt.core.runner.findings import Change, Look
from graphrt.trust.places import slots
from graphrt.trust.places.slots import KEYS, MISSING, Place, call, same_value
from graphrt.trust.places.walk import Kind, Places, places_of, shape_of, where_is

_TABLES = {id(way) for way in (slots.ITEM, slots.ELEMENT, slots.CLASS_ATTRIBUTE, slots.TUPLE_ITEM)}
"""Ways of places of which one container has many."""
_ALL = slice(None)
_CODE = (Kind.FUNCTION, Kind.BOUND, Kind.DESCRIPTOR, Kind.PARTIAL)
_DEEPEST = 4
"""Levels of a new container that are compared with those of an old one."""
_MOST_BAKED_BYTES = 1 << 16
"""A larger array is not compared between steps."""
_MOST_PLACES = 200_000
"""Where a walk for a picture of an adapter's ends: a model of experts has tens of thousands."""
_LONGEST_TEXT = 60
"""Longer texts are told by their length: they may be prompts."""

IsUnread = Callable[[Place, Any, Any], bool]
"""Of a place, the value before and the value now: whether the change makes no difference."""

# Reading ------------------------------------------------------------------------------------------


def _table(place: Place) -> Any:
    """What a place of `_TABLES` is in, if `itemgetter` reads that without code of a user."""
    way, holder = place.way, place.holder
    if way is slots.CLASS_ATTRIBUTE:
        return slots.namespace_of(holder)
    if way is slots.TUPLE_ITEM or (way is slots.ELEMENT and type(holder) is list):
        return holder
    return holder if way is slots.ITEM and type(holder) in (dict, OrderedDict) else None


def _tuple_items(place: Place, get: Callable[[Any], Any]) -> Any:
    # A TypeError where it is no tuple any more.
    return get(tuple.__getitem__(place.get(), _ALL))  # type: ignore[call-overload]


def getter_of(place: Place) -> Callable[[], Any]:
    """A call that returns the value of a place, in C where there is one. Where a tensor is, and an
    object's `__dict__`, it may fail to return."""
    _, _, way, holder, key = place
    if way is slots.ATTRIBUTES or way is slots.PART:
        return functools.partial(key, holder)
    if way is slots.ITEM or way is slots.DEFAULT:
        return functools.partial(dict.get, holder, key, MISSING)
    if way is slots.TYPE:
        return functools.partial(type, holder)
    if way is slots.LENGTH:
        return functools.partial(key.__len__, holder)
    if way is KEYS:
        return functools.partial(len, slots.table_of(holder))
    if way is slots.FIELD and type(holder) is FunctionType:
        return functools.partial(key.__get__, holder)
    return functools.partial(way.get, holder, key)


def _readers(groups: Iterable[Sequence[Place]]) -> list[Callable[[], Iterable[Any]]]:
    """Calls that return the values of some places each."""
    readers: list[Callable[[], Iterable[Any]]] = []
    alone: list[Callable[[], Any]] = []
    for group in groups:
        table = _table(group[0]) if len(group) > 1 else None
        if table is None:
            alone += map(getter_of, group)
            continue
        if alone:
            readers.append(functools.partial(map, call, alone))
            alone = []
        get = operator.itemgetter(*[place.key for place in group])
        if group[0].way is slots.TUPLE_ITEM:
            readers.append(functools.partial(_tuple_items, table, get))
        else:
            readers.append(functools.partial(get, table))
    return [*readers, functools.partial(map, call, alone)]


class Reading:
    """Places that are read together. `was` has the values of the beginning, in their order: what is
    in one container together, and at the end what is made anew by each reading."""

    def __init__(self, places: Iterable[Place]) -> None:
        groups: dict[tuple[int, int], list[Place]] = {}
        for place in places:
            of_many = id(place.way) in _TABLES
            key = (id(place.way), id(place.holder)) if of_many else (0, id(place))
            groups.setdefault(key, []).append(place)
        ordered = sorted(groups.values(), key=lambda group: group[0].way.anew)
        self.slots = [*chain.from_iterable(ordered)]
        self._readers = _readers(ordered)
        # How many values are compared by identity.
        self._kept = sum(not place.way.anew for place in self.slots)
        self.was = self.take()

    def take(self) -> list[Any]:
        """The values at this moment."""
        try:
            return [*chain.from_iterable(map(call, self._readers))]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # Some place is gone.
            return [place.get() for place in self.slots]

    def moved_slots(self, was: Sequence[Any], now: Sequence[Any]) -> list[int]:
        """The indices of the places whose value has changed."""
        return [
            at
            for at, (before, after) in enumerate(zip(was, now, strict=True))
            if after is not before and not self.slots[at].way.same(before, after)
        ]


class Picture(Reading):
    """What a capture may have baked in of all that a forward reaches: which object or tensor is at
    each place, plain values, the class and `__dict__` of objects, how long containers are, which
    keys dicts and classes have, the contents of small arrays, and where tensors are."""

    def __init__(self, places: Places) -> None:
        large = [place for place, each in places.arrays if each.nbytes > _MOST_BAKED_BYTES]
        self.unread = places.unread or "".join(
            f"{each.path} is a large array" for each in large[:1]
        )
        """An object that could change without a sign; empty if there is none."""
        self.aside = {*map(id, places.aside), *(id(place) for place, _ in places.tensors)}
        """ids of places that no code names, and of those of tensors."""
        self.keys = places.keys
        """id of a dict or class -> its place of `KEYS`."""
        found = (*places.objects, *places.outline, *places.tensors)
        rows = [place for place, _ in found] + places.aside + places.numbers
        rows += [
            Place(place, "", slots.LENGTH, held, slots.base_of(held))
            for place, held in places.containers
            if id(held) not in places.keys
        ]
        rows += [
            Place(place, "", slots.BYTES, array)
            for place, array in places.arrays
            if array.nbytes <= _MOST_BAKED_BYTES
        ]
        for place, tensor in {id(each[1]): each for each in reversed(places.tensors)}.values():
            is_bare = type(tensor) in tree.BARE and tensor.layout is torch.strided
            parts = tree.PLACEMENT if is_bare and where_is(tensor) is not None else (where_is,)
            rows += [Place(place, "", slots.PART, tensor, part) for part in parts]
        super().__init__([*rows, *places.keys.values()])

    def are_same(self, was: Sequence[Any], now: Sequence[Any]) -> bool:
        """Whether each place has the same object, or what is made anew is equal."""
        kept = self._kept
        return all(map(is_, islice(was, kept), now)) and was[kept:] == now[kept:]

    def changes(self, was: Sequence[Any], now: Sequence[Any]) -> Iterator[tuple[Place, Any, Any]]:
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
                label = f"{place.label}{key if type(key) is str else '(any)'}"
                new = Place(place.owner, label, way, place.holder, key)
                yield place._replace(key=dict) if place.key.items else new, MISSING, new.get()

    def look(self) -> Look:
        """What has changed since the picture was taken."""
        now = self.take()
        if self.are_same(self.was, now):
            return Look()
        return _look_of(self.changes(self.was, now))


def _look_of(changes: Iterable[tuple[Place, Any, Any]]) -> Look:
    by_name: dict[str, Change] = {}
    for place, was, now in changes:
        by_name.setdefault(place.path, Change(place.path, told(was), told(now)))
    return Look(by_name.values())


class SameModel:
    """Whether a model is still the one of a capture, for adapters that decide by it: a picture of
    its forward, taken again where a container was replaced by an equal one."""

    def __init__(self, forward: Any, is_unread: IsUnread = lambda place, was, now: False) -> None:
        """Changes that are `is_unread` make no difference."""
        self._forward, self._is_unread = forward, is_unread
        self._take()

    def _take(self) -> None:
        places = places_of(self._forward, limit=_MOST_PLACES)
        # A trial would show whether any of it makes a difference; here all would count.
        places.aside.clear()
        self._picture = Picture(places)
        self._was = self._picture.was

    @property
    def unread(self) -> str:
        """An object that could change without a sign; empty if there is none."""
        return self._picture.unread

    def look(self) -> Look:
        """What has changed since the picture was taken. Another container with equal contents is no
        change."""
        picture, was = self._picture, self._was
        now = picture.take()
        if picture.are_same(was, now):
            return Look()
        counted = [
            each
            for each in picture.changes(was, now)
            if not (self._is_unread(*each) or is_in_hook(each[0]))
            and (is_code(*each[1:]) or not is_of_all(each[0]))
        ]
        changes = [each for each in counted if not equal(*each[1:])]
        if counted and not changes:
            self._take()
        elif not changes:
            self._was = now
        return _look_of(changes)


def is_of_all(place: Place) -> bool:
    """Whether a place is in a class or a global, where libraries keep what each call may add to: of
    these an adapter counts code alone, and the runner below it tries the rest."""
    at: Place | None = place
    while at is not None:
        is_global = at.label.startswith("global ") and at.label not in global_hooks
        if is_global or at.way is slots.CLASS_ATTRIBUTE:
            return True
        at = at.owner
    return False


def is_in_hook(place: Place) -> bool:
    """Whether only a hook's own code leads to a place: hooks of a model itself run around its
    graphs, and adapters refuse those inside of it."""
    at = place.owner
    while at is not None and not at.label.startswith(("._forward_hooks[", "._forward_pre_hooks[")):
        at = at.owner
    return at is not None


def is_code(*values: Any) -> bool:
    """Whether one of the values is a function, or what makes a method."""
    return any(shape_of(type(each)).kind in _CODE for each in values)


def equal(one: Any, other: Any, depth: int = _DEEPEST) -> bool:
    """Whether two values are the same, or containers of Python's own with equal contents."""
    if one is other or same_value(one, other):
        return True
    if type(one) is not type(other) or depth == 0:
        return False
    if type(one) in (list, dict, tuple):
        ours, theirs = (
            [*each] if type(each) is not dict else [*each.keys(), *each.values()]
            for each in (one, other)
        )
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(equal(*pair, depth - 1) for pair in pairs)
    return type(one) is set and all(map(is_scalar, one)) and bool(one == other)


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
    return Told(f"{type(value).__name__} at {id(value):#x}")
