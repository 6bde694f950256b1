"""What a forward holds in Python: taken at one time, put back, and compared between two.

It does not see state of iterators and of C extensions, nor arrays above 1 MiB.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch

from graphrt.core.base.option_values import told
from graphrt.core.base.thread_mode import unseen
from graphrt.core.trust.compare import difference
from graphrt.core.trust.places.kinds import Kind, Shape, is_array, shape_of
from graphrt.core.trust.places.slots import MISSING, Place, same_value
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.watching.watch import storage_key

Changes = Mapping[str, tuple[Any, Any]]
"""By path, the values at two times, or of two runs."""

_MOST_ITEMS = 4096
_MOST_ARRAY_BYTES = 1 << 20
_MOST_BAKED_BYTES = 1 << 16
_DEEPEST = 6
_MOST_TOLD = 8
_ROUNDED = 1e-2
"""How far tensors may be apart, over their root mean square, that count as the same."""


class Slot(NamedTuple):
    """One value: an attribute or item, the contents of a container, or those of an array."""

    place: Place
    get: Callable[[], Any]
    put: Callable[[Any], object] | None
    """None where it is read-only."""
    same: Callable[[Any, Any], bool] = same_value
    """Whether two values are one, by identity or as plain values."""
    container: Any = None
    text: str = "{}"

    @property
    def path(self) -> str:
        """Put together when somebody asks, which few do, as that of a place."""
        return self.text.format(self.place.path)


class PythonState:
    """The Python values that a forward reaches: numbers, which tensor or object is where, what is
    in containers and in NumPy's arrays, and the memory of its tensors. `was` has them as at first,
    in the order of `slots`."""

    def __init__(self, places: Places, *, baked: bool = False) -> None:
        """`baked` looks at what a capture may have baked in alone, which is cheap to compare: of
        containers the length, and no tensors."""
        containers = places.containers
        most = _MOST_BAKED_BYTES if baked else _MOST_ARRAY_BYTES
        arrays = [each for each in places.arrays if each[1].nbytes <= most]
        numbers = [*map(_place_slot, places.numbers)]
        # Holders first: what is in an old one is found where it was.
        slots = [_place_slot(place) for place, _ in places.objects]
        if baked:
            contents = [_length_slot(*each) for each in containers]
        else:
            # What is in an array of objects is looked at by nobody.
            arrays = [(p, a) for p, a in arrays if a.flags.writeable and a.dtype != object]
            slots += [_place_slot(place) for place, _ in (*places.arrays, *places.tensors)]
            contents = [_contents_slot(*each) for each in containers if len(each[1]) <= _MOST_ITEMS]
        contents += [_array_slot(*each) for each in arrays]
        self.slots = (*slots, *numbers, *contents)
        self._numbers = range(len(slots), len(slots) + len(numbers))
        self.was = self.take()
        # The tensors whose memory is known, and what they had.
        self._memory = [
            (place, held, memory, storage_key(memory))
            for place, held in (() if baked else places.tensors)
            if (memory := _memory_of(held)) is not None
        ]

    def take(self) -> list[Any]:
        """What is there now."""
        return [slot.get() for slot in self.slots]

    def restore(self, values: Sequence[Any] | None = None, *, numbers: bool = False) -> None:
        """Put back what was there at first, or what `take` has returned; or `numbers` alone."""
        wanted = self.was if values is None else values
        for at in self._numbers if numbers else range(len(self.slots)):
            slot, value = self.slots[at], wanted[at]
            if slot.put is None or value is MISSING:
                continue
            now = slot.get()
            if now is not value and not slot.same(value, now):
                slot.put(value)
        if values is None:
            for _, held, memory in self.elsewhere():
                held.data = memory.detach()

    def put(self, values: Mapping[str, Any]) -> None:
        """Put numbers at paths."""
        for slot in self.numbers if values else ():
            if slot.path in values and slot.put is not None:
                slot.put(values[slot.path])

    @property
    def numbers(self) -> Sequence[Slot]:
        """The slots of plain values."""
        return self.slots[self._numbers.start : self._numbers.stop]

    def elsewhere(self) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
        """The tensors that were given other memory (`set_`, `.data =`), and what they had."""
        for place, held, memory, key in self._memory:
            if not _is_in(held, key) and place.get() is held:
                yield place, held, memory

    def changed(self, was: Sequence[Any], now: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """What is another value now, by identity."""
        if all(map(is_, was, now)):
            return {}
        return {
            slot.path: (before, after)
            for slot, before, after in zip(self.slots, was, now, strict=True)
            if after is not before and not slot.same(before, after)
        }

    def moved(self) -> dict[str, tuple[Any, Any]]:
        """What is not as it was when this was last asked."""
        was, self.was = self.was, self.take()
        return self.changed(was, self.was)

    def diff(self, ours: Sequence[Any], theirs: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """Where two runs have left other values, which are compared by what is in them."""
        found: dict[str, tuple[Any, Any]] = {}
        for slot, mine, other in zip(self.slots, ours, theirs, strict=True):
            if _alike(mine, other):
                continue
            if slot.container is not None:
                mine, other = (_entries(slot.container, items) for items in (mine, other))
            found.setdefault(slot.path, (mine, other))
        return found

    def rebound(self, now: Sequence[Any], used: Collection[int | None]) -> list[str]:
        """Where a run that has just ended has put another tensor in the place of one that it had
        `used`, by the keys of storages."""
        tensors = [
            (slot.path, was, value)
            for slot, was, value in zip(self.slots, self.was, now, strict=True)
            if isinstance(was, torch.Tensor)
        ]
        # A normalized weight begins as the weight itself, which is read under its own name.
        stays = {storage_key(was) for _, was, value in tensors if value is was}
        replaced = [(path, was) for path, was, value in tensors if value is not was]
        replaced += [(place.path, memory) for place, _, memory in self.elsewhere()]
        keys = [(path, storage_key(held)) for path, held in replaced]
        return [path for path, key in keys if key in used and key not in stays]


def _place_slot(place: Place) -> Slot:
    def put(value: object) -> None:
        # What cannot be set any more is gone, or read-only: no run of the forward has moved it.
        with contextlib.suppress(TypeError, IndexError, AttributeError):
            place.set(value)

    return Slot(place, place.getter(), put if place.writable else None)


def _length_slot(place: Place, container: Any) -> Slot:
    return Slot(place, partial(len, container), None, text="len({})")


def _contents_slot(place: Place, held: Any) -> Slot:
    base = _base_of(held)
    # A set by its members: theirs is the hash, which is not asked here.
    return Slot(place, partial(_items_of, held, base), partial(_refill, held), _are_same, held)


def _array_slot(place: Place, array: Any) -> Slot:
    return Slot(place, array.copy, partial(array.__setitem__, ...), _equal_arrays)


def _are_same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))


def _equal_arrays(ours: Any, theirs: Any) -> bool:
    return bool(ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes())


def _base_of(container: Any) -> Any:
    bases = type(container).__mro__
    return next(base for base in (OrderedDict, dict, set, deque, list) if base in bases)


def _items_of(container: Any, base: Any) -> list[Any]:
    items = [*base.__iter__(container)]
    return [*items, *base.values(container)] if issubclass(base, dict) else items


def _refill(container: Any, items: list[Any]) -> None:
    """Put other items into a container, by the methods of Python's own types: `update` of a
    Counter would add."""
    base = _base_of(container)
    base.clear(container)
    if issubclass(base, dict):
        for key, value in _entries(container, items):
            base.__setitem__(container, key, value)
    elif base is set:
        set.update(container, items)
    else:
        base.extend(container, items)


def _entries(container: Any, items: list[Any]) -> list[Any]:
    """The items of a container, of a dict as pairs of key and value."""
    if not isinstance(container, dict):
        return items
    half = len(items) // 2
    return [*zip(items[:half], items[half:], strict=True)]


def _memory_of(held: torch.Tensor) -> torch.Tensor | None:
    # A subclass may have no detach() of the ordinary kind.
    plain = type(held) in (torch.Tensor, torch.nn.Parameter)
    return unseen(held.detach) if plain and storage_key(held) is not None else None


def _is_in(tensor: torch.Tensor, key: int | None) -> bool:
    """Whether its memory is known by `key`. Asked of all, several times a graph."""
    try:
        return bool(tensor.untyped_storage()._cdata == key)
    except (NotImplementedError, RuntimeError):
        return False


# Numbers and words -------------------------------------------------------------------------------


def step_of(was: Any, now: Any) -> Any:
    """By how much a number was moved; None for what is none."""
    if isinstance(was, bool) and isinstance(now, bool):
        return 1
    if type(was) is not type(now) or not isinstance(was, int | float):
        return None
    return now - was


def further(was: Any, now: Any, steps: int) -> Any:
    """A number that went from `was` to `now`, moved on by as many such steps."""
    return (not was) if isinstance(was, bool) else was + step_of(was, now) * steps


def described(changes: Changes, text: str = "{path} = {0}, then {1}") -> str:
    """Changes in words; of two runs, with another `text`."""
    pairs = [
        text.format(*map(told, both), path=path) for path, both in [*changes.items()][:_MOST_TOLD]
    ]
    more = len(changes) - _MOST_TOLD
    return ", ".join(pairs) + (f" and {more} more" if more > 0 else "")


# What is in values -------------------------------------------------------------------------------


def is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether it holds plain values alone: no tensor, and nothing that is not known."""
    shape = shape_of(type(value))
    if shape.kind is Kind.PLAIN or is_array(type(value)):
        return True
    inner = _inner_of(value, shape) if depth else None
    return inner is not None and all(is_plain(each, depth - 1) for each in inner)


