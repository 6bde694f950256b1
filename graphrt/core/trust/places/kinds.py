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

from graphrt.core.trust.places.slots import bases_of, namespace_of
from graphrt.core.trust.places.values import is_numpy_number


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
    NAMESPACE = enum.auto()
    PROXY = enum.auto()
    REF = enum.auto()
    CONTEXT_VARIABLE = enum.auto()
    CACHED = enum.auto()
    WRAPPER = enum.auto()
    PACKED = enum.auto()
    SKIPPED = enum.auto()
    OPAQUE = enum.auto()


class Shape(NamedTuple):
    """A type: its kind, how to get an object's `__dict__` (None if it has none), its slots by
    name, whether it is a frozen dataclass, and which of its bases (itself too) are users'."""

    kind: Kind
    dict_of: Callable[[Any], dict[str, Any]] | None = None
    slots: tuple[tuple[str, Any], ...] = ()
    frozen: bool = False
    users: tuple[type, ...] = ()


_EXACT: dict[type, Kind] = {
    **dict.fromkeys((int, float, complex, bool, str, bytes, type(None), type(...)), Kind.PLAIN),
    **dict.fromkeys((torch.dtype, torch.device, torch.Size, torch.layout), Kind.PLAIN),
    **dict.fromkeys((torch.memory_format, range, slice), Kind.PLAIN),
    types.FunctionType: Kind.FUNCTION,
    types.MethodType: Kind.BOUND,
    types.BuiltinMethodType: Kind.BOUND,
    types.MethodWrapperType: Kind.BOUND,
    types.MappingProxyType: Kind.PROXY,
    contextvars.ContextVar: Kind.CONTEXT_VARIABLE,
    functools.cached_property: Kind.DESCRIPTOR,
    # Of C++: quantized weights, packed for their operators, are such.
    torch.ScriptObject: Kind.PACKED,
    torch.Generator: Kind.SKIPPED,
    torch.UntypedStorage: Kind.SKIPPED,
    types.CodeType: Kind.SKIPPED,
    types.WrapperDescriptorType: Kind.SKIPPED,
    types.MethodDescriptorType: Kind.SKIPPED,
    types.ClassMethodDescriptorType: Kind.SKIPPED,
    types.GetSetDescriptorType: Kind.SKIPPED,
    types.MemberDescriptorType: Kind.SKIPPED,
    types.GenericAlias: Kind.SKIPPED,
    type(NotImplemented): Kind.SKIPPED,
    object: Kind.SKIPPED,
    type(threading.Lock()): Kind.SKIPPED,
    type(threading.RLock()): Kind.SKIPPED,
}
# The first that is a base decides.
_BASES: tuple[tuple[type, Kind], ...] = (
    (torch.Tensor, Kind.TENSOR),
    (enum.EnumMeta, Kind.SKIPPED),
    (enum.Enum, Kind.PLAIN),
    (type, Kind.CLASS),
    (torch.jit.ScriptModule, Kind.SCRIPT),
    (torch.nn.Module, Kind.MODULE),
    (functools.partial, Kind.PARTIAL),
    (types.ModuleType, Kind.NAMESPACE),
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

_SILENT = ("logging", "threading", "types", "typing", "abc", "_abc", "re", "inspect", "triton")
"""Libraries whose objects a forward takes no numbers from."""

_CACHED = type(functools.lru_cache(len))

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


def module_of(of: type) -> str:
    """The dotted name of the module of a class, "" if it does not say."""
    name = namespace_of(of).get("__module__")
    return name if type(name) is str else "builtins"


def shape_of(of: type) -> Shape:
    """What a walk does with objects of the type `of`."""
    if of is _CACHED:
        return Shape(Kind.CACHED, of.__dict__["__dict__"].__get__)
    exact = _EXACT.get(of)
    if exact is not None:
        return Shape(exact, _function_dict if of is types.FunctionType else None)
    bases = bases_of(of)
    if threading.local in bases:
        # A subclass may run its `__init__` where a thread looks at it first.
        return Shape(Kind.OBJECT, _thread_dict) if of is threading.local else Shape(Kind.OPAQUE)
    kind = next((kind for base, kind in _BASES if base in bases), None)
    if kind is None and is_numpy_number(of):
        kind = Kind.PLAIN
    if kind in (Kind.PLAIN, Kind.SKIPPED):
        return Shape(kind)
    dict_of, slots = _attributes(bases)
    if kind is None:
        kind = _kind_of_object(of, bases, bool(dict_of or slots))
    said = (namespace_of(base).get("__dataclass_params__") for base in bases)
    frozen = getattr(next((each for each in said if each is not None), None), "frozen", False)
    users = tuple(base for base in bases if not is_library(module_of(base)))
    return Shape(kind, dict_of, slots, frozen is True, users)


def _thread_dict(held: Any) -> dict[str, Any]:
    found: dict[str, Any] = threading.local.__getattribute__(held, "__dict__")
    return found


def _function_dict(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = types.FunctionType.__dict__["__dict__"].__get__(function)
    return found


_BY_C = (types.GetSetDescriptorType, types.MemberDescriptorType)


def _attributes(bases: tuple[type, ...]) -> tuple[Callable[[Any], Any] | None, Any]:
    """How to get the `__dict__` of an object, and the descriptors of its slots."""
    dict_of, slots = None, []
    for base in bases:
        names = namespace_of(base)
        found = names.get("__dict__")
        # A property of that name is the user's, and is not run.
        if dict_of is None and type(found) in _BY_C and base is not type:
            dict_of = found.__get__
        if "__slots__" in names:
            slots += [
                (name, value)
                for name, value in names.items()
                if type(value) is types.MemberDescriptorType
            ]
    return dict_of, tuple(slots)


def _kind_of_object(of: type, bases: tuple[type, ...], has_attributes: bool) -> Kind:
    home = next((base for base in bases if "unwrap" in namespace_of(base)), None)
    if home is not None and is_library(module_of(home)) and _root(home) == "graphrt":
        return Kind.WRAPPER
    if not is_library(module_of(of)):
        return Kind.OBJECT if has_attributes else Kind.SKIPPED
    if of in _ENTERED:
        return Kind.OBJECT
    root = _root(of)
    if root == "torch":
        return _kind_of_torchs(module_of(of), has_attributes)
    return Kind.SKIPPED if root in _SILENT or root == "graphrt" else Kind.OPAQUE


def _kind_of_torchs(module: str, has_attributes: bool) -> Kind:
    # Masks of attention and what is like them; objects of C++, which may hold tensors; the rest,
    # such as streams, graphs and what the compiler keeps, is no state of a model.
    if module.startswith("torch.nn."):
        return Kind.OBJECT if has_attributes else Kind.SKIPPED
    # Torch's own in C, and scripted modules.
    of_torch = module == "torch" or module.endswith(("._C", ".jit._script"))
    return Kind.OPAQUE if of_torch else Kind.SKIPPED


def _root(of: type) -> str:
    return module_of(of).partition(".")[0]


def is_array(kind: type) -> bool:
    """Whether `kind` is NumPy's type of arrays, which need not be installed."""
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray")


def draws(kind: type) -> bool:
    """Whether random numbers are drawn from objects of `kind`, whose state can be read and set."""
    bases = bases_of(kind)
    if torch.Generator in bases or random.Random in bases:
        # The system's own randomness has no state.
        return random.SystemRandom not in bases
    of_numpy = [each.__name__ for each in bases if each.__module__.startswith("numpy.")]
    return "RandomState" in of_numpy or ("Generator" in of_numpy and hasattr(kind, "bit_generator"))


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
