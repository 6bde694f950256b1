"""Functions and their dependencies, as text that is equal in every process with the same program.

A function is its bytecode, its defaults and closure, and of the globals that its code names:
constants by their values, functions and Triton kernels like itself, modules, classes and objects by
those of their attributes that its code names, or that a method names which it calls. Code of
Python, torch and `PACKAGES` (a library here) counts by its version, which is elsewhere in the key.
A variable of the environment counts if code that reads the environment has its name as a string.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import hashlib
import importlib
import inspect
import logging
import operator
import os
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch

from graphrt.compile.cache.key.code import (
    BY_TEXT,
    Names,
    arguments_of,
    code_digest,
    globals_set_by,
    imports_in,
    is_library,
    is_library_file,
    names_in,
    texts_in,
)
from graphrt.compile.private_torch.operators import (
    inner_tensors,
    is_fake,
    tensor_text,
)

# Types whose `repr` or `str` tells the whole value.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_WHOLE_IN_REPR = (re.Pattern, slice, operator.attrgetter, operator.itemgetter)
_NUMBERS = (int, float, complex, str, bytes, bytearray, Decimal, Fraction)
# Types whose objects count by their class alone: compiled code does not depend on their state.
_STATELESS = (logging.Logger, logging.LoggerAdapter, torch.library.Library, torch.SymInt)
_ARGUMENTS = (torch.dtype, torch.layout, torch.memory_format, SimpleNamespace, *_NUMBERS[5:])
"""Arguments of running code that are described, besides plain ones. Not devices: a device has
another number on every rank, and the ranks share a key."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
# Larger tensors and containers are not read. They count as unknown, so the code is not kept.
_MOST_BYTES = 1 << 24
_MOST_ITEMS = 10_000
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_NOT_OF_CODE = frozenset(dir(object)) - _COMPARISONS - {"__getattribute__"}
"""Methods of every object that hardly a computation asks for, such as `__repr__`."""
_TRITON = ("fn", "kernel", "src", "configs", "keys", "values", "do_not_specialize", "noinline")
"""Attributes of Triton's objects around a kernel that decide about its code."""


