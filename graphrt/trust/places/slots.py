"""One slot of a Python object: where it is, what is in it, what to put there.

Nothing that a user defined is run: no `__getattr__`, property, `__eq__`, `__hash__` or `__len__`.
"""

from __future__ import annotations

import array
import ctypes
import io
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import is_
from types import CellType, ModuleType
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import torch


def call(function: Callable[..., Any], *args: Any) -> Any:
    """As `operator.call`, which Python 3.10 has not."""
    return function(*args)


call = getattr(operator, "call", call)


MISSING: Any = object()
"""Stands for the value of a slot that is gone or empty."""

namespace_of = type.__dict__["__dict__"].__get__
"""The attributes of a class itself, whatever its metaclass says."""

name_of = type.__dict__["__name__"].__get__
"""The name of a class."""

module_globals = vars(ModuleType)["__dict__"].__get__
"""The globals of a module, lazy or not."""

bases_of = type.__dict__["__mro__"].__get__
"""The method resolution order of a class."""


PLAIN_BY_TEXT = {Decimal, Fraction, UUID, date, datetime, time, timedelta}
"""Types of plain values beside numbers and text, which are compared as text."""


def module_of(of: type) -> str:
    """The dotted name of the module of a class, of Python's own if it does not say."""
    name = namespace_of(of).get("__module__")
    return name if type(name) is str else "builtins"


_COMPARED = {bool, torch.dtype, torch.device, torch.layout, torch.memory_format, range, frozenset}
"""Types of plain values whose `==` is Python's own; of frozensets only those of such values."""


def same_value(before: Any, after: Any) -> bool:
    """Whether two plain values are equal, NaN to itself and 1 not to True or 1.0; objects of
    types that are not torch's or Python's own are compared by identity."""
    kind = type(before)
    if before is after or kind is not type(after):
        return before is after
    if kind in _COMPARED:
        return bool(before == after)
    # As text: NaN is NaN, 0.0 is not -0.0, a Decimal's 1.0 is not 1.00, a time's zone counts.
    for base in (float, complex):
        if issubclass(kind, base):
            return base.__repr__(before) == base.__repr__(after)
    numbers = getattr(sys.modules.get("numpy"), "generic", ())
    if kind in PLAIN_BY_TEXT or issubclass(kind, numbers):
        return repr(before) == repr(after)
    for whole in (int, str, bytes):
        if issubclass(kind, whole):
            return whole.__eq__(before, after) is True
    if kind is slice:
        return same_value(before.__reduce__()[1], after.__reduce__()[1])
    if not issubclass(kind, tuple):
        return False
    mine, others = ([*tuple.__iter__(each)] for each in (before, after))
    return len(mine) == len(others) and all(map(same_value, mine, others))


def same_items(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(before) == len(after) and all(map(is_, before, after))


def same_array(before: Any, after: Any) -> bool:
    """Whether two arrays have equal bytes."""
    return bool(before.shape == after.shape and before.tobytes() == after.tobytes())


# Slots -------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How slots of one kind are read and written, each by its holder and key."""

    get: Callable[[Any, Any], object]
    set: Callable[[Any, Any, Any], None] | None = None
    """Puts a value there, `MISSING` to empty the slot; None for slots that are read-only."""
    same: Callable[[Any, Any], bool] = same_value
    """Whether two values are one, by identity or as plain values."""
    text: str = "{}"
    """What is told of a slot in place of its path."""
    anew: bool = False
    """Whether `get` makes another object at each call."""


class Place(NamedTuple):
    """One slot of one container, such as an attribute or an item of a list.

    `owner` is the place of the object that has the slot. The path is put together of the labels on
    the way when somebody asks, which few do: a walk finds thousands of places.
    """

    owner: Place | None
    label: str
    """Its part of the path."""
    way: Way
    holder: Any
    """The container: what `way` reads, such as a dict, a list or a closure's cell."""
    key: Any = None
    """Which slot of the holder: the key of an item, an index, a name; None if it has only one."""

    def __eq__(self, other: object) -> bool:
        # Equality of tuples would run that of what a user holds.
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self.path}>"

    @property
    def path(self) -> str:
        """How a user would write it: `model.layers[0].scale`, `closure scale`."""
        labels: list[str] = []
        place: Place | None = self
        while place is not None:
            labels.append(place.label)
            # Any other label is a path by itself.
            place = place.owner if place.label[:1] in ".[{(," else None
        return self.way.text.format("".join(reversed(labels)))

    @property
    def writable(self) -> bool:
        return self.way.set is not None

    def get(self) -> object:
        """The value of now; `MISSING` if the slot is gone or empty."""
        return self.way.get(self.holder, self.key)

    def set(self, value: object) -> None:
        """Put `value` there; `MISSING` empties the slot where that is possible.

        Raises `TypeError` if the place is read-only.
        """
        if self.way.set is None:
            raise TypeError(f"{self.path} cannot be set: it is read-only")
        self.way.set(self.holder, self.key, value)


