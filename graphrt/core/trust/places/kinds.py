"""What a walk over Python objects does with each type: one look at the type, none at the object."""

from __future__ import annotations

import argparse
import collections
import contextvars
import enum
import functools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphrt.core.trust.places.slots import (
    PLAIN_BY_TEXT,
    bases_of,
    module_globals,
    module_of,
    name_of,
    namespace_of,
)


class Kind(enum.Enum):
    """What an object is to a walk."""

    PLAIN = enum.auto()
    TENSOR = enum.auto()
    MODULE = enum.auto()
    SCRIPT = enum.auto()
    OBJECT = enum.auto()
    DICT = enum.auto()
    LIST = enum.auto()
    DEQUE = enum.auto()
    TUPLE = enum.auto()
    SET = enum.auto()
    FROZENSET = enum.auto()
    FUNCTION = enum.auto()
    BOUND = enum.auto()
    PARTIAL = enum.auto()
    CLASS = enum.auto()
    DESCRIPTOR = enum.auto()
    PROXY = enum.auto()
    REF = enum.auto()
    CONTEXT_VARIABLE = enum.auto()
    CACHED = enum.auto()
    WRAPPER = enum.auto()
    PACKED = enum.auto()
    ARRAY = enum.auto()
    SKIPPED = enum.auto()


class Shape(NamedTuple):
    """A type: its kind, how to get an object's `__dict__` (None if it has none), its slots by
    name, which of its bases (itself too) are users', whether random numbers are drawn from its
    objects, and which numbers these bases have as defaults of attributes."""

    kind: Kind
    dict_of: Callable[[Any], dict[str, Any]] | None = None
    slots: tuple[tuple[str, Any], ...] = ()
    users: tuple[type, ...] = ()
    draws: bool = False
    defaults: tuple[str, ...] = ()


_BY_C = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CACHED = type(functools.lru_cache(len))
_EXACT: dict[type, Kind] = {
    **dict.fromkeys((int, float, complex, bool, str, bytes, type(None), type(...)), Kind.PLAIN),
    **dict.fromkeys((torch.dtype, torch.device, torch.Size, torch.layout), Kind.PLAIN),
    **dict.fromkeys((torch.memory_format, range, slice), Kind.PLAIN),
    **dict.fromkeys(PLAIN_BY_TEXT, Kind.PLAIN),
    types.FunctionType: Kind.FUNCTION,
    types.MethodType: Kind.BOUND,
    types.BuiltinMethodType: Kind.BOUND,
    types.MethodWrapperType: Kind.BOUND,
    types.MappingProxyType: Kind.PROXY,
    contextvars.ContextVar: Kind.CONTEXT_VARIABLE,
    functools.cached_property: Kind.DESCRIPTOR,
    # Of C++: quantized weights, packed for their operators, are such.
    torch.ScriptObject: Kind.PACKED,
}
# The first that is a base decides. What is of none of these, and no user's, is passed over.
_BASES: tuple[tuple[type, Kind], ...] = (
    (torch.Tensor, Kind.TENSOR),
    (enum.EnumMeta, Kind.SKIPPED),
    (enum.Enum, Kind.PLAIN),
    (type, Kind.CLASS),
    (torch.jit.ScriptModule, Kind.SCRIPT),
    (torch.nn.Module, Kind.MODULE),
    (functools.partial, Kind.PARTIAL),
    # Only read where code names what is in it.
    (types.ModuleType, Kind.SKIPPED),
    (weakref.ref, Kind.REF),
    (staticmethod, Kind.DESCRIPTOR),
    (classmethod, Kind.DESCRIPTOR),
    (property, Kind.DESCRIPTOR),
    (dict, Kind.DICT),
    (list, Kind.LIST),
    (tuple, Kind.TUPLE),
    (set, Kind.SET),
    (frozenset, Kind.FROZENSET),
    (collections.deque, Kind.DEQUE),
    *((base, Kind.PLAIN) for base in (int, float, complex, str, bytes)),
)
_ENTERED: frozenset[type] = frozenset({
    types.SimpleNamespace, argparse.Namespace, functools.partialmethod,
    collections.UserDict, collections.UserList, collections.ChainMap,
    weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet,
})  # fmt: skip
"""Types of the standard library whose objects hold what a user put in."""

