"""The state of a forward: saved once, put back after every run, and compared between runs.

1. `StateSnapshot(...)` saves declared state and random generators; `reach` saves Python values.
   A `Watch` saves memory, each part before a run first writes it.
2. `restore` puts everything back, any number of times; `restore_memory` only memory and what is
   declared.
3. `take` copies the state that a run has left, and `restore` puts that back. `PythonState.diff` and
   `SavedWrites.spoilt_by_padding` compare what two runs have left.

Each part has `take() -> values` and `restore(values)`; without values those of the beginning are
put back. Not saved are the state of iterators and of C extensions, and arrays above 1 MiB.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple, cast

import torch

from graphrt.core.base import tree
from graphrt.core.base.option_values import told
from graphrt.core.base.texts import listed
from graphrt.core.base.thread_mode import outside_modes, unseen
from graphrt.core.capture.state import SavedState, State
from graphrt.trust.compare import difference
from graphrt.trust.generators import WatchedGenerators
from graphrt.trust.picture import Reading
from graphrt.trust.places import slots
from graphrt.trust.places.slots import MEMORY, MISSING, Place, same_value
from graphrt.trust.places.walk import Kind, Places, is_array, shape_of
from graphrt.trust.watching.writes import Region, SavedWrites


class Left(NamedTuple):
    """The state that a run has left: what `take` of `SavedWrites`, `PythonState` and `Generators`
    returned."""

    memory: list[torch.Tensor]
    python: list[Any]
    generators: list[Any]
    padding: list[torch.Tensor]
    """The contents of the rows that padding writes."""
    declared: list[Callable[[], None]]
    """For each declared state a function that puts it there again."""


class StateSnapshot(SavedState):
    """The state of a forward at one moment, to put it back after runs. What a run writes is added
    to `memory` before it is written."""

    generators: WatchedGenerators
    generators_of = WatchedGenerators
    python: PythonState
    """Python values, once `reach` was called."""

    def __init__(
        self,
        device_type: str,
        limit_bytes: int,
        declared: Iterable[State | torch.Tensor] = (),
        *,
        sums: bool = True,
        padding: Sequence[Region] = (),
    ) -> None:
        """`padding` are rows that are put back and taken beside what runs write."""
        super().__init__(device_type, limit_bytes, declared)
        self.memory = SavedWrites(limit_bytes, sums=sums)
        self._padding = padding

    def reach(self, places: Places) -> None:
        """Save the Python values, and the generators, that a walk has found."""
        for generator in places.generators:
            self.generators.note(generator)
        self.python = PythonState(places)

    def take(self) -> Left:
        """Copies of the state now: later runs do not change them."""
        rows = unseen(lambda: [region.read() for region in self._padding])
        memory, python, generators = self.memory.take(), self.python.take(), self.generators.take()
        return Left(memory, python, generators, rows, self.copies())

    def restore(self, left: Left | None = None) -> None:
        """Put back the state of the beginning, or that which a run has left."""
        memory, python, generators, rows, declared = (None,) * 5 if left is None else left
        self.memory.restore(memory)
        for at, region in enumerate(self._padding):
            unseen(partial(region.write, region.was if rows is None else rows[at]))
        self.generators.restore(generators)
        self.python.restore(python)
        for put_back in reversed(self._declared if declared is None else declared):
            put_back()


_FIRST = itemgetter(0)

# What it holds in Python --------------------------------------------------------------------------

Changes = Mapping[str, tuple[Any, Any]]
"""path -> (before, after), or (of one run, of another)."""

_MOST_ITEMS = 4096
"""Contents of a longer container are not saved: each `take` copies all of them."""
_MOST_ARRAY_BYTES = 1 << 20
"""A larger array is not saved around runs."""
_DEEPEST = 8
"""Levels of containers and objects that are compared; what is deeper counts as equal."""
_MANY = 100_003
"""How many runs ahead `much_later` looks: a list that grows in each is long by then."""
_ROUNDED = 1e-2
"""Tensors count as the same up to this difference, relative to their root mean square."""


def _memory_places(places: Places) -> list[Place]:
    # A subclass may have no detach() of the ordinary kind.
    return [
        Place(place, "", MEMORY, held, held.detach())
        for place, held, _ in places.keyed
        if type(held) in tree.BARE
    ]


class PythonState(Reading):
    """The Python values that a forward reaches: plain values, which object or tensor each slot has,
    the contents of containers and of NumPy's arrays, and which memory tensors have. `was` has the
    values of the beginning, in the order of `slots`."""

    def __init__(self, places: Places) -> None:
        # Holders first: `restore` puts an old container back before what was in it.
        objects, content = [*map(_FIRST, places.objects)], []
        objects += map(_FIRST, places.tensors)
        for place, items in places.containers:
            if len(items) <= _MOST_ITEMS:
                content.append(Place(place, "", slots.CONTENTS, items, slots.base_of(items)))
        for place, array in places.arrays:
            # Arrays of objects are neither compared nor put back, nor are read-only ones.
            is_put_back = array.flags.writeable and array.dtype != object
            if array.nbytes <= _MOST_ARRAY_BYTES and is_put_back:
                content.append(Place(place, "", slots.ARRAY, array))
        memory = outside_modes(partial(_memory_places, places))
        super().__init__((*objects, *places.numbers, *content, *memory))
        self.numbers: Sequence[Place] = places.numbers
        """The slots of plain values."""

    def without(self, other: PythonState) -> PythonState:
        """This state, from now on without the slots that another one has."""
        known = {(id(each.holder), each.label) for each in other.slots}
        Reading.__init__(
            self, [each for each in self.slots if (id(each.holder), each.label) not in known]
        )
        return self

    def restore(self, values: Sequence[Any] | None = None) -> None:
        """Put back the values of the beginning, or those that `take` returned."""
        wanted = self.was if values is None else values
        for at in self.moved_slots(wanted, self.take()):
            slot, value = self.slots[at], wanted[at]
            if slot.writable and (value is not MISSING or slot.way is slots.DEFAULT):
                put_back(slot, value)

    def begin(self, values: Sequence[Any], numbers: Mapping[str, Any]) -> None:
        """Put back what `take` returned, and then other numbers at these paths. In the other order
        the contents of a dict would replace the numbers in it."""
        self.restore(values)
        for slot in self.numbers if numbers else ():
            if slot.path in numbers:
                put_back(slot, numbers[slot.path])

    def much_later(self, now: Sequence[Any]) -> list[Any] | None:
        """Likely values after many more runs like the one that left `now`; None if all stay."""
        values = [*now]
        for at, slot in enumerate(self.slots):
            is_dict = slot.way is slots.CONTENTS and isinstance(slot.holder, dict)
            if slot.writable and now[at] is not self.was[at] and not is_dict:
                later = much_later(self.was[at], now[at])
                values[at] = now[at] if later is None else later
        return None if all(map(is_, values, now)) else values

    def changed(self, was: Sequence[Any], now: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """path -> (before, after), for the slots whose value has changed."""
        return {self.slots[at].path: (was[at], now[at]) for at in self.moved_slots(was, now)}

    def diff(self, ours: Sequence[Any], theirs: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """path -> (ours, theirs), where two runs have left different values. Objects and containers
        are compared by what is in them."""
        differing: dict[str, tuple[Any, Any]] = {}
        for slot, our_value, their_value in zip(self.slots, ours, theirs, strict=True):
            # Memory that a run makes is at another address in each run.
            is_same = our_value is their_value or slot.way is MEMORY
            if is_same or _alike(our_value, their_value):
                continue
            if slot.way is slots.CONTENTS:
                our_value, their_value = (
                    slots.entries(slot.holder, items) for items in (our_value, their_value)
                )
            differing.setdefault(slot.path, (our_value, their_value))
        return differing

    def rebound(self, now: Sequence[Any], used: Collection[int | None]) -> list[str]:
        """The paths where the run that has just ended put another tensor in the place of one that
        it had read. `used` are the keys of the storages that it read."""
        replaced: dict[str, int | None] = {}
        for at in self.moved_slots(self.was, now):
            slot, was = self.slots[at], self.was[at]
            held = slot.key if slot.way is MEMORY else was
            if isinstance(held, torch.Tensor):
                replaced[slot.path] = tree.storage_key(held)
        if not replaced:
            return []
        # The slot of a normalized weight may begin with the weight itself, which another slot still
        # holds: the run has read that slot, not the replaced one.
        still_held = {
            tree.storage_key(was)
            for was, value in zip(self.was, now, strict=True)
            if value is was and isinstance(was, torch.Tensor)
        }
        return [path for path, key in replaced.items() if key in used and key not in still_held]


def put_back(slot: Place, value: object) -> None:
    """Put a value where it was, unless the slot is gone, or read-only: then no run of the forward
    has moved it."""
    with contextlib.suppress(TypeError, IndexError, AttributeError):
        slot.set(value)


# Numbers and words -------------------------------------------------------------------------------


def step_of(was: Any, now: Any) -> Any:
    """By how much a number has changed (a bool by 1); None for anything but numbers."""
    if isinstance(was, bool) and isinstance(now, bool):
        return 1
    if type(was) is not type(now) or not isinstance(was, int | float):
        return None
    return now - was


def further(was: Any, now: Any, steps: int) -> Any:
    """A number that went from `was` to `now`, moved on by as many such steps."""
    return (not was) if isinstance(was, bool) else was + step_of(was, now) * steps


def much_later(was: Any, now: Any) -> Any:
    """What a text, tuple or list may be after many runs like the one that made `now` of `was`: far
    longer, or empty; of a tuple, numbers are moved on. None where that cannot be told."""
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
    # torch's own sizes refuse to be made by `tuple`.
    return torch.Size(moved) if type(now) is torch.Size else tuple.__new__(type(now), moved)


def described(changes: Changes, text: str = "{path} = {0}, then {1}") -> str:
    """Changes in words; of two runs, with another `text`."""
    return listed([text.format(*map(_in_words, both), path=path) for path, both in changes.items()])


def _in_words(value: object) -> str:
    return "nothing" if value is MISSING else told(value)


# What is in values -------------------------------------------------------------------------------


def is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value is plain, or a container or an object that holds plain values alone."""
    if shape_of(type(value)).kind is Kind.PLAIN or is_array(type(value)):
        return True
    is_set = shape_of(type(value)).base in (set, frozenset)
    members = ([*value] if is_set else _members(value)) if depth else None
    return members is not None and all(is_plain(each, depth - 1) for each in members)