PlaceValue: TypeAlias = tuple[Place, Any]
"""A place, and what was there."""


_OF_PYTHON = ("__slotnames__", "__annotations_cache__", "__annotate_func__")
"""What Python itself adds to a class: `copy.copy` of an object does, and a look at annotations."""


class Keys(NamedTuple):
    """Which keys a dict or class had, and how a new one is named: with `items` all have the name of
    the container. Of a module's globals only the `names` that code looks up count."""

    table: Any
    """The namespace of the class, or the keys of the dict, as Python's own types give them."""
    known: tuple[Any, ...]
    names: set[str] | None = None
    items: bool = False


def new_keys(place: Place) -> list[Any]:
    """The keys that count and that a dict or class, at a place of `KEYS`, did not have."""
    table, known, names, _ = place.key
    # By identity: to compare keys may run a user's `__eq__`.
    before = {*map(id, known)}
    new = [key for key in [*table] if id(key) not in before]
    if issubclass(type(place.holder), type):
        return [key for key in new if key not in _OF_PYTHON]
    return new if names is None else [key for key in new if key in names]


def _or_missing(get: Callable[[Any, Any], object], error: type[Exception]) -> Callable[..., object]:
    """`get`, but `MISSING` where it raises `error`: the slot is gone or empty."""

    def get_or_missing(holder: Any, key: Any) -> object:
        try:
            return get(holder, key)
        except error:
            return MISSING

    return get_or_missing


def _item(holder: dict[Any, Any], key: object) -> object:
    return dict.get(holder, key, MISSING)


def _set_item(holder: dict[Any, Any], key: object, value: object) -> None:
    # OrderedDict's own: it also keeps a list of its keys.
    base = OrderedDict if issubclass(type(holder), OrderedDict) else dict
    if value is not MISSING:
        base.__setitem__(holder, key, value)
    elif dict.__contains__(holder, key):
        base.__delitem__(holder, key)


def _odd_item(holder: dict[Any, Any], key: object) -> object:
    return next((value for each, value in [*dict.items(holder)] if each is key), MISSING)


def _element(holder: Any, index: int) -> object:
    return base_of(holder).__getitem__(holder, index)


def _set_element(holder: Any, index: int, value: object) -> None:
    if value is MISSING:
        raise TypeError("an item of a list always has a value")
    base_of(holder).__setitem__(holder, index, value)


def _tuple_item(holder: Place, index: int) -> object:
    value: Any = holder.get()
    if not issubclass(type(value), tuple) or index >= tuple.__len__(value):
        return MISSING
    return tuple.__getitem__(value, index)


def _member(holder: Any, member: object) -> object:
    base: Any = set if issubclass(type(holder), set) else frozenset
    return member if any(each is member for each in [*base.__iter__(holder)]) else MISSING


def _set_members(holder: set[Any], key: None, value: Any) -> None:
    set.clear(holder)
    set.update(holder, () if value is MISSING else value)


def _set_cell(cell: CellType, key: None, value: object) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


_field = _or_missing(lambda holder, descriptor: descriptor.__get__(holder), AttributeError)


