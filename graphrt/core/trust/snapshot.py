"""State that a forward moves: taken once, put back after every run, and compared between runs.

1. `StateSnapshot(places, ...)` takes generators and Python values. Memory is taken by watches, each
   piece before its first write.
2. `restore` puts all of it back, any number of times.
3. `left` takes what a run has left, `put` brings that back, `PythonState.differences` compares two.

It does not see state of iterators and of C extensions, nor arrays above 1 MiB.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch

from graphrt.core.base.option_values import told
from graphrt.core.base.thread_mode import unseen
from graphrt.core.trust.compare import difference
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.places.kinds import Kind, Shape, is_array, shape_of
from graphrt.core.trust.places.slots import MISSING, Place, same_value
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.watching.watch import storage_key
from graphrt.core.trust.watching.writes import SavedWrites

_MOST_ITEMS = 4096
_MOST_ARRAY_BYTES = 1 << 20
_DEEPEST = 6
_MOST_TOLD = 8
_ROUNDED = 1e-2
"""How far tensors may be apart, over their root mean square, that count as the same."""


class PythonLeft(NamedTuple):
    """What was at the places of a `PythonState` at one time, in their order."""

    values: list[Any]
    contents: list[list[Any]]
    arrays: list[Any]


class Left(NamedTuple):
    """What a run has left: copies of memory, Python values, and what sets the generators so."""

    memory: list[torch.Tensor]
    python: PythonLeft
    draw_on: Callable[[], None]


class StateSnapshot:
    """The state of a forward as it was; runs save in `writes` what they write."""

    def __init__(
        self, places: Places, device_type: str, limit_bytes: int, *, sums: bool = True
    ) -> None:
        self.writes = SavedWrites(limit_bytes, sums=sums)
        self.generators = Generators(device_type)
        for generator in places.generators:
            self.generators.note(generator)
        self.python = PythonState(places)

    def restore(self) -> None:
        """Put back what was there at first."""
        self.writes.restore()
        self.generators.restore()
        self.python.restore()

    def left(self) -> Left:
        """What is there now, out of the reach of later runs."""
        return Left(self.writes.values(), self.python.left(), self.generators.now())

    def put(self, left: Left) -> None:
        """Bring back what a run has left."""
        self.writes.write(left.memory)
        left.draw_on()
        self.python.put(left.python)


class PythonState:
    """The Python values that a forward reaches: numbers, which tensor or object is where, what is
    in containers and in NumPy's arrays, and the memory of its tensors."""

    def __init__(self, places: Places) -> None:
        self.numbers = places.numbers
        self.tensors = [place for place, _ in places.tensors]
        objects = [place for place, _ in places.objects]
        # Holders first: what is in an old one is found where it was.
        arrays = [place for place, _ in places.arrays]
        self._places = (*objects, *arrays, *self.tensors, *self.numbers)
        self._containers = [each for each in places.containers if len(each[1]) <= _MOST_ITEMS]
        self._arrays = [
            (place, array)
            for place, array in places.arrays
            if array.nbytes <= _MOST_ARRAY_BYTES and array.flags.writeable and array.dtype != object
        ]
        self.was = self.left()
        # By place, of the tensors whose memory is known: what they had.
        found = self.was.values[len(objects) + len(arrays) :]
        memory = [_memory_of(each) for each in found[: len(self.tensors)]]
        self._memory = [
            (place, held, had, storage_key(had))
            for place, held, had in zip(self.tensors, found, memory, strict=False)
            if had is not None and isinstance(held, torch.Tensor)
        ]

    def now(self) -> Iterator[tuple[Place, Any, Any]]:
        """Of every place: what was there, and what is there now."""
        for place, was in zip(self._places, self.was.values, strict=True):
            yield place, was, place.get()

    def contents(self) -> Iterator[tuple[object, list[Any], list[Any]]]:
        """Of every container: itself, what was in it, and what is in it now."""
        for (_, container), was in zip(self._containers, self.was.contents, strict=True):
            yield container, was, _items_of(container)

    def arrays(self) -> Iterator[tuple[Any, Any]]:
        """Of every array: itself, and what was in it."""
        for (_, array), was in zip(self._arrays, self.was.arrays, strict=True):
            yield array, was

    def elsewhere(self) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
        """The tensors that were given other memory (`set_`, `.data =`), and what they had."""
        for place, held, memory, key in self._memory:
            if not _is_in(held, key) and place.get() is held:
                yield place, held, memory

    def restore(self) -> None:
        """Put back what was there at first."""
        self.put(self.was)
        for _, held, memory in self.elsewhere():
            held.data = memory.detach()

    def left(self) -> PythonLeft:
        """What is there now."""
        return PythonLeft(
            [place.get() for place in self._places],
            [_items_of(container) for _, container in self._containers],
            [array.copy() for _, array in self._arrays],
        )

    def put(self, left: PythonLeft) -> None:
        """Bring back what `left` has returned."""
        for place, value in zip(self._places, left.values, strict=True):
            known = value is not MISSING and place.writable
            if known and not same_value(value, place.get()):
                put_at(place, value)
        for (_, container), items in zip(self._containers, left.contents, strict=True):
            now = _items_of(container)
            if len(now) != len(items) or not all(map(is_, now, items)):
                refill(container, items)
        for (_, array), values in zip(self._arrays, left.arrays, strict=True):
            array[...] = values

    def put_numbers(self, left: PythonLeft) -> None:
        """Bring back the numbers alone, which `left` has returned."""
        values = left.values[len(left.values) - len(self.numbers) :]
        for place, value in zip(self.numbers, values, strict=True):
            known = value is not MISSING and place.writable
            if known and not same_value(value, place.get()):
                put_at(place, value)

    def differences(self, ours: PythonLeft, theirs: PythonLeft) -> dict[str, tuple[Any, Any]]:
        """Where two runs have left other values, and both of them."""
        found = {}
        for place, mine, other in zip(self._places, ours.values, theirs.values, strict=True):
            if not _alike(mine, other):
                found[place.path] = mine, other
        pairs = zip(ours.contents, theirs.contents, strict=True)
        for (place, held), (mine, other) in zip(self._containers, pairs, strict=True):
            if not _alike(mine, other):
                found.setdefault(place.path, (_entries(held, mine), _entries(held, other)))
        for (place, _), mine, other in zip(self._arrays, ours.arrays, theirs.arrays, strict=True):
            if not _alike(mine, other):
                found[place.path] = mine, other
        return found

    def move(self, path: str, value: Any) -> None:
        """Put a number at `path`."""
        for place in self.numbers:
            if place.path == path and place.writable:
                put_at(place, value)


