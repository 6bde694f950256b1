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

CPython tells of dicts alone, from 3.12 on. Lists, cells of closures, slots, other memory of a
tensor, an object's class and a replaced `__dict__` are looked at by glances, a few at each step,
and without a watcher so is everything: see `looks`. What is in NumPy arrays and in C is not seen at
all; without a watcher neither are attributes that a host adds to a class.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

from graphrt.core.base._native_door import NativeGlances, NativeWatch, native_state
from graphrt.core.base.option_values import told
from graphrt.core.base.texts import listed
from graphrt.core.base.torch_names import global_hooks
from graphrt.trust.places import slots
from graphrt.trust.places.slots import ITEM, LENGTH, MISSING, Look, Place
from graphrt.trust.places.walk import INNER, Kind, Places, Shape, shape_of
from graphrt.trust.snapshot import PythonState

_IN_DICTS = (ITEM, slots.DEFAULT, slots.ODD_ITEM, slots.CLASS_ATTRIBUTE)
"""The ways of slots in a dict or a class, of whose changes CPython can tell."""
_LONGEST_TEXT = 60
"""Longer texts are told by their length: they may be prompts."""

if NativeWatch is not None:
    atexit.register(NativeWatch.over)
    if hasattr(os, "register_at_fork"):  # nothing forks on Windows
        os.register_at_fork(after_in_child=NativeWatch.over)


class Told(NamedTuple):
    """Stands for a value that is not kept: a tensor takes memory, and an object may lead to one."""

    text: str

    def __repr__(self) -> str:
        return self.text


Changes = dict[str, tuple[Any, Any]]
"""By path, the value before, and the value now; of what is not plain, a `Told`."""


@dataclass
class HostChanges:
    """What `HostWatch.take` has found."""

    changes: Changes = field(default_factory=Changes)
    is_structural: bool = False
    """Whether other objects are there, so that a new walk is needed."""
    slots: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    """path -> the (holder, key) of each slot that has changed there, for `ignore`"""

    def note(self, path: str, was: Any, now: Any, holder: Any, key: Any) -> None:
        """Note a change at a path, and in which slot it was."""
        self.changes[path] = was, now
        self.slots.setdefault(path, []).append((holder, key))


class _Dict(NamedTuple):
    """A dict to watch, or the class whose attributes it holds. `counted` are the keys that matter,
    None for all. Paths of keys begin with `place` and `label`; the new items of a container, which
    `has_items`, have one path together."""

    held: Any
    counted: frozenset[Any] | None
    place: Place | None
    label: str
    has_items: bool = False

    def path(self, key: object) -> str:
        before = ("" if self.place is None else self.place.path) + self.label
        if self.has_items:
            return f"{before} (keys)"
        return f"{before}{'(any)' if key is None else key}"


def _dicts_in(place: Place, value: Any, shape: Shape) -> list[_Dict]:
    """The dicts of which one object consists: itself, defaults of a function, its attributes, and
    of a module what it has registered; of a class its own."""
    if shape.kind is Kind.CLASS:
        return [_Dict(value, None, None, f"{slots.name_of(value)}.")]
    if shape.kind is Kind.WRAPPER and not shape.users:
        return []  # graphrt's own: a compiled module that is sealed is no change of the host's
    dicts: list[_Dict] = []
    if shape.base is dict:
        dicts.append(_Dict(value, None, place, "", True))
    elif shape.kind is Kind.FUNCTION and type(value.__kwdefaults__) is dict:
        dicts.append(_Dict(value.__kwdefaults__, None, place, ", default "))
    if shape.dict_of is None:
        return dicts
    held = shape.dict_of(value)
    dicts.append(_Dict(held, None, place, "."))
    for name in INNER if shape.kind is Kind.MODULE else ():
        inner: Any = dict.get(held, name)
        if issubclass(type(inner), dict):
            dicts.append(_Dict(inner, None, place, f".{name}", True))
    return dicts