def _set_field(holder: object, descriptor: Any, value: object) -> None:
    if value is not MISSING:
        descriptor.__set__(holder, value)
    elif _field(holder, descriptor) is not MISSING:
        descriptor.__delete__(holder)


def _class_attribute(holder: type, name: str) -> object:
    return namespace_of(holder).get(name, MISSING)


def _set_class_attribute(holder: type, name: str, value: object) -> None:
    if value is not MISSING:
        type.__setattr__(holder, name, value)
    elif name in namespace_of(holder):
        type.__delattr__(holder, name)


def _target(ref: Any, key: None) -> object:
    target = weakref.ref.__call__(ref)
    return MISSING if target is None else target


def base_of(container: Any) -> Any:
    """Python's own type of a container that can be changed."""
    for base in (list, OrderedDict, dict, set):
        if issubclass(type(container), base):
            return base
    return deque


def items_of(container: Any, base: Any) -> list[Any]:
    """The members of a container; of a dict all keys, and then all values."""
    items = [*base.__iter__(container)]
    return [*items, *base.values(container)] if issubclass(base, dict) else items


def entries(container: Any, items: list[Any]) -> list[Any]:
    """Such items, of a dict as pairs of key and value."""
    if not isinstance(container, dict):
        return items
    half = len(items) // 2
    return [*zip(items[:half], items[half:], strict=True)]


def _refill(container: Any, base: Any, items: list[Any]) -> None:
    """Make `items`, as `items_of` gave them, the contents of a container again."""
    # By the methods of Python's own types: `update` of a Counter would add.
    if not issubclass(base, dict):
        base.clear(container)
        (set.update if base is set else base.extend)(container, items)
        return
    # Only items that differ are written: the watch would take any item that is written for one that
    # the forward changes.
    pairs = entries(container, items)
    keys = [key for key, _ in pairs]
    kept = {*map(id, keys)}
    for key in [each for each in base.__iter__(container) if id(each) not in kept]:
        base.__delitem__(container, key)
    if not same_items([*base.__iter__(container)], keys):
        base.clear(container)
    for key, value in pairs:
        if dict.get(container, key, MISSING) is not value:
            base.__setitem__(container, key, value)


CData: Any = ctypes.c_int.__mro__[2]
"""The base class of all objects of `ctypes`."""
_C_FUNCTION: Any = ctypes.CFUNCTYPE(None).__mro__[1]
"""The base class of functions of `ctypes`, which refer to their library."""
_STREAMS: tuple[Any, ...] = (io.StringIO, io.BytesIO)


def size_of(buffer: Any) -> int:
    """How many characters, or bytes, a buffer has."""
    if issubclass(type(buffer), CData):
        return ctypes.sizeof(buffer)
    contents = _contents(buffer)
    return len(contents[0]) if type(contents) is tuple else len(contents)


def pointed_to(buffer: Any) -> list[Any]:
    """The objects that an object of `ctypes` keeps alive, as its pointers lead to them."""
    if not issubclass(type(buffer), CData) or issubclass(type(buffer), _C_FUNCTION):
        return []
    kept = vars(CData)["_objects"].__get__(buffer)
    return [] if kept is None else [kept]


def _contents(buffer: Any, key: None = None) -> Any:
    """The bytes of a buffer; of a stream its text or bytes, and where it is read next."""
    if issubclass(type(buffer), CData):
        return ctypes.string_at(ctypes.addressof(buffer), ctypes.sizeof(buffer))
    for base in _STREAMS:
        if issubclass(type(buffer), base):
            # Its attributes come last.
            return b"" if base.closed.__get__(buffer) else base.__getstate__(buffer)[:-1]
    return bytes(buffer) if type(buffer) is bytearray else buffer.tobytes()


def _set_memory(held: torch.Tensor, memory: torch.Tensor, address: object) -> None:
    if address == memory.data_ptr():
        held.data = memory.detach()


