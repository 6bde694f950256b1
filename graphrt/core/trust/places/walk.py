"""The walk itself: what was seen, what is still to be read, and who holds whom."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphrt.core.trust.places.kinds import (
    Kind,
    Shape,
    draws,
    is_array,
    is_library,
    module_of,
    shape_of,
)
from graphrt.core.trust.places.links import Link
from graphrt.core.trust.places.slots import MISSING, Fixed, Place, module_globals

MOST_PLAIN = 4096
"""A container of more plain values than this is known by its identity and length only."""

MOST_HOPS = 3
"""Code is read that is so many calls away from the forward, or from a method of what it holds; a
walk without this end would read all of an installed package."""

_MAY_DRAW = (Kind.OPAQUE, Kind.SKIPPED, Kind.OBJECT)
_CODE = (Kind.FUNCTION, Kind.CLASS, Kind.BOUND, Kind.DESCRIPTOR, Kind.CACHED)


class Walk:
    """A walk in breadth, so that an object gets the shortest path; `readers` hand the slots of an
    object of their kind to `slot`."""

    def __init__(
        self, readers: Mapping[Kind, Callable[[Walk, Any, Place, Shape], None]], limit: int
    ) -> None:
        self.readers = readers
        self.left = limit
        self.hops = 0
        self.queue: deque[tuple[Any, Place, Shape, int]] = deque()
        self.tensors: list[tuple[int, Place, torch.Tensor]] = []
        self.packed: list[tuple[int, Place, object]] = []
        self.slots: list[tuple[int, Place, object]] = []
        self.held_by: list[tuple[int, int]] = []
        self.guards: list[tuple[int, Link]] = []
        self.code_links: list[Link] = []
        self.numbers: list[Place] = []
        self.arrays: list[tuple[Place, Any]] = []
        self.generators: list[Any] = []
        self.opaque: list[tuple[str, str]] = []
        # Methods are only read once some code that was read says their name.
        self.said: set[str] = set()
        self.unsaid: dict[str, list[tuple[int, Place, object]]] = {}
        self.globals_read: dict[int, set[str]] = {}
        self.modules_read: set[tuple[int, frozenset[str]]] = set()
        self.main_globals: dict[str, Any] | None = None
        self._shapes: dict[type, Shape] = {}
        # By id; the object is kept, so that its id stays its own.
        self._seen: dict[int, object] = {}

    def run(self) -> None:
        """Read everything that is found, until nothing or nothing of the limit is left."""
        while self.queue and self.left > 0:
            value, place, shape, self.hops = self.queue.popleft()
            self.readers[shape.kind](self, value, place, shape)

    def shape(self, of: type) -> Shape:
        found = self._shapes.get(of)
        if found is None:
            found = self._shapes[of] = shape_of(of)
        return found

    def slot(self, owner: int, place: Place, value: Any) -> None:
        """Take note of one slot of the object whose id is `owner`."""
        self.left -= 1
        shape = self.shape(type(value))
        kind = shape.kind
        if kind in _MAY_DRAW and draws(type(value)):
            self.generators.append(value)
        if kind is Kind.PLAIN:
            self.numbers.append(place)
        elif kind is Kind.SKIPPED or value is MISSING:
            pass
        elif kind is Kind.NAMESPACE:
            # Only read where code names what is in it.
            if not is_library(str(module_globals(value).get("__name__"))):
                self.opaque.append((place.path, "module"))
        elif kind is Kind.OPAQUE or kind is Kind.PACKED:
            self.opaque.append((place.path, type(value).__qualname__))
            if kind is Kind.PACKED:
                self.packed.append((owner, place, value))
            elif is_array(type(value)):
                self.arrays.append((place, value))
        elif (kind is Kind.TUPLE or kind is Kind.FROZENSET) and self.is_plain(value):
            self.numbers.append(place)
        elif self._is_users(kind, value):
            if kind is Kind.TENSOR:
                self.tensors.append((owner, place, value))
            elif type(place) is not Fixed:
                self.slots.append((id(value), place, value))
            self.enter(owner, value, place)

    def enter(self, owner: int, value: object, place: Place) -> None:
        """Read `value`, which the object of the id `owner` holds, unless that was done."""
        self.held_by.append((owner, id(value)))
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self.queue.append((value, place, self.shape(type(value)), self.hops))

    def by_name(self, owner: int, place: Place, value: Any) -> bool:
        """Take note of a slot that code names; code there is one hop further away. False if that
        is too far."""
        if self.shape(type(value)).kind not in _CODE:
            self.slot(owner, place, value)
            return True
        if self.hops >= MOST_HOPS:
            return False
        self.hops += 1
        self.slot(owner, place, value)
        self.hops -= 1
        return True

    def keep(self, value: object) -> int:
        """The id of an object, which stays its own while the walk lives."""
        self._seen.setdefault(id(value), value)
        return id(value)

    def is_plain(self, value: Any, depth: int = 4) -> bool:
        """Whether a tuple or frozenset holds nothing but plain values, and not too many."""
        base = tuple if issubclass(type(value), tuple) else frozenset
        if base.__len__(value) > MOST_PLAIN or depth == 0:
            return False
        for member in base.__iter__(value):
            kind = self.shape(type(member)).kind
            nested = kind is Kind.TUPLE and self.is_plain(member, depth - 1)
            if kind is not Kind.PLAIN and not nested:
                return False
        return True

    def is_too_long(self, path: str, count: int, sample: Iterable[Any] | None) -> bool:
        """Whether a container is not worth reading: long and of plain values, by a sample; or None,
        if it never stops changing."""
        if sample is None:
            self.opaque.append((path, "changed all the time"))
            return True
        if count <= MOST_PLAIN:
            return False
        if all(self.shape(type(each)).kind is Kind.PLAIN for each in sample):
            self.opaque.append((path, f"{count} plain items"))
            return True
        return False

    @staticmethod
    def _is_users(kind: Kind, value: Any) -> bool:
        if kind is Kind.CLASS:
            return not is_library(module_of(value))
        if kind is Kind.BOUND:
            return value.__self__ is not None and type(value.__self__) is not types.ModuleType
        return True
