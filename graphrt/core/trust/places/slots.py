"""Single slots of Python containers: where they are, what is in them, what to put there.

Nothing that a user defined is run: no `__getattr__`, property, `__eq__`, `__hash__` or `__len__`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import CellType, ModuleType
from typing import Any, ClassVar

import torch


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()
"""Stands for what is in a slot that is gone or empty."""

namespace_of = type.__dict__["__dict__"].__get__
"""The attributes of a class itself, whatever its metaclass says."""

name_of = type.__dict__["__name__"].__get__
"""The name of a class."""

module_globals = vars(ModuleType)["__dict__"].__get__
"""The globals of a module, lazy or not."""

bases_of = type.__dict__["__mro__"].__get__
"""The method resolution order of a class."""


class Place:
    """One slot of one container, such as an attribute or an item of a list.

    `path` is how a user would write it; only what is `writable` can be `set`.
    """

    __slots__ = ("path",)
    writable: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def get(self) -> object:
        """What is there now; `MISSING` if the slot is gone or empty."""
        raise NotImplementedError

    def getter(self) -> Callable[[], object]:
        """What does the same as `get`, as fast as may be."""
        return self.get

    def set(self, value: object) -> None:
        """Put `value` there; `MISSING` empties the slot where that is possible.

        Raises `TypeError` if the place is not writable.
        """
        raise TypeError(f"{self.path} cannot be set: a {type(self).__name__} is read-only")


class Fixed(Place):
    """What cannot be replaced, such as the object of a bound method."""

    __slots__ = ("_value",)
    writable = False

    def __init__(self, path: str, value: object) -> None:
        self.path, self._value = path, value

    def get(self) -> object:
        return self._value


class Item(Place):
    """The value of a key of a dict: an attribute, a global, a module's parameter."""

    __slots__ = ("_dict", "_key")

    def __init__(self, path: str, holder: dict[Any, Any], key: object) -> None:
        self.path, self._dict, self._key = path, holder, key

    def get(self) -> object:
        return dict.get(self._dict, self._key, MISSING)

    def getter(self) -> Callable[[], object]:
        return functools.partial(dict.get, self._dict, self._key, MISSING)

    def set(self, value: object) -> None:
        # OrderedDict's own: it also keeps a list of its keys.
        base = OrderedDict if OrderedDict in bases_of(type(self._dict)) else dict
        if value is not MISSING:
            base.__setitem__(self._dict, self._key, value)
        elif dict.__contains__(self._dict, self._key):
            base.__delitem__(self._dict, self._key)


class FrozenItem(Item):
    """An attribute of an object that does not want to be changed."""

    __slots__ = ()
    writable = False

    set = Place.set


class ItemOfOddKey(FrozenItem):
    """A value of a dict with keys whose hash is the user's: found by identity, not written."""

    __slots__ = ()

    def getter(self) -> Callable[[], object]:
        return self.get

    def get(self) -> object:
        for key, value in items_of(self._dict) or ():
            if key is self._key:
                return value
        return MISSING


class Element(Place):
    """An item of a list or deque."""

    __slots__ = ("_base", "_holder", "_index")

    def __init__(self, path: str, holder: Any, index: int, base: Any = list) -> None:
        self.path, self._holder, self._index, self._base = path, holder, index, base

    def get(self) -> object:
        try:
            return self._base.__getitem__(self._holder, self._index)
        except IndexError:
            return MISSING

    def set(self, value: object) -> None:
        if value is MISSING:
            raise TypeError(f"{self.path} cannot be emptied: an item of a list always has a value")
        self._base.__setitem__(self._holder, self._index, value)


class TupleItem(Place):
    """An item of the tuple that is at `holder` now."""

    __slots__ = ("_holder", "_index")
    writable = False

    def __init__(self, path: str, holder: Place, index: int) -> None:
        self.path, self._holder, self._index = path, holder, index

    def get(self) -> object:
        holder = self._holder.get()
        if not issubclass(type(holder), tuple) or self._index >= tuple.__len__(holder):  # type: ignore[arg-type]
            return MISSING
        return tuple.__getitem__(holder, self._index)  # type: ignore[call-overload]


