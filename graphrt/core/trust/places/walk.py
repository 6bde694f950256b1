"""The walk from a forward to everything that its Python side holds.

1. `Walk.run` takes the nearest object that was not read yet from a queue, so that an object gets
   the shortest path, and hands it to the reader of its kind (readers.py), once.
2. The reader returns the slots of the object, and `take` sorts them: plain values, tensors, arrays,
   and objects, which join the queue.
3. `Places.links` finds afterwards, if somebody asks, which slots lead to a tensor.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.trust.places.kinds import Kind, Shape, is_library, shape_of
from graphrt.core.trust.places.slots import FIXED, Place, module_of

MOST_PLAIN = 4096
"""A container of more plain values than this is known by its identity and length only."""

MOST_HOPS = 3
"""Code is read that is so many calls away from the forward, or from a method of what it holds; a
walk without this end would read all of an installed package."""

INNER = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that matter to a forward, of those that torch gives to all of them."""

BASES: dict[Kind, Any] = {
    Kind.DICT: dict, Kind.LIST: list, Kind.DEQUE: deque, Kind.SET: set,
    Kind.TUPLE: tuple, Kind.FROZENSET: frozenset,
}  # fmt: skip
"""By whose methods a container is read: a subclass may have its own."""

_SAMPLE = 64
_BARE = (torch.Tensor, torch.nn.Parameter)
_PLAINLY: Any = torch.Tensor.__torch_function__
_DICTS = (dict, OrderedDict)
_CHANGES = (Kind.DICT, Kind.LIST, Kind.DEQUE, Kind.SET)
_PLAIN_INSIDE = (Kind.TUPLE, Kind.FROZENSET)
_LEAVES = (Kind.ARRAY, Kind.PACKED)
_CODE = (Kind.FUNCTION, Kind.CLASS, Kind.BOUND, Kind.DESCRIPTOR, Kind.CACHED)

Reader = Callable[["Walk", Any, Place, Shape], Iterable[tuple[Place, Any]]]


def where_is(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What a graph bakes in about a tensor, see `tree.identity`, and its storage, last; None if it
    has no memory of its own, or none that may be read. Runs no `__torch_function__`."""
    try:
        if type(tensor) in _BARE:
            return *tree.identity(tensor), tensor.untyped_storage()._cdata
        storage = _PLAINLY(torch.Tensor.untyped_storage, (), (tensor,))
        return *_PLAINLY(tree.identity, (), (tensor,)), storage._cdata
    except RuntimeError:
        return None


class Link(NamedTuple):
    """One slot on the way from a forward to a tensor, and the object there as it was.

    `look` gives the address of a tensor, the length of a container, or which attributes an object
    has, by ids of objects that are `kept`, so that the ids stay their own.
    """

    place: Place
    held: Any
    look: Callable[[Any], object] | None = None
    was: object = None
    kept: tuple[object, ...] = ()

    def holds(self) -> bool:
        """Whether the same object is there, and like it was."""
        if self.place.way.get(self.place.holder, self.place.key) is not self.held:
            return False
        return self.look is None or _seen(self.look, self.held) == self.was


def _link_to(place: Place, held: Any) -> Link:
    """What is at a place now."""
    look: Callable[[Any], object] | None = None
    kept: tuple[object, ...] = ()
    shape = shape_of(type(held))
    if shape.kind is Kind.TENSOR:
        look = tree.identity if type(held) in _BARE else _identity
    elif shape.dict_of is not None:
        own = shape.dict_of(held)
        look, kept = partial(_outline, shape, type(held)), (own, *map(own.get, INNER))
    elif shape.kind in _CHANGES:
        look = BASES[shape.kind].__len__
    return Link(place, held, look, None if look is None else _seen(look, held), kept)


def _seen(look: Callable[[Any], object], held: Any) -> object:
    try:
        return look(held)
    except RuntimeError:  # a tensor without memory
        return None


def _identity(tensor: torch.Tensor) -> object:
    return _PLAINLY(tree.identity, (), (tensor,))


def _outline(shape: Shape, of: type, value: Any) -> tuple[int, ...]:
    """Which attributes an object of the class `of` has, whatever their values; of a module also
    which parameters, buffers, submodules and hooks; of a container its length."""
    if type(value) is not of or shape.dict_of is None:
        return ()
    held = shape.dict_of(value)
    found = [id(held), len(held)]
    for name in INNER if shape.kind is Kind.MODULE else ():
        inner: Any = held.get(name)
        if type(inner) in _DICTS:
            found += (id(inner), len(inner))
    if shape.kind in _CHANGES:
        found.append(BASES[shape.kind].__len__(value))
    return tuple(found)


class Places:
    """What the Python side of a forward holds; every list is of pairs of a place and what is there.

    It keeps the containers and tensors that it lists alive for as long as it lives itself.

    A slot is looked up where the walk found it. Where a container was replaced since, a place still
    looks into the old one: its link does not hold any more, and a new walk is needed.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Place, torch.Tensor]] = []
        """Every slot with a tensor; a tensor with several places is in it several times."""
        self.packed: list[tuple[Place, Any]] = []
        """Objects of C++ that operators may be given in place of tensors."""
        self.code: list[tuple[Place, Any]] = []
        """The code that was read, of functions and in classes."""
        self.slots: list[tuple[Place, Any]] = []
        """Objects that were entered, holders before what they hold."""
        self.containers: list[tuple[Place, Any]] = []
        """Those of them that may get longer or shorter."""
        self.numbers: list[Place] = []
        """Every slot with a plain value: a number, text, None, dtype, device, size, member of an
        enum, or a tuple of such. A set of them is one place, and its value a frozenset."""
        self.arrays: list[tuple[Place, Any]] = []
        """Arrays of NumPy's."""
        self.generators: list[Any] = []
        """Generators of random numbers, torch's, Python's and NumPy's."""
        self.complete = True
        """Whether everything was seen; False if the limit was reached."""
        self.first: dict[int, Place] = {}
        """By the id of an object, the place at which it was read."""

    def values(self) -> list[object]:
        """The numbers as they are now, in the order of `numbers`; compare with `same_value`."""
        return [place.get() for place in self.numbers]

    @property
    def objects(self) -> list[tuple[Place, Any]]:
        """Everything but tensors that the forward gets at through a slot: another object may be
        there at another time."""
        changing = [each for each in self.slots if each[0].way is not FIXED]
        return [*self.code, *changing, *self.packed]

    def links(self, tensors: Iterable[tuple[Place, torch.Tensor]] | None = None) -> list[Link]:
        """Every slot between the forward and a tensor, or what is packed; the code that was read;
        and these `tensors` of the walk, if not all of them."""
        leading = self._leading()
        ways = [each for each in self.slots if id(self.first[id(each[1])]) in leading]
        ends = self.tensors if tensors is None else tensors
        return [_link_to(*each) for each in (*self.code, *ways, *ends, *self.packed)]

    def _leading(self) -> set[int]:
        """The ids of the first places of all objects by way of which a tensor is reached."""
        holders: dict[int, list[Place | None]] = {}
        for place, value in self.slots:
            holders.setdefault(id(self.first[id(value)]), []).append(place.owner)
        leading: set[int] = set()
        left = [place.owner for place, _ in (*self.tensors, *self.packed)]
        # A tensor's attributes may hold another one.
        while left:
            found = left.pop()
            if found is not None and id(found) not in leading:
                leading.add(id(found))
                left += holders.get(id(found), ())
        return leading