def _set_contents(buffer: Any, key: None, value: Any) -> None:
    if issubclass(type(buffer), CData):
        if len(value) == ctypes.sizeof(buffer):
            ctypes.memmove(ctypes.addressof(buffer), value, len(value))
    elif type(value) is tuple:
        base = _STREAMS[0] if issubclass(type(buffer), _STREAMS[0]) else _STREAMS[1]
        base.__setstate__(buffer, (*value, None))
    elif type(buffer) is bytearray:
        buffer[:] = value
    elif type(buffer) is array.array:
        del buffer[:]
        buffer.frombytes(value)


FIXED = Way(lambda holder, key: holder)
"""The holder itself: nothing but another forward would put something else there."""
BASE = Way(lambda holder, key: holder)
"""The same of a base class of some object's class."""
ITEM = Way(_item, _set_item)
"""A value of a dict: an attribute, a global, a module's parameter."""
DEFAULT = Way(_item, _set_item)
"""An attribute that is its class' as long as the object's own is empty."""
ODD_ITEM = Way(_odd_item)
"""A value of a dict with keys whose hash is the user's: found by identity."""
ELEMENT = Way(_or_missing(_element, IndexError), _set_element)
"""An item of a list or deque."""
TUPLE_ITEM = Way(_tuple_item)
"""An item of the tuple that is at a place now."""
MEMBER = Way(_member)
"""One object of a set, found by identity."""
MEMBERS = Way(lambda holder, key: frozenset(holder), _set_members, anew=True)
"""All members of a set of plain values, as a frozenset."""
CELL = Way(_or_missing(lambda cell, key: cell.cell_contents, ValueError), _set_cell)
"""A variable of a closure."""
FIELD = Way(_field, _set_field)
"""An attribute that a descriptor of C keeps: one of `__slots__`, or a function's defaults."""
TYPE = Way(lambda holder, key: type(holder))
"""The class of an object."""
ATTRIBUTES = Way(_or_missing(lambda holder, dict_of: dict_of(holder), TypeError))
"""The `__dict__` of an object, by what returns that of its class. It may be of another class by
now, as `nn.LazyLinear` becomes."""
CLASS_ATTRIBUTE = Way(_class_attribute, _set_class_attribute)
TARGET = Way(_target)
"""The referent of a weak reference."""
CONTEXT_VALUE = Way(
    # The variable's own default comes before one that is handed in.
    _or_missing(lambda variable, key: variable.get(), LookupError),
    lambda variable, key, value: variable.set(value),
)
"""The value of a context variable in the current context."""
CONTENTS = Way(items_of, _refill, same_items, anew=True)
"""All that is in a container; of a set its members: theirs is the hash, which is not asked."""
LENGTH = Way(lambda holder, base: base.__len__(holder), text="len({})", anew=True)
"""How much is in a container, by its `base_of`."""
ARRAY = Way(
    lambda holder, key: holder.copy(),
    lambda holder, key, value: holder.__setitem__(..., value),
    same_array,
    anew=True,
)
"""The elements of an array of NumPy's."""
BUFFER = Way(_contents, _set_contents, anew=True)
"""The contents of a buffer: `bytearray`, `array.array`, `io.StringIO`, objects of `ctypes`."""
KEYS = Way(lambda holder, keys: len(keys.table), text="{} (keys)", anew=True)
"""How many keys a dict or class has; the place's key are its `Keys`."""
IDS = Way(lambda holder, base: [*map(id, items_of(holder, base))], same=operator.eq, anew=True)
"""All that is in a dict with keys whose hash is the user's, by identity."""
BYTES = Way(lambda holder, key: (holder.shape, holder.tobytes()), anew=True)
"""The shape and the elements of an array of NumPy's."""
PART = Way(_or_missing(lambda tensor, part: part(tensor), RuntimeError), anew=True)
"""A part of where a tensor is: its address, shape, strides, dtype or device; `MISSING` once it has
no memory that may be read."""
MEMORY = Way(lambda held, memory: held.data_ptr(), _set_memory, operator.eq)
"""The address of a tensor's memory, which `set_` and `.data =` change. The place's key is an alias
of the first memory: it keeps that alive, so that no other memory gets its address."""