class Members(Place):
    """All members of a set of plain values, as a frozenset."""

    __slots__ = ("_set",)

    def __init__(self, path: str, holder: set[Any]) -> None:
        self.path, self._set = path, holder

    def get(self) -> object:
        return frozenset(self._set)

    def set(self, value: Any) -> None:
        set.clear(self._set)
        set.update(self._set, () if value is MISSING else value)


class Member(Place):
    """One object of a set, found by identity."""

    __slots__ = ("_base", "_object", "_set")
    writable = False

    def __init__(self, path: str, holder: Any, member: object, base: Any) -> None:
        self.path, self._set, self._object, self._base = path, holder, member, base

    def get(self) -> object:
        found = any(member is self._object for member in members_of(self._set, self._base) or ())
        return self._object if found else MISSING


class Cell(Place):
    """A variable of a closure."""

    __slots__ = ("_cell",)

    def __init__(self, path: str, cell: CellType) -> None:
        self.path, self._cell = path, cell

    def get(self) -> object:
        try:
            return self._cell.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: object) -> None:
        if value is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


class Field(Place):
    """An attribute that a descriptor of C keeps: one of `__slots__`, or a function's defaults."""

    __slots__ = ("_descriptor", "_object")

    def __init__(self, path: str, holder: object, descriptor: Any) -> None:
        self.path, self._object, self._descriptor = path, holder, descriptor

    def get(self) -> object:
        try:
            return self._descriptor.__get__(self._object)
        except AttributeError:
            return MISSING

    def set(self, value: object) -> None:
        if value is not MISSING:
            self._descriptor.__set__(self._object, value)
        elif self.get() is not MISSING:
            self._descriptor.__delete__(self._object)


class FrozenField(Field):
    """A slot of an object that does not want to be changed."""

    __slots__ = ()
    writable = False

    set = Place.set


class ClassAttribute(Place):
    """An attribute of a class itself."""

    __slots__ = ("_class", "_name")

    def __init__(self, path: str, holder: type, name: str) -> None:
        self.path, self._class, self._name = path, holder, name

    def get(self) -> object:
        return namespace_of(self._class).get(self._name, MISSING)

    def set(self, value: object) -> None:
        if value is not MISSING:
            type.__setattr__(self._class, self._name, value)
        elif self.get() is not MISSING:
            type.__delattr__(self._class, self._name)


class Target(Place):
    """What a weak reference refers to."""

    __slots__ = ("_ref",)
    writable = False

    def __init__(self, path: str, ref: weakref.ref[Any]) -> None:
        self.path, self._ref = path, ref

    def get(self) -> object:
        target = weakref.ref.__call__(self._ref)
        return MISSING if target is None else target


class ContextValue(Place):
    """What a context variable is in the current context."""

    __slots__ = ("_variable",)

    def __init__(self, path: str, variable: ContextVar[Any]) -> None:
        self.path, self._variable = path, variable

    def get(self) -> object:
        return self._variable.get(MISSING)

    def set(self, value: object) -> None:
        self._variable.set(value)


class ScriptTensor(Place):
    """A parameter or buffer of a scripted module, which torch keeps in C++."""

    __slots__ = ("_module", "_name")
    writable = False

    def __init__(self, path: str, module: torch.jit.ScriptModule, name: str) -> None:
        self.path, self._module, self._name = path, module, name

    def get(self) -> object:
        found: Any = self._module
        for name in self._name.split("."):
            found = getattr(found, name, MISSING)
        return found


# Reading containers ------------------------------------------------------------------------------


def items_of(holder: dict[Any, Any], most: int | None = None) -> list[tuple[Any, Any]] | None:
    """The first `most` items of a dict; None if other threads do not stop changing it."""
    return _read(lambda: itertools.islice(dict.items(holder), most))


def members_of(holder: Any, base: Any = list, most: int | None = None) -> list[Any] | None:
    """The first `most` members of a list, tuple, deque or set, read as a `base`."""
    return _read(lambda: itertools.islice(base.__iter__(holder), most))


def _read(iterate: Callable[[], Iterable[Any]]) -> list[Any] | None:
    for _ in range(4):
        try:
            return list(iterate())
        except RuntimeError:  # it changed meanwhile
            continue
    return None