class Values:
    """Describes values.

    `unknown` are the values that it could not read, though compiled code may depend on them.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        # (id of a value, the names that count) -> its text.
        self._described: dict[tuple[int, Names], str] = {}
        self._alive: list[object] = []  # another object could get the id of a freed one

    def of(self, value: Any, names: Names = frozenset()) -> str:
        """The text of a value; of a module, class or object its attributes `names` alone count."""
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _NAMED):
            return str(value)
        key = id(value), names
        if key not in self._described:
            # For a value that refers to itself: describing it would never end.
            self._described[key] = f"again {type(value).__name__}"
            self._alive.append(value)
            self._described[key] = _digest(self._parts(value, names))
        return self._described[key]

    def frame(self, code: CodeType, space: Mapping[str, Any], local: Mapping[str, Any]) -> str:
        """The text of running code: its globals, and the values of its closure and arguments."""
        names = names_in(code)
        parts = [code_digest(code), *self._globals(code, names, space)]
        for name in code.co_freevars:
            if name in local:
                parts.append(f"{name} = {self.of(local[name], names)}")
        for name in arguments_of(code):
            argument = local.get(name)
            if _is_described(argument):
                parts.append(f"{name} = {self.of(argument, names)}")
        return _digest(parts)

    def _parts(self, value: Any, names: Names) -> list[str]:
        described = self._callable(value, names)
        if described is not None:
            return described
        if isinstance(value, ModuleType):
            return [value.__name__, *self._module(value, names)]
        if isinstance(value, type):
            return [_name(value), *self._class(value, names)]
        if type(value).__module__.partition(".")[0] == "triton":
            return [_name(type(value)), *self._kernel(value)]
        if isinstance(value, torch.Tensor):
            return [self._tensor(value)]
        held = self._held(value, names)
        # A container of a class of its own has methods and attributes besides its items.
        if held is not None and is_library(type(value)):
            return held
        return [*(held or ()), *self._object(value, names)]

    def _held(self, value: Any, names: Names) -> list[str] | None:
        """What a container or a reference holds; None of anything else."""
        if isinstance(value, weakref.ref):
            return ["weak reference", self.of(value(), names)]
        if isinstance(value, ContextVar):
            return [f"context variable {value.name}", self.of(value.get(None), names)]
        if isinstance(value, Mapping):
            both = (f"{self.of(k, names)}: {self.of(v, names)}" for k, v in value.items())
            return self._items(value, both)
        if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
            inside = (self.of(each, names) for each in value)
            ordered = isinstance(value, Sequence)
            return self._items(value, inside if ordered else iter(sorted(inside)))
        return None

    def _callable(self, value: Any, names: Names) -> list[str] | None:
        """A function in any form; None of anything else, which may be called as well."""
        if isinstance(value, FunctionType):
            own = names & vars(value).keys() - {"__wrapped__"}
            held = (f"{name} = {self.of(vars(value)[name], names)}" for name in sorted(own))
            return [*self._function(value), *held]
        if isinstance(value, MethodType):
            code = getattr(value.__func__, "__code__", None)
            read = names if code is None else names | names_in(code)
            return ["method", self.of(value.__func__), self.of(value.__self__, read)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.of, (value.func, value.args, value.keywords))]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.of, (value.fget, value.fset))]
        if isinstance(value, functools.cached_property):
            return ["property", self.of(value.func)]
        if isinstance(value, BuiltinFunctionType):
            return [self._builtin(value)]
        return None

    def _function(self, function: FunctionType) -> list[str]:
        code = function.__code__
        cells = [_content(cell) for cell in function.__closure__ or ()]
        if is_library_file(code.co_filename):
            # A wrapper of torch's has the wrapped function in its closure, `singledispatch` a dict.
            held = [self.of(each) for each in cells if callable(each) or type(each) is dict]
            return [f"{function.__module__}.{function.__qualname__}", *held]
        names = names_in(code)
        return [
            code_digest(code),
            self.of(function.__defaults__, names),
            self.of(function.__kwdefaults__, names),
            *(self.of(each, names) for each in cells),
            *self._globals(code, names, function.__globals__),
        ]

    def _globals(self, code: CodeType, names: Names, space: Mapping[str, Any]) -> Iterator[str]:
        changing = globals_set_by(code)
        for name in sorted(names):
            if name in space and name not in changing:
                yield f"{name} = {self.of(space[name], names)}"
            elif isinstance(getattr(builtins, name, None), FunctionType):
                yield f"{name} = {self.of(getattr(builtins, name))}"
        for name in imports_in(code, str(space.get("__package__"))):
            if (module := _imported(name)) is not None:
                yield f"import {name} = {self.of(module, names)}"
        if names & _ENVIRONMENT:
            for text in sorted(texts_in(code)):
                if text in os.environ:
                    yield f"environment {text}={os.environ[text]}"

    def _builtin(self, function: Any) -> str:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, (ModuleType, type)):
            return f"{_name(function)} of {self.of(owner)}"  # such as `table.get`
        module = getattr(function, "__module__", None) or ""
        loaded = sys.modules.get(module.partition(".")[0])
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and loaded is not None and not is_library_file(file):
            # Of an extension that is no library's: its file counts, as it has no version.
            return f"{_name(function)} {self.file(file)}"
        return _name(function)

    def file(self, path: str) -> str:
        """The digest of a file's content."""
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            self.unknown.append(f"{path}: {error}")
            return "unreadable"

    def _tensor(self, tensor: torch.Tensor) -> str:
        what = tensor_text(tensor)
        if tensor.is_meta or is_fake(tensor):
            return what
        if parts := inner_tensors(tensor):
            return " ".join([what, *map(self.of, parts)])
        kind = type(tensor)
        plain = kind in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.nbytes > _MOST_BYTES:
            self.unknown.append(f"the content of a tensor, {what}")
            return what
        octets = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"{what} {hashlib.sha256(bytes(octets.tolist())).hexdigest()}"

    def _items(self, value: Any, described: Iterator[str]) -> list[str]:
        if len(value) > _MOST_ITEMS:
            self.unknown.append(f"a {type(value).__name__} of {len(value)} items")
            return []
        return [type(value).__name__, *described]

    def _module(self, module: ModuleType, names: Names) -> Iterator[str]:
        of_library = is_library(module)
        for name in sorted(_read_of(vars(module), {} if of_library else vars(module), names)):
            value = vars(module)[name]
            # Of a library only functions that someone else put there count.
            if not of_library or (isinstance(value, FunctionType) and not is_library(value)):
                yield f"{name} = {self.of(value, names)}"

    def _class(self, kind: type, names: Names) -> Iterator[str]:
        for each in kind.__mro__:
            attributes = vars(each)
            of_library = is_library(each)
            named = names | _called_unnamed(each)
            for name in sorted(_read_of(attributes, {} if of_library else attributes, named)):
                value = attributes[name]
                if not of_library or (isinstance(value, FunctionType) and not is_library(value)):
                    yield f"{_name(each)}.{name} = {self.of(value, names)}"

    def _object(self, value: Any, names: Names) -> list[str]:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return [_name(kind), value.name, self.of(value.value)]
        if isinstance(value, _WHOLE_IN_REPR):
            return [repr(value)]
        if isinstance(value, _STATELESS):
            return [_name(kind)]
        if kind.__module__ == "numpy":
            return [_name(kind), repr(value), hashlib.sha256(value.tobytes()).hexdigest()]
        wrapped = inspect.unwrap(value, stop=lambda each: isinstance(each, FunctionType))
        if wrapped is not value:
            return [_name(kind), self.of(wrapped)]
        # A subclass of a number: its own `repr` may leave the number out.
        number = [base.__repr__(value) for base in _NUMBERS if isinstance(value, base)]
        names = _with_methods(kind, names)
        parts = [_name(kind), *number, *self._class(kind, names)]
        held = {name: getattr(value, name) for name in _attributes(value)}
        held = {name: held[name] for name in _read_of(held, held, names)}
        parts += [f"{name} = {self.of(held[name], names)}" for name in sorted(held)]
        if not _has_attributes(value) and not number:
            if not is_library(kind):
                # An object of an extension may have state that Python does not show.
                self.unknown.append(f"a {_name(kind)}")
            parts.append(_ADDRESS.sub("", repr(value)))
        return parts

    def _kernel(self, value: Any) -> Iterator[str]:
        """A Triton kernel or its tuner, a configuration, or a constant of Triton's."""
        parts = {name: getattr(value, name, None) for name in _TRITON}
        if any(each is not None for each in parts.values()):
            for name, each in parts.items():
                yield f"{name} = {self.of(_without_comments(each) if name == 'src' else each)}"
        elif hasattr(value, "all_kwargs"):
            yield f"{self.of(value.all_kwargs())} {self.of(getattr(value, 'pre_hook', None))}"
        else:
            yield _ADDRESS.sub("", repr(value))