def _inner_of(value: Any, shape: Shape) -> list[Any] | None:
    """What an object holds: the members of a container, or the values of attributes."""
    if shape.kind is Kind.OBJECT:
        return [*_attributes_of(value, shape).values()]
    if shape.kind in (Kind.LIST, Kind.DEQUE, Kind.SET, Kind.DICT):
        return _items_of(value, _base_of(value))
    return [*value] if shape.kind in (Kind.TUPLE, Kind.FROZENSET) else None


def only_tensors_differ(ours: Any, theirs: Any) -> bool:
    """Whether two values that differ are the same but for tensors."""
    return _alike(ours, theirs, tensors=False)


def _alike(ours: Any, theirs: Any, depth: int = _DEEPEST, *, tensors: bool = True) -> bool:
    """Whether two runs have left the same; without `tensors`, but for these. Objects of which
    nothing is known count as the same."""
    if ours is theirs or depth == 0:
        return True
    if type(ours) is not type(theirs):
        return False
    shape = shape_of(type(ours))
    if shape.kind is Kind.PLAIN:
        return same_value(ours, theirs)
    if shape.kind is Kind.TENSOR:
        apart = unseen(lambda: difference(ours, theirs, rounded=True)) if tensors else None
        return apart is None or apart.relative <= _ROUNDED
    if shape.kind in (Kind.SET, Kind.FROZENSET):
        return len(ours) == len(theirs) and bool(ours == theirs)
    if is_array(type(ours)):
        return _equal_arrays(ours, theirs)
    mine, other = (_members_of(own, shape, tensors=tensors) for own in (ours, theirs))
    inner = partial(_alike, depth=depth - 1, tensors=tensors)
    return len(mine) == len(other) and all(map(inner, mine, other))


def _members_of(value: Any, shape: Shape, *, tensors: bool) -> list[Any]:
    """What an object holds, of a dict and of attributes as pairs; without `tensors` the rest."""
    if shape.kind is Kind.OBJECT:
        value = _attributes_of(value, shape)
    found = _inner_of(value, shape_of(type(value))) or []
    if isinstance(value, dict):
        found = _entries(value, found)
    return found if tensors else [each for each in found if not _has_tensor(each)]


def _has_tensor(value: Any) -> bool:
    members = value if type(value) is tuple else (value,)
    return any(isinstance(each, torch.Tensor) for each in members)


def _attributes_of(value: Any, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {} if shape.dict_of is None else dict(shape.dict_of(value))
    for name, slot in shape.slots:
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found
