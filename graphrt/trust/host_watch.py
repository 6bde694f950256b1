"""What a host changes on the Python side of a forward between its steps.

A graph has baked in every number, flag, hook and object that its forward looked up. A host that
changes one of them, such as the scale of an adapter, would get the replays of before.

1. After each walk `aim` has CPython tell of changes of the dicts that the walk went through: those
   of objects, modules and classes, of hooks and parameters, and globals by the names that code has.
2. `over` makes the iterator of a runner's looks say no from such a change on. A step pays nothing
   for that.
3. `take` compares all that the walk found with what was there, and gives old and new values. A
   change that was undone is none.
4. `forget` leaves out what the forward itself changes at every run, and `ignore` what was tried
   often enough and makes no difference.

CPython tells of dicts alone, from 3.12 on. Lists, cells of closures, `__slots__`, other memory of a
tensor, an object's class and a replaced `__dict__` are compared by glances, a few at each step, and
without a watcher so is everything: see glances.py. Only `take` sees what is in NumPy arrays of 4 to
64 KiB and, without a watcher, attributes that a host adds to a class. What is in C is not seen at
all.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from graphrt.core.base._native_door import NativeWatch, native_state
from graphrt.core.base.texts import listed
from graphrt.core.runner.findings import Change
from graphrt.trust.glances import PLACES, Read, glances, ring_of
from graphrt.trust.picture import Changed, Picture, is_scalar, told
from graphrt.trust.places import slots
from graphrt.trust.places.slots import ITEM, KEYS, LENGTH, Place, PlaceValue
from graphrt.trust.places.walk import Places

_IN_DICTS = (ITEM, slots.DEFAULT, slots.ODD_ITEM, slots.CLASS_ATTRIBUTE, KEYS)
"""The ways of places in a dict or a class, of whose changes CPython can tell."""
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_STRUCTURAL = (LENGTH, KEYS, slots.PART, slots.IDS, slots.BYTES)
"""Ways of places whose values are numbers that stand for objects."""

if NativeWatch is not None:
    atexit.register(NativeWatch.over)
    if hasattr(os, "register_at_fork"):  # nothing forks on Windows
        os.register_at_fork(after_in_child=NativeWatch.over)


Changes = dict[str, tuple[Any, Any]]
"""By path, the value before, and the value now; of what is not plain, a `Told`."""


@dataclass
class HostChanges:
    """What `HostWatch.take` has found."""

    changes: Changes = field(default_factory=Changes)
    is_structural: bool = False
    """Whether other objects are there, so that a new walk is needed."""
    of_others: set[str] = field(default_factory=set)
    """The paths at which something else has changed than one tensor for another."""
    places: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    """path -> the (holder, key) of each place that has changed there, for `ignore`"""


class HostWatch:
    """The watch over what the graphs of one forward look up in Python."""

    def __init__(self) -> None:
        self.why_not = ""
        """Why CPython tells of no dict; empty where it does."""
        # The `NativeWatch`, by which CPython tells of changes; None where it does not.
        self._native: Any = None
        self.picture: Picture | None = None
        """What the last walk has found; None without graphs."""
        # The values of its places as of the last look.
        self._last: list[Any] = []
        # What the last `take` found.
        self._taken = HostChanges()
        # `_where` of a slot that is left out -> its holder, kept alive so that no other object gets
        # its id.
        self._ignored: dict[tuple[int, object], Any] = {}
        # The same of slots that the last run of the forward has changed.
        self._moved: dict[tuple[int, object], Any] = {}
        # Containers whose new items are left out, as of requests that come and go: id -> the
        # container, and the keys or indices that were there before.
        self._closed: dict[int, tuple[Any, frozenset[Any]]] = {}

    @property
    def watched(self) -> int:
        """How many dicts and classes CPython tells of."""
        return 0 if self._native is None else self._native.count

    @property
    def has_change(self) -> bool:
        """Whether CPython has told of a change since `take`."""
        return self._native is not None and bool(self._native.has_change)

    def over(self, looks: Iterator[bool]) -> Iterator[bool]:
        """`looks`, but false from a change on until `take`."""
        if self._native is None:
            return looks
        self._native.looks = looks
        watch: Iterator[bool] = self._native
        return watch

    def stop(self) -> None:
        """Watch nothing any more: there are no graphs. Others may watch the same dicts."""
        if self._native is not None:
            self._native.stop()

    # What is watched -----------------------------------------------------------------------------

    def aim(self, places: Places) -> None:
        """Watch what a walk has found, as of now."""
        if self.picture is None:
            self.why_not = watch_state()
            self._native = None if self.why_not else NativeWatch(repeat(True))
        self._taken = HostChanges()
        if self._native is not None:
            try:
                self._native.aim({at: self._watched(each) for at, each in places.keys.items()})
            except RuntimeError as error:
                # Somebody else took the last watcher since it was asked for.
                self.why_not, self._native = str(error), None
        self.picture = Picture(places)
        self._last = self.picture.was

    def is_as_aimed(self) -> bool:
        """Whether nothing at all has changed since `aim`."""
        picture = self.picture
        return picture is not None and picture.are_same(picture.was, picture.take())

    def _watched(self, place: Place) -> tuple[Any, frozenset[Any] | set[str] | None]:
        """A dict or class, and which keys of it count; None for all."""
        closed = self._closed.get(id(place.holder))
        return place.holder, place.key.names if closed is None else closed[1]

    def _is_new(self, place: Place | None) -> bool:
        """Whether a slot is a new item of a container in which these are left out, or below one."""
        while place is not None:
            _, olds = self._closed.get(id(place.holder), (None, None))
            if olds is not None and place.way in (ITEM, slots.ELEMENT) and place.key not in olds:
                return True
            place = place.owner
        return False

    def glances(self, read: Sequence[Read], over: Iterator[bool]) -> tuple[Iterator[bool], int]:
        """`glances` at the places whose changes CPython does not tell, those of tensors that graphs
        `read` included."""
        # A place that is in both is one of a tensor's.
        of_reads = self._untold((each.place, each.held) for each in read)
        picture, others = self.picture, list[PlaceValue]()
        if picture is not None:
            last = dict(zip(map(id, picture.slots), self._last, strict=True))
            values = map(last.__getitem__, map(id, picture.glanced))
            others = self._untold(zip(picture.glanced, values, strict=True))
        return glances(read, ring_of(of_reads, others), PLACES[self.watched > 0], over)

    def _untold(self, rows: Iterable[PlaceValue]) -> list[PlaceValue]:
        """Those of the places that a step has to glance at, each once."""
        told_of = {} if self._native is None or self.picture is None else self.picture.keys
        skips, untold = bool(self._ignored or self._closed), dict[int, PlaceValue]()
        for place, value in rows:
            if place.way is slots.TUPLE_ITEM and isinstance(place.holder, Place):
                # A tuple never changes: what may change is the place that holds it.
                place, value = place.holder, place.holder.get()
            is_told = place.way in _IN_DICTS and id(place.holder) in told_of
            is_class = place.way is KEYS and isinstance(place.holder, type)
            if not (is_told or is_class or place.way in (slots.FIXED, slots.BASE)) and not (
                skips and self._is_left_out(place)
            ):
                untold[id(place)] = place, value
        return [*untold.values()]

    def _is_left_out(self, slot: Place) -> bool:
        """Whether changes of a slot make no difference, or are the forward's own."""
        return _where(slot.holder, slot.key) in self._ignored or self._is_new(slot)

    # What has changed ----------------------------------------------------------------------------

    def take(self) -> HostChanges | None:
        """The changes since the last time, or since `aim`; None if nothing at all is another
        object."""
        changed = self._changed()
        if changed is None:
            return None
        changes = HostChanges()
        for place, was, now in changed:
            if not self._is_left_out(place):
                changes.is_structural |= place.way in _STRUCTURAL or not (
                    is_scalar(was) and is_scalar(now)
                )
                changes.changes[place.path] = told(was), told(now)
                tensors = place.way is slots.PART or {type(was), type(now)} <= _TENSORS
                changes.of_others |= set() if tensors else {place.path}
                changes.places.setdefault(place.path, []).append((place.holder, place.key))
                # What the host changes too, as a cache that it empties, is not the forward's own.
                self._moved.pop(_where(place.holder, place.key), None)
        self._taken = changes
        return changes

    def _changed(self) -> list[Changed] | None:
        """What has changed since the last look, as `Picture.changes` tells; None if nothing at all
        is another object."""
        picture = self.picture
        if picture is None:
            return None
        if self.has_change:
            self._native.take()
        was, now = self._last, picture.take()
        self._last = now
        return None if picture.are_same(was, now) else [*picture.changes(was, now)]

    def forget(self) -> list[Changed]:
        """A trial has run the forward: what has changed since `take` it has changed itself. What
        two trials have changed, and the host not between them, is left out from now on. Returns
        what has changed."""
        changed = self._changed() or []
        before, self._moved = self._moved, {}
        for place, _, _ in changed:
            # A key that is gone again was put back by a trial.
            where = _where(place.holder, place.key)
            self._moved[where] = place.holder
            if where in before:
                self._leave_out(place.holder, place.key)
        return changed

    def ignore(self, path: str) -> None:
        """Leave out from now on what the last `take` reported at a path: it makes no difference."""
        picture = self.picture
        assert picture is not None
        for holder, key in self._taken.places.get(path, ()):
            # A container's length, or its new items: leave out all new items.
            if isinstance(key, type):
                ways = (ITEM, slots.ELEMENT)
                keys = {s.key for s in picture.slots if s.holder is holder and s.way in ways}
                self._closed.setdefault(id(holder), (holder, frozenset(keys)))
            self._leave_out(holder, key)

    def places_at(self, paths: Iterable[str]) -> dict[str, Place | None]:
        """Where plain values are at these paths now; None where there is something else."""
        picture, places = self.picture, dict[str, Place | None](dict.fromkeys(paths))
        assert picture is not None
        for place, value in zip(picture.slots, self._last, strict=True) if places else ():
            if is_scalar(value) and place.path in places:
                places[place.path] = place
        return places

    def _leave_out(self, holder: Any, key: object) -> None:
        """Report changes of one slot no more."""
        self._ignored[_where(holder, key)] = holder
        in_dicts = self.picture is not None and id(holder) in self.picture.keys
        if self._native is not None and in_dicts and not isinstance(key, type):
            self._native.ignore(holder, key)


def is_of_tensor(changed: Changed) -> bool:
    """Whether it is another tensor that is at a place, or the same one elsewhere."""
    place, was, _ = changed
    return place.way is slots.PART or isinstance(was, torch.Tensor | torch.ScriptObject)


def watch_state() -> str:
    """Why no dict can be watched in this process; empty where it can be."""
    if NativeWatch is None:
        if native_state != "in use":
            return f"the C part is left out: {native_state}"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"on Python 3.12 and 3.13 graphrt is told of changes, on {python} it is not"
    try:
        NativeWatch(repeat(True)).aim({})
    except RuntimeError as error:
        return f"no watcher of dicts is left in this process: {error}"
    return ""


def described_changes(changes: Changes) -> str:
    """Changes in words; empty where there are none."""
    return listed([Change(path, *map(told, values)) for path, values in changes.items()])


def _where(holder: object, key: object) -> tuple[int, object]:
    """A key for dicts that names one slot, without running a user's `__hash__`."""
    return id(holder), key if type(key) in (str, int, bytes) else id(key)