def put_at(place: Place, value: object) -> None:
    """Put a value back."""
    # What cannot be set any more is gone, or read-only: no run of the forward has moved it.
    with contextlib.suppress(TypeError, IndexError, AttributeError):
        place.set(value)


def step_of(was: Any, now: Any) -> Any:
    """By how much a number was moved; None for what is none."""
    if isinstance(was, bool) and isinstance(now, bool):
        return 1
    if type(was) is not type(now) or not isinstance(was, int | float):
        return None
    return now - was


def is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether it holds plain values alone: no tensor, and nothing that is not known."""
    shape = shape_of(type(value))
    if shape.kind is Kind.PLAIN or is_array(type(value)):
        return True
    if depth == 0:
        return False
    if shape.kind is Kind.OBJECT:
        inner: Any = _attributes_of(value, shape).values()
    elif shape.kind in (Kind.LIST, Kind.DEQUE, Kind.SET, Kind.DICT):
        inner = _items_of(value)
    elif shape.kind in (Kind.TUPLE, Kind.FROZENSET):
        inner = value
    else:
        return False
    return all(is_plain(each, depth - 1) for each in inner)


def described(found: Mapping[str, tuple[Any, Any]]) -> str:
    """Differences in words."""
    return _listed(
        [f"{path} = {told(mine)}, not {told(other)}" for path, (mine, other) in found.items()]
    )


def changed(moved: Mapping[str, tuple[Any, Any]]) -> str:
    """Changes in words."""
    return _listed(
        [f"{path} = {told(was)}, then {told(now)}" for path, (was, now) in moved.items()]
    )


def _listed(pairs: list[str]) -> str:
    more = f" and {len(pairs) - _MOST_TOLD} more" if len(pairs) > _MOST_TOLD else ""
    return ", ".join(pairs[:_MOST_TOLD]) + more


def only_tensors_differ(ours: Any, theirs: Any) -> bool:
    """Whether two values that differ are the same but for tensors."""
    return _alike(ours, theirs, tensors=False)


def _memory_of(held: object) -> torch.Tensor | None:
    if not isinstance(held, torch.Tensor) or storage_key(held) is None:
        return None
    # A subclass may have no detach() of the ordinary kind.
    plain = type(held) in (torch.Tensor, torch.nn.Parameter)
    return unseen(held.detach) if plain else None


def _is_in(tensor: torch.Tensor, key: int | None) -> bool:
    """Whether its memory is known by `key`. Asked of all, several times a graph."""
    try:
        return bool(tensor.untyped_storage()._cdata == key)
    except (NotImplementedError, RuntimeError):
        return False


def _base_of(container: Any) -> Any:
    bases = type(container).__mro__
    return next(base for base in (OrderedDict, dict, set, deque, list) if base in bases)


def _items_of(container: Any) -> list[Any]:
    # A set by its members: theirs is the hash, which is not asked here.
    base = _base_of(container)
    items = [*base.__iter__(container)]
    return [*items, *base.values(container)] if issubclass(base, dict) else items


def refill(container: Any, items: list[Any]) -> None:
    """Put other items into a container."""
    # By the methods of Python's own types: update() of a Counter would add.
    base = _base_of(container)
    base.clear(container)
    if issubclass(base, dict):
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:], strict=True):
            base.__setitem__(container, key, value)
    elif base is set:
        set.update(container, items)
    else:
        base.extend(container, items)


def _alike(ours: Any, theirs: Any, depth: int = _DEEPEST, *, tensors: bool = True) -> bool:
    """Whether two runs have left the same; without `tensors`, but for these. Objects of which
    nothing is known count as the same."""
    if ours is theirs or depth == 0:
        return True
    if type(ours) is not type(theirs):
        return False

    def inner(mine: Any, other: Any) -> bool:
        return _alike(mine, other, depth - 1, tensors=tensors)

    shape = shape_of(type(ours))
    if shape.kind is Kind.PLAIN:
        return same_value(ours, theirs)
    if shape.kind is Kind.TENSOR:
        apart = unseen(lambda: difference(ours, theirs, rounded=True)) if tensors else None
        return apart is None or apart.relative <= _ROUNDED
    if shape.kind in (Kind.LIST, Kind.TUPLE, Kind.DEQUE):
        if not tensors:
            ours, theirs = ([e for e in own if not _has_tensor(e)] for own in (ours, theirs))
        return len(ours) == len(theirs) and all(map(inner, ours, theirs))
    if shape.kind is Kind.DICT:
        return inner(_entries(ours, _items_of(ours)), _entries(theirs, _items_of(theirs)))
    if shape.kind in (Kind.SET, Kind.FROZENSET):
        return len(ours) == len(theirs) and bool(ours == theirs)
    if shape.kind is Kind.OBJECT:
        return inner(_attributes_of(ours, shape), _attributes_of(theirs, shape))
    if is_array(type(ours)):
        return bool(ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes())
    return True


def _entries(container: Any, items: list[Any]) -> list[Any]:
    """The items of a container, of a dict as pairs of key and value."""
    if not issubclass(_base_of(container), dict):
        return items
    half = len(items) // 2
    return [*zip(items[:half], items[half:], strict=True)]


def _has_tensor(value: Any) -> bool:
    members = value if type(value) is tuple else (value,)
    return any(isinstance(each, torch.Tensor) for each in members)


def _attributes_of(value: Any, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {} if shape.dict_of is None else dict(shape.dict_of(value))
    for name, slot in shape.slots:
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found