def _global_dicts(places: Places) -> Iterator[_Dict]:
    """Hooks of all modules, and the globals that code looks up by name."""
    for name, hooks in global_hooks.items():
        yield _Dict(hooks, None, None, name, True)
    for held, names, module in places.named.values():
        yield _Dict(held, frozenset(names), None, f"global {module}")


class HostWatch:
    """The watch over what the graphs of one forward look up in Python."""

    def __init__(self) -> None:
        self.why_not = ""
        """Why CPython tells of no dict; empty where it does."""
        # The `NativeWatch`, by which CPython tells of changes; None where it does not.
        self._native: Any = None
        self.values: PythonState | None = None
        """Python values as of the last look; None without graphs."""
        # Where CPython does not tell of new keys: index of a dict's slot among the values -> its
        # length as of the last look; id of a dict -> its keys as of the last walk.
        self._lengths: dict[int, int] = {}
        self._keys: dict[int, list[Any]] = {}
        # id of a dict or class -> how it is watched.
        self._watched: dict[int, _Dict] = {}
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
    def rung(self) -> bool:
        """Whether CPython has told of a change since `take`."""
        return self._native is not None and bool(self._native.rung)

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
        if self.values is None:
            self.why_not = watch_state()
            self._native = None if self.why_not else NativeWatch(repeat(True))
        self._taken = HostChanges()
        self._list_dicts(places)
        if self._native is not None:
            try:
                self._native.aim({at: (*each[:2],) for at, each in self._watched.items()})
            except RuntimeError as error:
                # Somebody else took the last watcher since it was asked for.
                self.why_not, self._native = str(error), None
        self._keys = {}
        if self._native is None:
            self._list_keys(places)
        self.values = PythonState(places, baked=True)
        self._lengths = {
            at: len(self._keys[id(slot.holder)])
            for at, slot in enumerate(self.values.slots)
            if slot.way is LENGTH and id(slot.holder) in self._keys
        }

    def _list_dicts(self, places: Places) -> None:
        self._watched.clear()
        dicts: list[_Dict] = []
        for place, value in places.slots:
            if not self._closed or not self._is_new(place):
                dicts += _dicts_in(place, value, places.shapes[type(value)])
        for each in (*dicts, *_global_dicts(places)):
            at = id(each.held)
            # A dict that several objects hold keeps its first entry. In the dict of a module that
            # code looks up globals in, only the names that code has count; not where the forward
            # holds the dict itself, as of `self.config = globals()` all keys may be read.
            earlier = self._watched.get(at)
            if earlier is None or (each.counted is not None and not earlier.has_items):
                closed = self._closed.get(at)
                self._watched[at] = each if closed is None else each._replace(counted=closed[1])

    def _list_keys(self, places: Places) -> None:
        """Note the keys of all dicts, and have their lengths compared: CPython tells of none."""
        listed = {id(held) for _, held in places.containers}
        for at, (held, _, place, label, _) in self._watched.items():
            if issubclass(type(held), dict):
                self._keys[at] = [*dict.keys(held)]
                if at not in listed:
                    label = label.rstrip(". ") or ".__dict__"
                    places.containers.append((Place(place, label, slots.FIXED, held), held))

    def _is_new(self, place: Place | None) -> bool:
        """Whether a slot is a new item of a container in which these are left out, or below one."""
        while place is not None:
            _, olds = self._closed.get(id(place.holder), (None, None))
            if olds is not None and place.way in (ITEM, slots.ELEMENT) and place.key not in olds:
                return True
            place = place.owner
        return False

    def looks(self, read: Iterable[tuple[Place, Any]]) -> list[Look]:
        """The looks of glances (see `slots.looks`) at the slots whose changes CPython does not
        tell, those of tensors that graphs `read` included."""
        values, watched = self.values, {} if self._native is None else self._watched
        skips = bool(self._ignored or self._closed)
        # Slots of the graphs' tensors, and all others: a slot that is in both is one of a tensor's.
        of_reads: dict[int, tuple[Place, Any]] = {}
        others: dict[int, tuple[Place, Any]] = {}
        compared = [] if values is None else [*zip(values.slots, values.was, strict=True)]
        for at, length in self._lengths.items():
            compared[at] = compared[at][0], length
        for untold, slot, value in chain(
            ((of_reads, *each) for each in read), ((others, *each) for each in compared)
        ):
            if slot.way is slots.TUPLE_ITEM and isinstance(slot.holder, Place):
                # A tuple never changes: what may change is the slot that holds it.
                slot, value = slot.holder, slot.holder.get()
            is_told = slot.way in (*_IN_DICTS, LENGTH) and id(slot.holder) in watched
            is_fixed = slot.way in (slots.FIXED, slots.BASE, slots.ARRAY)
            if not (is_fixed or is_told or (skips and self._is_left_out(slot))):
                untold[id(slot)] = slot, value
        ring = slots.ring_of([*of_reads.values()], [*others.values()])
        return slots.looks(ring, in_c=NativeGlances is not None)

    def _is_left_out(self, slot: Place) -> bool:
        """Whether changes of a slot make no difference, or are the forward's own."""
        return _where(slot.holder, slot.key) in self._ignored or self._is_new(slot)

    # What has changed ----------------------------------------------------------------------------

    def take(self, read: Iterable[Place]) -> HostChanges | None:
        """The changes since the last time, or since `aim`; None if nothing at all is another
        object. Places of tensors that are `read` are left out: `ReadSet.take` compares these."""
        values = self.values
        if values is None:
            return None
        events = self._native.take() if self.rung else []
        was, now = values.was, values.take()
        values.was = now
        # A new key has no slot: only the dict's length shows it, also where the forward added it.
        resized = [at for at, length in self._lengths.items() if now[at] != length]
        self._lengths.update((at, now[at]) for at in resized)
        if events == [] and not resized and values.are_same(was, now):
            return None
        changes = HostChanges(is_structural=events is None)
        for at in dict.fromkeys((*values.moved_slots(was, now), *resized)):
            self._note_moved(changes, values.slots[at], was[at], now[at])
        self._note_events(changes, events, read)
        # What the host changes too, as a cache that it empties, is not the forward's own.
        for holder, key in chain.from_iterable(changes.slots.values()):
            self._moved.pop(_where(holder, key), None)
        self._taken = changes
        return changes

    def _note_moved(self, changes: HostChanges, slot: Place, was: Any, now: Any) -> None:
        """Note that a slot has another value, unless it is left out."""
        if self._is_left_out(slot):
            return
        keys = self._keys.get(id(slot.holder))
        # A new key may be there in place of one that is gone, with the same length.
        if keys is not None and (slot.way is LENGTH or now is MISSING):
            entry = self._watched[id(slot.holder)]
            self._note_new_keys(changes, entry, keys)
            if slot.way is LENGTH and not entry.has_items:
                return
        changes.is_structural |= slot.way is LENGTH or not (_is_scalar(was) and _is_scalar(now))
        changes.note(slot.path, _told(was), _told(now), slot.holder, slot.key)

    def _note_new_keys(self, changes: HostChanges, entry: _Dict, keys: list[Any]) -> None:
        """Note the keys that were not there at the last walk, where CPython tells of none."""
        # By identity: to compare keys may run a user's `__eq__`.
        before = {*map(id, keys)}
        for key in [*dict.keys(entry.held)]:
            if id(key) not in before and (entry.counted is None or key in entry.counted):
                changes.is_structural = True
                now = _told(_value_of(entry.held, key))
                key = None if entry.has_items else key
                changes.note(entry.path(key), Told("nothing"), now, entry.held, key)

    def _note_events(
        self, changes: HostChanges, events: Sequence[tuple[Any, Any]] | None, read: Iterable[Place]
    ) -> None:
        """Note changes that CPython has told and no slot has shown: of new keys, or of tensors."""
        for holder, key in self._without_slot(events or (), read):
            changes.is_structural = True
            path, now = self._watched[id(holder)].path(key), _told(_value_of(holder, key))
            was, now = changes.changes.get(path, (Told("nothing, or a tensor"), now))
            changes.note(path, was, now, holder, key)

    def _without_slot(
        self, events: Sequence[tuple[Any, Any]], read: Iterable[Place]
    ) -> list[tuple[Any, Any]]:
        """The events of keys whose values are compared neither here nor, where they are `read`, by
        `ReadSet.take`."""
        if not events:
            return []
        assert self.values is not None
        in_dicts = (slot for slot in self.values.slots if slot.way in _IN_DICTS)
        compared = {_where(slot.holder, slot.key) for slot in chain(in_dicts, read)}
        return [(held, key) for held, key in events if (id(held), key) not in compared]

    def forget(self) -> bool:
        """A trial has run the forward: what has changed since `take` it has changed itself. What
        two trials have changed, and the host not between them, is left out from now on. Returns
        whether a slot holds another object."""
        values = self.values
        if values is None:
            return False
        events = (self._native.take() or []) if self.rung else []
        was, now = values.was, values.take()
        values.was = now
        stays = all(map(is_, was, now))
        if stays and not events:
            self._moved = {}
        else:
            # A key that is gone again was put back by a trial.
            added = self._without_slot(events, ())
            moved = [each for each in added if _value_of(*each) is not MISSING]
            slots = [values.slots[at] for at in values.moved_slots(was, now)]
            moved += [(slot.holder, slot.key) for slot in slots]
            before, self._moved = self._moved, {_where(*each): each[0] for each in moved}
            for holder, key in moved:
                if _where(holder, key) in before:
                    self._leave_out(holder, key)
        return not stays

    def ignore(self, path: str) -> None:
        """Leave out from now on what the last `take` reported at a path: it makes no difference."""
        values = self.values
        assert values is not None
        for holder, key in self._taken.slots.get(path, ()):
            entry = self._watched.get(id(holder))
            # The path of a container's length, or of its new items: leave out all new items.
            are_items = entry is not None and entry.has_items and path == entry.path(key)
            if are_items or isinstance(key, type):
                ways = (ITEM, slots.ELEMENT)
                keys = {s.key for s in values.slots if s.holder is holder and s.way in ways}
                self._closed.setdefault(id(holder), (holder, frozenset(keys)))
            if not are_items:
                self._leave_out(holder, key)

    def places_at(self, paths: Iterable[str]) -> dict[str, Place | None]:
        """Where plain values are at these paths now; None where there is something else."""
        values, places = self.values, dict[str, Place | None](dict.fromkeys(paths))
        assert values is not None
        for slot, value in zip(values.slots, values.was, strict=True):
            if _is_scalar(value) and slot.path in places:
                places[slot.path] = slot
        return places

    def _leave_out(self, holder: Any, key: object) -> None:
        """Report changes of one slot no more."""
        self._ignored[_where(holder, key)] = holder
        is_length = isinstance(key, type)
        if self._native is not None and id(holder) in self._watched and not is_length:
            self._native.ignore(holder, key)


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
    told_of = ((path, *map(_told, values)) for path, values in changes.items())
    return listed([f"{path} = {was!r}, then {now!r}" for path, was, now in told_of])


def _where(holder: object, key: object) -> tuple[int, object]:
    """A key for dicts that names one slot, without running a user's `__hash__`."""
    return id(holder), key if type(key) in (str, int, bytes) else id(key)


def _value_of(holder: Any, key: object) -> object:
    """What a dict, or a class, has at a key now; `MISSING` if there is nothing."""
    if key is None:
        return MISSING
    if issubclass(type(holder), type):
        return slots.namespace_of(holder).get(key, MISSING)
    return dict.get(holder, key, MISSING)


def _is_scalar(value: object) -> bool:
    return shape_of(type(value)).kind is Kind.PLAIN


def _told(value: Any) -> Any:
    """A value as changes tell it: itself if it is plain and short, else a `Told`."""
    if value is MISSING:
        return Told("nothing")
    if type(value) is str and len(value) > _LONGEST_TEXT:
        return Told(told(value))
    if _is_scalar(value) or type(value) is Told:
        return value
    return Told(f"{type(value).__name__} at {id(value):#x}")
