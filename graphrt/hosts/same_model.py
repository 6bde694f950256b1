"""Whether a model is still the one that graphs were captured of, for adapters that decide by it.

A `SameModel` has a picture of its own of all that the forward reaches in Python (trust/picture.py),
so it looks at each level of checks. `runner.look()` tells of each change; here equal values are no
change: a model whose config is replaced by a copy is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

from graphrt.core.base.torch_names import global_hooks
from graphrt.core.runner.findings import Look
from graphrt.trust.picture import MOST_BAKED_BYTES, Changed, Picture, Reading, is_scalar, look_of
from graphrt.trust.places import slots
from graphrt.trust.places.slots import FIXED, MISSING, Place, same_value
from graphrt.trust.places.walk import Kind, places_of, shape_of

IsUnread = Callable[[Place, Any, Any], bool]
"""Of a place, the value before and the value now: whether the change makes no difference."""

_CODE = (Kind.FUNCTION, Kind.BOUND, Kind.DESCRIPTOR, Kind.PARTIAL)
_CHILDREN: dict[type, str] = {list: "[{}]", tuple: "[{}]", dict: "[{!r}]"}
"""Containers that are compared with others by their members, and how these are named."""
_DEEPEST = 8
"""Levels of objects and containers that are compared with others; deeper ones count as others."""
_MOST_PLACES = 200_000
"""Where the walk ends: a model of experts has tens of thousands."""


class SameModel:
    """Whether a model is still the one of a capture. Raises nothing: what has changed is told."""

    def __init__(self, forward: Any, is_unread: IsUnread = lambda place, was, now: False) -> None:
        """Changes that are `is_unread` make no difference."""
        self._is_unread = is_unread
        places = places_of(forward, limit=_MOST_PLACES)
        # A trial would show whether any of it makes a difference; here all would count.
        places.aside.clear()
        large = [place.path for place, each in places.arrays if each.nbytes > MOST_BAKED_BYTES]
        self.unread = places.unread or "".join(f"{each} is a large array" for each in large[:1])
        """An object that could change without a sign; empty if there is none."""
        self._picture = Picture(places, _counts)
        self._was = self._picture.was
        # id of a place -> the place, and the object there that an equal one has replaced.
        self._replaced: dict[int, tuple[Place, Any]] = {}
        # What each call of `look_at_share` looks at, and the shares; empty before the first.
        self._first: tuple[Reading, ...] = ()
        self._shares: Iterator[Reading] = iter(())

    def look(self) -> Look:
        """What has changed since the picture was taken."""
        picture, was = self._picture, self._was
        now = picture.take()
        moved = [] if picture.are_same(was, now) else [*picture.changes(was, now)]
        changes = [*self._counted(moved), *self._of_replaced()]
        if moved and not changes:
            self._was = now
            of_objects = ((place, before) for place, before, _ in moved if _members(before))
            for place, before in of_objects:
                self._replaced.setdefault(id(place), (place, before))
        return look_of(changes)

    def look_at_share(self, count: int) -> Look:
        """The same of configs, functions and hooks of all modules, and of one of `count` shares of
        the rest, another at each call."""
        if not self._first:
            self._share(count)
            return self.look()
        for reading in (*self._first, next(self._shares)):
            now = reading.take()
            if not reading.are_same(reading.was, now):
                found = self.look()
                if found:
                    return found
                reading.was = now
        return look_of(self._of_replaced())

    def _share(self, count: int) -> None:
        places = self._picture.slots
        self._first = (Reading(filter(_is_first, places)),)
        size = -(-len(places) // count)
        chunks = (places[at : at + size] for at in range(0, len(places), size))
        self._shares = cycle([*map(Reading, chunks)])

    def _of_replaced(self) -> Iterator[Changed]:
        for place, was in self._replaced.values():
            yield from self._differences(place, was, place.get())

    def _counted(self, changes: Iterable[Changed]) -> Iterator[Changed]:
        for place, was, now in changes:
            if _counts(place, was, now):
                yield from self._differences(place, was, now)

    def _differences(
        self, place: Place, was: Any, now: Any, depth: int = _DEEPEST
    ) -> Iterator[Changed]:
        """Where two values differ: objects of one class and containers by what is in them."""
        if was is now or same_value(was, now) or self._is_unread(place, was, now):
            return
        ours, theirs = _members(was), _members(now)
        if type(was) is not type(now) or ours is None or theirs is None or depth == 0:
            yield place, was, now
            return
        for name in {**ours, **theirs}:
            pair = ours.get(name, MISSING), theirs.get(name, MISSING)
            yield from self._differences(Place(place, name, FIXED, pair[1]), *pair, depth - 1)


def _members(value: Any) -> dict[str, Any] | None:
    """name -> what is in an object, or in a container of Python's own; None for other values."""
    shape = shape_of(type(value))
    if shape.kind is Kind.OBJECT:
        fields = {name: slots.FIELD.get(value, each) for name, each in shape.slots}
        fields |= {} if shape.dict_of is None else shape.dict_of(value)
        return {f".{name}": each for name, each in fields.items()}
    if type(value) is set and all(map(is_scalar, value)):
        return {f"{{{each!r}}}": each for each in value}
    label = _CHILDREN.get(type(value))
    items = [*(value.items() if type(value) is dict else enumerate(value))] if label else []
    if label is None or not all(is_scalar(key) for key, _ in items):
        return None
    return {label.format(key): each for key, each in items}


def _counts(place: Place, *values: Any) -> bool:
    """Whether changes of a place count for an adapter, if they are not `is_unread`."""
    return not _is_in_hook(place) and (
        not _is_of_all(place) or _is_code(*(values or [place.get()]))
    )


def _is_first(place: Place) -> bool:
    """Whether each call looks at a place: in configs, of hooks of all modules, functions."""
    if place.owner is None or place.owner.label in global_hooks:
        return True
    is_read_fast = place.way in (slots.CLASS_ATTRIBUTE, slots.ITEM)
    return place.path.startswith("model.config.") or (is_read_fast and _is_code(place.get()))


def _is_of_all(place: Place) -> bool:
    """Whether a place is in a class or a global, where libraries keep what each call may add to: of
    these an adapter counts code alone, and the runner below it tries the rest."""
    at: Place | None = place
    while at is not None:
        is_global = at.label.startswith("global ") and at.label not in global_hooks
        if is_global or at.way is slots.CLASS_ATTRIBUTE:
            return True
        at = at.owner
    return False


def _is_in_hook(place: Place) -> bool:
    """Whether only a hook's own code leads to a place: hooks of a model itself run around its
    graphs, and adapters refuse those inside of it."""
    at = place.owner
    while at is not None and not at.label.startswith(("._forward_hooks[", "._forward_pre_hooks[")):
        at = at.owner
    return at is not None


def _is_code(*values: Any) -> bool:
    """Whether one of the values is a function, or what makes a method."""
    return any(shape_of(type(each)).kind in _CODE for each in values)
