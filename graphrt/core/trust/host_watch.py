"""What a host changes on the Python side of a forward between its steps.

A graph has baked in every number, flag, hook and object that its forward looked up. A host that
changes one of them, such as the scale of an adapter, would get the replays of before.

1. After each walk `aim` has CPython tell of changes of the dicts that the walk went through: those
   of objects, modules and classes, of hooks and parameters, and globals by the names that code has.
2. `over` makes the iterator of a runner's looks say no from such a change on. A step pays nothing
   for that.
3. `take` compares all that the walk found with what was there, and gives old and new values. A
   change that was undone is none.
4. `forget` leaves out what the forward itself changes when it runs, and `ignore` what was tried
   often enough and makes no difference.

CPython tells of dicts alone, from 3.12 on. Lists, cells of closures, slots, other memory of a
tensor, an object's class and a replaced `__dict__` are looked at by glances, a few at each step,
and so is all else where nothing is told: see `looks`. Not seen at all are what is in arrays of
NumPy's and in C, and where nothing is told attributes that a host adds to a class.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

from graphrt.core.base._native_door import NativeGlances, NativeWatch, native_state
from graphrt.core.base.option_values import told
from graphrt.core.base.torch_names import global_hooks
from graphrt.core.trust.compare import listed
from graphrt.core.trust.places import slots
from graphrt.core.trust.places.slots import (
    ARRAY,
    CLASS_ATTRIBUTE,
    DEFAULT,
    ELEMENT,
    FIXED,
    ITEM,
    LENGTH,
    MISSING,
    ODD_ITEM,
    TUPLE_ITEM,
    TYPE,
    Look,
    Place,
    name_of,
)
from graphrt.core.trust.places.walk import INNER, Kind, Places, shape_of
from graphrt.core.trust.snapshot import PythonState

_IN_DICTS = (ITEM, DEFAULT, ODD_ITEM, CLASS_ATTRIBUTE)
_LONGEST_TEXT = 60
"""Longer texts are told by their length: they may be prompts."""

if NativeWatch is not None:
    atexit.register(NativeWatch.over)
    if hasattr(os, "register_at_fork"):  # nothing forks on Windows
        os.register_at_fork(after_in_child=NativeWatch.over)


class Told(NamedTuple):
    """Stands for a value that is not kept: a tensor takes memory, and an object may lead to one."""

    text: str


Changes = dict[str, tuple[Any, Any]]
"""By path, the value before, and the value now; of what is not plain, a `Told`."""


class HostChanges(NamedTuple):
    """What `take` found. `is_structural`: other objects are there, so a new walk is needed."""

    changes: Changes
    is_structural: bool


class _Owner(NamedTuple):
    """Whose dict is watched, and how its keys are told."""

    place: Place | None
    label: str
    has_items: bool

    def path(self, key: object) -> str:
        before = ("" if self.place is None else self.place.path) + self.label
        if self.has_items:
            return f"{before} (keys)"
        return f"{before}{'(any)' if key is None else key}"


class HostWatch:
    """The watch over what the graphs of one forward look up in Python."""

    def __init__(self) -> None:
        self.why_not = ""
        """Why CPython tells of no dict; empty where it does."""
        self._native: Any = None
        self.values: PythonState | None = None
        """Python values as of the last look; None without graphs."""
        # By the id of a dict or class: itself, and the keys that count.
        self._watched: dict[int, tuple[Any, frozenset[Any] | None]] = {}
        self._owners: dict[int, _Owner] = {}
        # The dicts of objects: whose it is, what gets it, and which one it was. Of an object of
        # another class than before it gets none.
        self._dicts: list[tuple[_Owner, partial[Any], Any]] = []
        # Where nobody tells: whose module's dict it is, this, and the dicts of hooks, parameters,
        # buffers and submodules in it.
        self._inner: list[tuple[_Owner, dict[str, Any], list[tuple[str, Any]]]] = []
        # Where nobody tells: whose a dict is, the dict, which keys of it count, and those that were
        # there; the dicts that one look sees the sizes of, and these sizes.
        self._outlines: list[tuple[_Owner, Any, frozenset[str] | None, list[object]]] = []
        self._sized: list[list[Any]] = []
        self._sizes: list[tuple[int, ...]] = []
        # The changes of the last `take`, by path.
        self._taken: dict[str, list[tuple[Any, Any]]] = {}
        # Slots that are left out, by `_where`, with their holders, so that the ids stay their own.
        self._ignored: dict[tuple[int, object], Any] = {}
        # Containers in which new items are left out: by id, with the keys or indices that were
        # there before. Requests that come and go are such.
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

    def aim(self, places: Places, values: PythonState) -> None:
        """Watch what a walk has found, of which `values` are as of now."""
        if self.values is None:
            self.why_not = watch_state()
            self._native = None if self.why_not else NativeWatch(repeat(True))
        self.values = values
        self._taken = {}
        self._list_dicts(places)
        if self._native is None:
            return
        try:
            self._native.aim(self._watched)
        except RuntimeError as error:
            # Somebody else took the last watcher since it was asked for.
            self.why_not, self._native = str(error), None
            self._list_dicts(places)

    def _list_dicts(self, places: Places) -> None:
        self._dicts, self._outlines, self._sized, self._inner = [], [], [], []
        watched, owners, shapes = self._watched, self._owners, places.shapes
        watched.clear()
        owners.clear()
        # Dicts of which one look sees the sizes, and which of their keys count.
        groups: list[tuple[list[tuple[_Owner, Any]], frozenset[str] | None]] = []
        for place, value in places.slots:
            if type(value) is Place or self._is_new(place):
                continue
            kind, dict_of, *_ = shapes[type(value)]
            if kind is Kind.CLASS:
                watched[id(value)] = value, None
                owners[id(value)] = _Owner(None, f"{slots.name_of(value)}.", False)
            elif kind is Kind.DICT:
                groups.append(([(_Owner(place, "", True), value)], None))
            elif kind is Kind.FUNCTION and type(value.__kwdefaults__) is dict:
                owner = _Owner(place, ", default ", False)
                groups.append(([(owner, value.__kwdefaults__)], None))
            held: Any = None if dict_of is None else dict_of(value)
            if held is None or dict_of is None:
                continue
            owner = _Owner(place, ".", False)
            # Of a `threading.local` each thread has another dict.
            if not issubclass(type(value), threading.local):
                self._dicts.append((owner, partial(_dict_of, value, type(value), dict_of), held))
            group = [(owner, held)]
            inner = _inner_of(held) if kind is Kind.MODULE else []
            group += [
                (_Owner(place, f".{name}", True), each)
                for name, each in inner
                if issubclass(type(each), dict)
            ]
            if inner and self._native is None:
                self._inner.append((owner, held, inner))
            groups.append((group, None))
        for name, hooks in global_hooks.items():
            groups.append(([(_Owner(None, name, True), hooks)], None))
        for held, names, module in places.named.values():
            groups.append(([(_Owner(None, f"global {module}", False), held)], frozenset(names)))
        for group, counted in groups:
            for owner, held in group:
                if counted is not None or id(held) not in watched:
                    watched[id(held)] = self._closed.get(id(held), (held, counted))
                    owners[id(held)] = owner
                    if self._native is None:
                        keys = dict.keys(held) if counted is None else sorted(counted & held.keys())
                        self._outlines.append((owner, held, counted, [*keys]))
        if self._native is None:
            self._sized = [[held for _, held in group] for group, _ in groups]
        self._sizes = self._sizes_now()

    def _sizes_now(self) -> list[tuple[int, ...]]:
        return [tuple(map(dict.__len__, each)) for each in self._sized]

    def _is_new(self, place: Place | None) -> bool:
        """Whether a slot is a new item of a container in which these are left out, or below one."""
        while place is not None and self._closed:
            _, known = self._closed.get(id(place.holder), (None, None))
            if known is not None and place.way in (ITEM, ELEMENT) and place.key not in known:
                return True
            place = place.owner
        return False

    def looks(self, ways: Iterable[tuple[Place, Any]]) -> tuple[list[Look], list[Look]]:
        """What nobody tells of, for glances: see `slots.looks`. First the `ways` to tensors, then
        the rest."""
        values, is_told = self.values, self._native is not None
        if values is None:
            return [], []
        leading: dict[int, tuple[Place, Any]] = {}
        others: dict[int, tuple[Place, Any]] = {}
        watched, ignored = self._watched, self._ignored
        skips = bool(ignored or self._closed)
        held = [(leading, *each) for each in ways]
        rest = zip(repeat(others), values.slots, values.was, strict=False)
        for kind, slot, value in (*held, *rest):
            way = slot.way
            if way is TUPLE_ITEM and isinstance(slot.holder, Place):
                # A tuple stays what it is: what may change is where it lies.
                slot, way, value = slot.holder, slot.holder.way, slot.holder.get()
            if way in (FIXED, ARRAY, TYPE):
                continue
            if is_told and id(slot.holder) in watched and (way in _IN_DICTS or way is LENGTH):
                continue
            if not skips or not (_where(slot) in ignored or self._is_new(slot)):
                kind[id(slot)] = slot, value
        looks = slots.looks([each for at, each in others.items() if at not in leading])
        looks += [
            (get, None, was) if NativeGlances is None else (*get.args[:2], was)
            for _, get, was in self._dicts
        ]
        looks += [(partial(_has_inner, held, was), None, True) for _, held, was in self._inner]
        looks += zip(map(tuple, self._sized), repeat(None), self._sizes, strict=False)
        return slots.looks(leading.values()), looks

    # What has changed ----------------------------------------------------------------------------

    def take(self, read: Iterable[Place]) -> HostChanges | None:
        """The changes since the last time, or since `aim`; None if nothing at all is another
        object. At the places of tensors that are `read` somebody else looks."""
        values, is_told = self.values, self._native is not None
        if values is None:
            return None
        events = self._native.take() if is_told and self._native.rung else []
        replaced = [each for each in self._dicts if each[1]() is not each[2]]
        other_inner = [each for each in self._inner if not _has_inner(*each[1:])]
        sizes, self._sizes = self._sizes, self._sizes_now()
        was, now = values.was, values.take()
        values.was = now
        moved = values.moved_slots(was, now)
        # The members of a set are another object whenever they are asked for: a model with sets
        # would be taken for a changed one at every look, and all its looks made again.
        is_same = not moved and sizes == self._sizes
        is_same = is_same and (
            all(map(is_, was, now))
            or all(
                before is after or slot.way.anew
                for slot, before, after in zip(values.slots, was, now, strict=True)
            )
        )
        if events == [] and not replaced and not other_inner and is_same:
            return None
        self._taken, changes = {}, Changes()
        structural = events is None or bool(replaced) or bool(other_inner)
        for owner, get, before in replaced:
            held, of, _ = get.args
            if type(held) is of:
                changes[owner.path("__dict__")] = _told(before), _told(get())
            else:
                changes[owner.path("__class__")] = Told(name_of(of)), Told(name_of(type(held)))
        for owner, held, inner in other_inner:
            for (name, before), (_, after) in zip(inner, _inner_of(held), strict=True):
                if before is not after:
                    changes[owner.path(name)] = _told(before), _told(after)
        # A key that went may have made room for another.
        if sizes != self._sizes or any(now[at] is MISSING for at in moved):
            structural |= self._compare_keys(changes)
        for at in moved:
            slot = values.slots[at]
            if _where(slot) in self._ignored or self._is_new(slot):
                continue
            structural |= slot.way is LENGTH or not (_is_scalar(was[at]) and _is_scalar(now[at]))
            changes[slot.path] = _told(was[at]), _told(now[at])
            self._taken.setdefault(slot.path, []).append((slot.holder, slot.key))
        compared = (
            {_where(slot) for slot in values.slots if slot.way in _IN_DICTS} if events else set()
        )
        compared |= {*map(_where, read)}
        for holder, key in events or ():
            if (id(holder), key) in compared:
                continue
            structural, path = True, self._owners[id(holder)].path(key)
            # Slots with other values would have been compared.
            changes.setdefault(path, (Told("nothing, or a tensor"), _told(_value_of(holder, key))))
            self._taken.setdefault(path, []).append((holder, key))
        return HostChanges(changes, structural)

    def _compare_keys(self, changes: Changes) -> bool:
        """Add the keys that dicts have now and had not, or had, where nobody tells; returns whether
        there are any."""
        found = False
        for owner, held, names, before in self._outlines:
            keys = [*dict.keys(held)] if names is None else sorted(names & held.keys())
            # By identity: to compare keys may run a user's `__eq__`.
            if len(keys) == len(before) and all(map(is_, keys, before)):
                continue
            found, known, there = True, {*map(id, before)}, {*map(id, keys)}
            added = [key for key in keys if id(key) not in known]
            is_less = any(id(key) not in there for key in before)
            was = Told("something else" if is_less else "nothing" if added else "another order")
            if owner.has_items or not added:
                news = listed([_text(_told(_value_of(held, key))) for key in added])
                path, now = owner.path(None), news or ("nothing" if is_less else "this one")
                changes[path] = was, Told(now)
                self._taken.setdefault(path, []).append((held, None))
                continue
            for key in added:
                path = owner.path(key)
                changes[path] = Told("nothing"), _told(_value_of(held, key))
                self._taken.setdefault(path, []).append((held, key))
        return found

    def forget(self, *, own: bool) -> bool:
        """The forward has run: what has changed since `take` it has changed itself. With `own` it
        does so at every run, and the same slots are left out from now on. Returns whether a slot
        holds another object."""
        values = self.values
        if values is None:
            return False
        if self._native is not None and self._native.rung:
            if own:
                self._native.ignore_changed()
            else:
                self._native.take()
        was, now = values.was, values.take()
        values.was = now
        for at in values.moved_slots(was, now) if own else ():
            self._ignored[_where(values.slots[at])] = values.slots[at].holder
        return not all(map(is_, was, now))

    def ignore(self, path: str) -> None:
        """What the last `take` has told at a path makes no difference: leave it out."""
        values = self.values
        assert values is not None
        for holder, key in self._taken.get(path, ()):
            owner = self._owners.get(id(holder))
            if owner is not None and owner.has_items and path == owner.path(key):
                keys = {s.key for s in values.slots if s.holder is holder and s.way is ITEM}
                self._closed.setdefault(id(holder), (holder, frozenset(keys)))
                continue
            where = id(holder), key if type(key) in (str, int) else id(key)
            self._ignored[where] = holder
            if isinstance(key, type):
                # A length: what comes after the items of the last walk is left out, too.
                count = sum(s.holder is holder and s.way is ELEMENT for s in values.slots)
                self._closed.setdefault(id(holder), (holder, frozenset(range(count))))
            elif self._native is not None and id(holder) in self._watched:
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
    return listed(
        [f"{path} = {_text(was)}, then {_text(now)}" for path, (was, now) in changes.items()]
    )


def _text(value: object) -> str:
    return value.text if isinstance(value, Told) else repr(value)


def _dict_of(held: Any, of: type, dict_of: Callable[[Any], Any]) -> Any:
    """The attributes of an object that is still of the class `of`, as `nn.LazyLinear` is not."""
    return dict_of(held) if type(held) is of else MISSING


def _inner_of(held: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a module with these attributes has as its dicts of hooks, parameters and so on."""
    return [(name, dict.get(held, name, MISSING)) for name in INNER]


def _has_inner(held: dict[str, Any], was: list[tuple[str, Any]]) -> bool:
    return all(dict.get(held, name, MISSING) is each for name, each in was)


def _where(slot: Place) -> tuple[int, object]:
    key = slot.key
    return id(slot.holder), key if type(key) in (str, int) else id(key)


def _value_of(holder: Any, key: object) -> object:
    if key is None:
        return MISSING
    if issubclass(type(holder), type):
        return slots.namespace_of(holder).get(key, MISSING)
    return dict.get(holder, key, MISSING)


def _is_scalar(value: object) -> bool:
    return shape_of(type(value)).kind is Kind.PLAIN


def _told(value: Any) -> Any:
    if value is MISSING:
        return Told("nothing")
    if type(value) is str and len(value) > _LONGEST_TEXT:
        return Told(told(value))
    return value if _is_scalar(value) else Told(f"{type(value).__name__} at {id(value):#x}")