class Walk:
    """One walk; `readers` return the slots of an object of their kind."""

    def __init__(self, readers: Mapping[Kind, Reader], limit: int) -> None:
        self.places = Places()
        self.left = limit
        self.hops = 0
        self.said: set[str] = set()
        """Names in the code that was read: methods are only read once one says their name."""
        self.unsaid: dict[str, list[tuple[Place, object]]] = {}
        self.globals_read: set[tuple[int, str]] = set()
        self.modules_read: set[tuple[int, frozenset[str]]] = set()
        self.main_globals: dict[str, Any] | None = None
        self._readers = readers
        self._queue: deque[tuple[Any, Place, Shape, int]] = deque()
        self._shapes: dict[type, Shape] = {}
        self._lists: dict[Kind, list[tuple[Place, Any]]] = {
            Kind.TENSOR: self.places.tensors,
            Kind.ARRAY: self.places.arrays,
            Kind.PACKED: self.places.packed,
        }

    def run(self) -> None:
        """Read everything that is found, until nothing or nothing of the limit is left."""
        queue = self._queue
        while queue and self.left > 0:
            value, place, shape, self.hops = queue.popleft()
            if shape.kind in _CHANGES:
                self.places.containers.append((place, value))
            for _ in range(4):
                try:
                    self.take(self._readers[shape.kind](self, value, place, shape))
                    break
                except RuntimeError:  # another thread has changed the container meanwhile
                    continue
        self.places.complete = not queue and self.left > 0

    def take(self, slots: Iterable[tuple[Place, Any]]) -> None:
        """Take note of slots."""
        places, shapes, first, lists = self.places, self._shapes, self.places.first, self._lists
        for place, value in slots:
            self.left -= 1
            shape = shapes.get(type(value))
            if shape is None:
                shape = shapes[type(value)] = shape_of(type(value))
            kind = shape.kind
            if shape.draws:
                places.generators.append(value)
            if kind is Kind.PLAIN or (kind in _PLAIN_INSIDE and self.is_plain(value)):
                places.numbers.append(place)
                continue
            if kind is Kind.SKIPPED or (kind in _CODE and not _is_users(kind, value)):
                continue
            lists.get(kind, places.slots).append((place, value))
            if type(value) in _BARE and not value.__dict__:
                continue
            if kind not in _LEAVES and id(value) not in first:
                first[id(value)] = place
                self._queue.append((value, place, shape, self.hops))

    def by_name(self, place: Place, value: Any) -> bool:
        """Take note of a slot that code names; code there is one hop further away. False if that
        is too far."""
        if shape_of(type(value)).kind not in _CODE:
            self.take([(place, value)])
            return True
        if self.hops >= MOST_HOPS:
            return False
        self.hops += 1
        self.take([(place, value)])
        self.hops -= 1
        return True

    def is_plain(self, value: Any, depth: int = 4) -> bool:
        """Whether a tuple or frozenset holds nothing but plain values, and not too many."""
        base = tuple if issubclass(type(value), tuple) else frozenset
        if base.__len__(value) > MOST_PLAIN or depth == 0:
            return False
        for member in base.__iter__(value):
            kind = shape_of(type(member)).kind
            nested = kind is Kind.TUPLE and self.is_plain(member, depth - 1)
            if kind is not Kind.PLAIN and not nested:
                return False
        return True

    def is_too_long(self, values: Iterable[Any], count: int) -> bool:
        """Whether a container is not worth reading: long and of plain values, by a sample."""
        if count <= MOST_PLAIN:
            return False
        return all(shape_of(type(each)).kind is Kind.PLAIN for each in islice(values, _SAMPLE))


def _is_users(kind: Kind, value: Any) -> bool:
    if kind is Kind.CLASS:
        return not is_library(module_of(value))
    if kind is Kind.BOUND:
        return value.__self__ is not None and type(value.__self__) is not types.ModuleType
    return True