_LIBRARIES = sys.stdlib_module_names | {
    "builtins", "torch", "torch_npu", "torchvision", "torchaudio", "numpy", "triton", "cuda",
    "pluggy", "typing_extensions",
}  # fmt: skip
_USERS_OF_CORE = ("demo", "testing", "attention", "hosts")
"""Parts of graphrt that hold models; the others are the runtime, which nobody's forward is."""


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether a module of this dotted name holds no code of a user."""
    root, _, rest = module.partition(".")
    if root == "graphrt":
        return rest.partition(".")[0] not in _USERS_OF_CORE
    return root in _LIBRARIES


# Of what lives as long as its library: a class that a user's program makes may hold tensors.
_known: dict[type, Shape] = {
    **{of: Shape(kind) for of, kind in _EXACT.items()},
    types.FunctionType: Shape(Kind.FUNCTION, types.FunctionType.__dict__["__dict__"].__get__),
    _CACHED: Shape(Kind.CACHED, _CACHED.__dict__["__dict__"].__get__),
    # A subclass may run its `__init__` where a thread looks at it first.
    threading.local: Shape(
        Kind.OBJECT, lambda held: threading.local.__getattribute__(held, "__dict__")
    ),
}


class Shapes(dict[type, Shape]):
    """What one walk does with objects of each type, which it looks at once."""

    def __init__(self) -> None:
        super().__init__(_known)

    def __missing__(self, of: type) -> Shape:
        shape = self[of] = shape_of(of)
        return shape


def shape_of(of: type) -> Shape:
    """What a walk does with objects of the type `of`."""
    shape = _known.get(of)
    if shape is None:
        shape, module = _shape_of(of), module_of(of)
        home = sys.modules.get(module) if is_library(module) else None
        if isinstance(home, types.ModuleType) and module_globals(home).get(name_of(of)) is of:
            _known[of] = shape
    return shape


def _shape_of(of: type) -> Shape:
    kind = _kind_by_base(of)
    if kind is Kind.PLAIN or kind is Kind.SKIPPED:
        return Shape(kind)
    dict_of, slots, users = None, [], []
    for base in bases_of(of):
        names = namespace_of(base)
        own, module = names.get("__dict__"), names.get("__module__")
        # A property of that name is the user's, and is not run.
        if dict_of is None and type(own) in _BY_C and base is not type:
            dict_of = own.__get__
        if "__slots__" in names:
            slots += [each for each in names.items() if type(each[1]) is _BY_C[0]]
        if type(module) is str and not is_library(module):
            users.append(base)
    if kind is None:
        kind = _kind_of_object(of, users, bool(dict_of or slots))
    defaults = () if dict_of is None else _defaults(users)
    return Shape(kind, dict_of, tuple(slots), tuple(users), _draws(of), defaults)


def _kind_by_base(of: type) -> Kind | None:
    if issubclass(of, threading.local):
        return Kind.SKIPPED
    for base, kind in _BASES:
        if issubclass(of, base):
            return kind
    numbers = getattr(sys.modules.get("numpy"), "generic", ())
    return Kind.PLAIN if issubclass(of, numbers) else None


def _defaults(users: list[type]) -> tuple[str, ...]:
    """The names of numbers that classes have, which a first `self.steps += 1` hides."""
    found: dict[str, None] = {}
    for base in users:
        for name, value in namespace_of(base).items():
            if type(value) in (bool, int, float) and not name.startswith("__"):
                found[name] = None
    return tuple(found)


def _kind_of_object(of: type, users: list[type], has_attributes: bool) -> Kind:
    for base in bases_of(of):
        if "unwrap" in namespace_of(base):
            if base not in users and module_of(base).partition(".")[0] == "graphrt":
                return Kind.WRAPPER
            break
    if is_array(of):
        return Kind.ARRAY
    # Of torch only masks of attention and what is like them: streams, graphs and what the compiler
    # keeps are no state of a model.
    entered = of in users or module_of(of).startswith("torch.nn.")
    return Kind.OBJECT if of in _ENTERED or (entered and has_attributes) else Kind.SKIPPED


def _draws(of: type) -> bool:
    """Whether random numbers are drawn from its objects, with a state that can be read and set."""
    numpy = sys.modules.get("numpy.random")
    numpys = getattr(numpy, "Generator", ()), getattr(numpy, "RandomState", ())
    # The system's own randomness has no state.
    drawn = issubclass(of, (torch.Generator, random.Random, numpys))
    return drawn and not issubclass(of, random.SystemRandom)


def is_array(kind: type) -> bool:
    """Whether `kind` is NumPy's type of arrays, which need not be installed."""
    return kind is getattr(sys.modules.get("numpy"), "ndarray", None)


def hashes_plainly(key: object) -> bool:
    """Whether a dict can look `key` up without running a user's `__hash__` or `__eq__`."""
    of = type(key)
    if _EXACT.get(of) is Kind.PLAIN:
        return True
    if of is tuple:
        return all(map(hashes_plainly, key))  # type: ignore[call-overload]
    for name in ("__hash__", "__eq__"):
        home = next(base for base in bases_of(of) if name in namespace_of(base))
        if home is not object and not (home is enum.Enum or home is type):
            return False
    return True
