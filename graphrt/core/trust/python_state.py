"""What a forward holds in Python: taken at one time, put back, and compared between two.

It does not see state of iterators and of C extensions, nor arrays above 1 MiB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, cast

import torch

from graphrt.core.base.option_values import told
from graphrt.core.base.thread_mode import unseen
from graphrt.core.trust.compare import difference
from graphrt.core.trust.places.kinds import Kind, Shape, is_array, shape_of
from graphrt.core.trust.places.slots import (
    ARRAY,
    CONTENTS,
    DEFAULT,
    LENGTH,
    MISSING,
    Place,
    base_of,
    entries,
    getters,
    items_of,
    same_array,
    same_value,
)
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.watching.watch import placed, storage_key

Changes = Mapping[str, tuple[Any, Any]]
"""By path, the values at two times, or of two runs."""

_MOST_ITEMS = 4096
_MOST_ARRAY_BYTES = 1 << 20
_MOST_BAKED_BYTES = 1 << 16
_DEEPEST = 6
_MOST_TOLD = 8
_MANY = 100_003
"""Runs after which a list that gets longer in each counts as long."""
_ROUNDED = 1e-2
"""How far tensors may be apart, over their root mean square, that count as the same."""


class PythonState:
    """The Python values that a forward reaches: numbers, which tensor or object is where, what is
    in containers and in NumPy's arrays, and the memory of its tensors. `was` has them as at first,
    in the order of `slots`."""

    def __init__(self, places: Places, *, baked: bool = False) -> None:
        """`baked` looks at what a capture may have baked in alone, which is cheap to compare: of
        containers the length, and no tensors."""
        most = _MOST_BAKED_BYTES if baked else _MOST_ARRAY_BYTES
        arrays = [each for each in places.arrays if each[1].nbytes <= most]
        # Holders first: what is in an old one is found where it was.
        slots = [place for place, _ in places.objects]
        if baked:
            contents = [Place(place, "", LENGTH, held) for place, held in places.containers]
        else:
            # What is in an array of objects is looked at by nobody.
            arrays = [(p, a) for p, a in arrays if a.flags.writeable and a.dtype != object]
            slots += [place for place, _ in (*places.arrays, *places.tensors)]
            contents = [
                Place(place, "", CONTENTS, held, base_of(held))
                for place, held in places.containers
                if len(held) <= _MOST_ITEMS
            ]
        contents += [Place(place, "", ARRAY, array) for place, array in arrays]
        self.slots = (*slots, *places.numbers, *contents)
        self._getters = getters(self.slots)
        self._numbers = slice(len(slots), len(slots) + len(places.numbers))
        self.was = self.take()
        # The tensors whose memory is known, and what they had.
        # A subclass may have no detach() of the ordinary kind.
        plain = (torch.Tensor, torch.nn.Parameter)
        tensors = [] if baked else [each for each in places.tensors if type(each[1]) in plain]
        self._memory = unseen(
            lambda: [(place, held, held.detach(), key) for place, held, key in with_keys(tensors)]
        )

    def take(self) -> list[Any]:
        """What is there now."""
        return [get() for get in self._getters]

    def restore(self, values: Sequence[Any] | None = None, *, numbers: bool = False) -> None:
        """Put back what was there at first, or what `take` has returned; or `numbers` alone."""
        which = self._numbers if numbers else slice(None)
        wanted = (self.was if values is None else values)[which]
        for slot, get, value in zip(self.slots[which], self._getters[which], wanted, strict=True):
            if slot.way.set is None or (value is MISSING and slot.way is not DEFAULT):
                continue
            now = get()
            if now is not value and not slot.way.same(value, now):
                put_back(slot, value)
        if values is None:
            for _, held, memory in self.elsewhere():
                held.data = memory.detach()

    def put(self, values: Mapping[str, Any]) -> None:
        """Put numbers at paths."""
        for slot in self.numbers if values else ():
            if slot.path in values:
                put_back(slot, values[slot.path])

    def much_later(self, now: Sequence[Any]) -> list[Any] | None:
        """What is there after many runs more like the one that left `now`; None where nobody can
        tell of any slot."""
        found = [*now]
        for at, slot in enumerate(self.slots):
            if slot.writable and now[at] is not self.was[at] and not _is_dict(slot):
                later = much_later(self.was[at], now[at])
                found[at] = now[at] if later is None else later
        return None if all(map(is_, found, now)) else found

    @property
    def numbers(self) -> Sequence[Place]:
        """The slots of plain values."""
        return self.slots[self._numbers]

    def elsewhere(self) -> list[tuple[Place, torch.Tensor, torch.Tensor]]:
        """The tensors that were given other memory (`set_`, `.data =`), and what they had."""
        found = []
        for place, held, memory, key in self._memory:
            # Asked of all tensors, several times a graph.
            try:
                is_there = held.untyped_storage()._cdata == key
            except (NotImplementedError, RuntimeError):
                is_there = False
            if not is_there and place.get() is held:
                found.append((place, held, memory))
        return found

    def changed(self, was: Sequence[Any], now: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """What is another value now, by identity."""
        if all(map(is_, was, now)):
            return {}
        return {
            slot.path: (before, after)
            for slot, before, after in zip(self.slots, was, now, strict=True)
            if after is not before and not slot.way.same(before, after)
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
            if slot.way is CONTENTS:
                mine, other = (entries(slot.holder, items) for items in (mine, other))
            found.setdefault(slot.path, (mine, other))
        return found

    def rebound(self, now: Sequence[Any], used: Collection[int | None]) -> list[str]:
        """Where a run that has just ended has put another tensor in the place of one that it had
        `used`, by the keys of storages."""
        tensors = [
            (slot, was, value)
            for slot, was, value in zip(self.slots, self.was, now, strict=True)
            if isinstance(was, torch.Tensor)
        ]
        replaced = [(slot, was) for slot, was, value in tensors if value is not was]
        replaced += [(place, memory) for place, _, memory in self.elsewhere()]
        if not replaced:
            return []
        # A normalized weight begins as the weight itself, which is read under its own name.
        stays = {storage_key(was) for _, was, value in tensors if value is was}
        keys = [(slot.path, storage_key(held)) for slot, held in replaced]
        return [path for path, key in keys if key in used and key not in stays]


def _is_dict(slot: Place) -> bool:
    return slot.way is CONTENTS and isinstance(slot.holder, dict)


def put_back(slot: Place, value: object) -> None:
    """Put a value where it was, unless the slot is gone, or read-only: then no run of the forward
    has moved it."""
    with contextlib.suppress(TypeError, IndexError, AttributeError):
        slot.set(value)


def with_keys(
    found: Iterable[tuple[Place, torch.Tensor]],
) -> list[tuple[Place, torch.Tensor, int]]:
    """Those of these tensors that have memory, each with its `storage_key`."""
    found = [*found]
    keys = placed([held for _, held in found])
    return [
        (place, held, key)
        for (place, held), (_, key, _) in zip(found, keys, strict=True)
        if key is not None
    ]


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


def much_later(was: Any, now: Any) -> Any:
    """What a text or the items of a list are after many runs more like the one that made `now` of
    `was`: far longer, or empty; a tuple has its numbers moved on. None where nobody can tell."""
    if type(was) is not type(now) or not isinstance(now, str | bytes | tuple | list):
        return None
    was, now = cast(tuple[Any, ...], was), cast(tuple[Any, ...], now)
    if len(now) > len(was):
        return now + now[len(was) :] * _MANY
    if len(now) < len(was):
        return now[:0]
    if not isinstance(now, tuple):
        return None
    moved = [
        b if same_value(a, b) or step_of(a, b) is None else further(a, b, _MANY)
        for a, b in zip(was, now, strict=True)
    ]
    return tuple.__new__(type(now), moved)


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
        return items_of(value, base_of(value))
    return [*value] if shape.kind in (Kind.TUPLE, Kind.FROZENSET) else None


def only_tensors_differ(ours: Any, theirs: Any, rounding: float = 0.0) -> bool:
    """Whether two values that differ are the same but for tensors, and for floats that have been
    read from tensors of such a `rounding`, over the largest beside them."""
    return _alike(ours, theirs, tensors=False, rounding=rounding)


def _alike(
    ours: Any,
    theirs: Any,
    depth: int = _DEEPEST,
    *,
    tensors: bool = True,
    rounding: float = 0.0,
    scale: float = 0.0,
) -> bool:
    """Whether two runs have left the same; without `tensors`, but for these. Objects of which
    nothing is known count as the same, and so do floats that differ by `rounding`, over the larger
    one or `scale`."""
    if ours is theirs or depth == 0:
        return True
    if type(ours) is not type(theirs):
        return False
    shape = shape_of(type(ours))
    if shape.kind is Kind.PLAIN:
        return same_value(ours, theirs) or (
            isinstance(ours, float)
            and 0 < abs(ours - theirs) <= rounding * max(abs(ours), abs(theirs), scale)
        )
    if shape.kind is Kind.TENSOR:
        apart = unseen(lambda: difference(ours, theirs, rounded=True)) if tensors else None
        return apart is None or apart.relative <= _ROUNDED
    if shape.kind in (Kind.SET, Kind.FROZENSET):
        return len(ours) == len(theirs) and bool(ours == theirs)
    if is_array(type(ours)):
        return same_array(ours, theirs) or _rounded(ours, theirs, rounding)
    mine, other = (_members_of(own, shape, tensors=tensors) for own in (ours, theirs))
    if rounding:
        scale = max([scale, *(abs(each) for each in other if isinstance(each, float))])
    inner = partial(_alike, depth=depth - 1, tensors=tensors, rounding=rounding, scale=scale)
    return len(mine) == len(other) and all(map(inner, mine, other))


def _rounded(ours: Any, theirs: Any, rounding: float) -> bool:
    """Whether two arrays of floats differ by `rounding` alone."""
    if not rounding or any(each.dtype.kind != "f" or each.itemsize > 8 for each in (ours, theirs)):
        return False
    apart = unseen(lambda: difference(torch.tensor(ours), torch.tensor(theirs)))
    return apart is None or apart.relative <= rounding


def _members_of(value: Any, shape: Shape, *, tensors: bool) -> list[Any]:
    """What an object holds, of a dict and of attributes as pairs; without `tensors` the rest."""
    if shape.kind is Kind.OBJECT:
        value = _attributes_of(value, shape)
    found = _inner_of(value, shape_of(type(value))) or []
    if isinstance(value, dict):
        found = entries(value, found)
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