def _without_comments(source: Any) -> Any:
    """The source of a Triton kernel as its compiler reads it."""
    if not isinstance(source, str):
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _read_of(held: Mapping[str, Any], computed: Mapping[str, Any], names: Names) -> set[str]:
    """The names of `held` that code of these `names` reads. Code that calls `getattr` with a text
    may read any: then all plain values of `computed` count."""
    plain = {} if names.isdisjoint(BY_TEXT) else computed
    return {
        *(names & held.keys()),
        *(n for n in plain if type(plain[n]) in _PLAIN and n[:2] != "__"),
    }


def _called_unnamed(kind: type) -> Names:
    """The methods of a class that Python calls without their name, such as `__getitem__`."""
    own = {n for n, each in vars(kind).items() if n[:2] == "__" and isinstance(each, FunctionType)}
    if is_library(kind):
        own = set()
    return frozenset({"__init__", "__new__", "__call__"} | own - _NOT_OF_CODE)


def _with_methods(kind: type, names: Names) -> Names:
    """`names`, and the names used by the code of each method of the class that they name."""
    while True:
        found = [
            names_in(vars(each)[name].__code__)
            for each in kind.__mro__
            if not is_library(each)
            for name in (names | _called_unnamed(each)) & vars(each).keys()
            if isinstance(vars(each)[name], FunctionType) and name not in ("__init__", "__new__")
        ]
        more = names.union(*found)
        if more == names:
            return names
        names = more


def _is_described(argument: Any) -> bool:
    """Whether an argument of running code is none of the trace's tensors, whose key is the graph,
    nor anything else of torch's."""
    if isinstance(argument, (tuple, list, set, frozenset)):
        return all(map(_is_described, argument))
    if isinstance(argument, dict):
        return all(map(_is_described, argument.values()))
    kind = type(argument)
    if issubclass(kind, (type, ModuleType)):
        return not is_library(argument)
    known = kind in _PLAIN or kind in _ARGUMENTS or kind.__module__ == "numpy"
    return known or (_has_attributes(argument) and not is_library(kind))


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or bool(_attributes(value))


def _imported(name: str) -> ModuleType | None:
    """A module that a function imports when it is called, which it may not have been yet."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None  # the function handles that, or raises


def _attributes(value: Any) -> set[str]:
    names = set(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return {name for name in names if hasattr(value, name)}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