def _alike(ours: Any, theirs: Any, depth: int = _DEEPEST) -> bool:
    """Whether two values have equal contents. Objects that no walk enters count as equal."""
    if ours is theirs or depth == 0:
        return True
    our_members, their_members = _members(ours), _members(theirs)
    if type(ours) is not type(theirs) or our_members is None or their_members is None:
        return _same_leaf(ours, theirs)
    return len(our_members) == len(their_members) and all(
        _alike(*pair, depth - 1) for pair in zip(our_members, their_members, strict=True)
    )


def _same_leaf(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    shape = shape_of(type(ours))
    if shape.kind is Kind.PLAIN:
        return same_value(ours, theirs)
    if shape.kind is Kind.TENSOR:
        apart = unseen(lambda: difference(ours, theirs, rounded=True))
        return apart is None or apart.relative <= _ROUNDED
    if shape.base in (set, frozenset):
        return len(ours) == len(theirs) and bool(ours == theirs)
    return not is_array(type(ours)) or slots.same_array(ours, theirs)


def _members(value: Any) -> list[Any] | None:
    """The items of a container, or the attributes of an object; pairs, of a dict and an object.
    None for a set, and for anything else."""
    shape = shape_of(type(value))
    if shape.kind is Kind.OBJECT:
        held = {} if shape.dict_of is None else dict(shape.dict_of(value))
        for name, slot in shape.slots:
            with contextlib.suppress(AttributeError):
                held[name] = slot.__get__(value)
        return [*held.items()]
    if shape.base in (list, collections.deque, dict):
        return slots.entries(value, slots.items_of(value, slots.base_of(value)))
    return [*value] if shape.base is tuple else None
