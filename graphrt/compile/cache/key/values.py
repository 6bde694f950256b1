"""Functions and their dependencies, as text that is equal in every process with the same program.

A function is its file and its bytecode, its defaults and closure, and of the globals that its code
names: constants by their values, functions and Triton kernels like itself, modules, classes and
objects by those of their attributes that its code names. Code of Python, torch and `PACKAGES` (a
library here) counts by its version, which is elsewhere in the key. A variable of the environment
counts if code that reads the environment has its name as a string.
"""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import inspect
import logging
import operator
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

from graphrt.compile.cache.key.sources import (
    Names,
    TracedSources,
    code_digest,
    globals_set_by,
    is_library,
    is_library_file,
    module_name,
    names_in,
    texts_in,
)

# Types whose `repr` or `str` tells the whole value.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_WHOLE_IN_REPR = (re.Pattern, operator.attrgetter, operator.itemgetter, operator.methodcaller)
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
_TRITON = ("fn", "kernel", "src", "configs", "keys", "values", "do_not_specialize", "noinline")
"""Attributes of Triton's objects around a kernel that decide about its code."""


class Values:
    """Describes values; the files of all code that it meets go to `sources`.

    `unknown` are the values that it could not read, though compiled code may depend on them.
    """

    def __init__(self, sources: TracedSources) -> None:
        self.unknown: list[str] = []
        self._sources = sources
        # (id of a value, the names that count, `_state_counts`) -> its text.
        self._described: dict[tuple[int, Names, bool], str] = {}
        self._alive: list[object] = []  # another object could get the id of a freed one
        # Whether values of objects count; not in `runs`, whose function reads them at run time.
        self._state_counts = True

    def of(self, value: Any, names: Names = frozenset()) -> str:
        """The text of a value; of a module, class or object its attributes `names` alone count."""
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _NAMED):
            return str(value)
        key = id(value), names, self._state_counts
        if key not in self._described:
            # For a value that refers to itself: describing it would never end.
            self._described[key] = f"again {type(value).__name__}"
            self._alive.append(value)
            self._described[key] = _digest(self._parts(value, names))
        return self._described[key]

    def runs(self, function: Any) -> str:
        """The text of a function that compiled code calls at run time: its source and constants.
        Its state does not count, as it is read at run time."""
        self._state_counts = False
        try:
            return self.of(function)
        finally:
            self._state_counts = True

    def frame(self, code: CodeType, space: Mapping[str, Any], local: Mapping[str, Any]) -> str:
        """The text of running code: its globals, and the values of its closure and arguments."""
        names = names_in(code)
        parts = [self._code(code), *self._globals(code, names, space)]
        for name in code.co_freevars:
            if name in local:
                parts.append(f"{name} = {self.of(local[name], names)}")
        for name in _arguments_of(code):
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
        if not self._state_counts and not isinstance(value, tuple):
            wrapped = inspect.unwrap(value)
            return [_name(type(value)), self.of(wrapped) if wrapped is not value else ""]
        if isinstance(value, torch.Tensor):
            return [self._tensor(value)]
        held = self._held(value, names)
        return self._object(value, names) if held is None else held

    def _held(self, value: Any, names: Names) -> list[str] | None:
        """What a container or a reference holds; None of anything else."""
        if isinstance(value, weakref.ref):
            return ["weak reference", self.of(value(), names)]
        if isinstance(value, ContextVar):
            return [f"context variable {value.name}", self.of(value.get(None), names)]
        if isinstance(value, Mapping):
            both = (f"{self.of(k, names)}: {self.of(v, names)}" for k, v in value.items())
            return self._items(value, both)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            inside = (self.of(each, names) for each in value)
            ordered = isinstance(value, (list, tuple, deque))
            return self._items(value, inside if ordered else iter(sorted(inside)))
        return None

    def _callable(self, value: Any, names: Names) -> list[str] | None:
        """A function in any form; None of anything else, which may be called as well."""
        if isinstance(value, FunctionType):
            return self._function(value)
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
        if isinstance(value, BuiltinFunctionType):
            return [self._builtin(value)]
        return None

    def _function(self, function: FunctionType) -> list[str]:
        code = function.__code__
        cells = [_content(cell) for cell in function.__closure__ or ()]
        if is_library_file(code.co_filename):
            # A wrapper of torch's has the wrapped function in its closure.
            held = [self.of(each) for each in cells if callable(each)]
            return [f"{function.__module__}.{function.__qualname__}", *held]
        names = names_in(code)
        return [
            self._code(code),
            self.of(function.__defaults__, names),
            self.of(function.__kwdefaults__, names),
            *(self.of(each, names) for each in cells),
            *self._globals(code, names, function.__globals__),
        ]

    def _code(self, code: CodeType) -> str:
        generated = code.co_filename.startswith("<")
        if not generated and not self._sources.add(code):
            self.unknown.append(f"the source of {code.co_name}, {code.co_filename}")
        return f"{module_name(code.co_filename)} {code.co_name} {code_digest(code)}"

    def _globals(self, code: CodeType, names: Names, space: Mapping[str, Any]) -> Iterator[str]:
        changing = globals_set_by(code)
        for name in sorted(names):
            if name in space and name not in changing:
                yield f"{name} = {self.of(space[name], names)}"
            elif isinstance(getattr(builtins, name, None), FunctionType):
                yield f"{name} = {self.of(getattr(builtins, name))}"
        if names & _ENVIRONMENT:
            for text in sorted(texts_in(code)):
                if text in os.environ:
                    yield f"environment {text}={os.environ[text]}"

    def _builtin(self, function: Any) -> str:
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
        what = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
            return what
        if tensor.layout is not torch.strided or tensor.nbytes > _MOST_BYTES:
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
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            # Of a library only functions that someone else put there count.
            if not of_library or (isinstance(value, FunctionType) and not is_library(value)):
                yield f"{name} = {self.of(value, names)}"

    def _class(self, kind: type, names: Names) -> Iterator[str]:
        for each in kind.__mro__:
            attributes = vars(each)
            of_library = is_library(each)
            for name in sorted((names | {"__init__", "__new__", "__call__"}) & attributes.keys()):
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
        parts = [_name(kind), *number, *self._class(kind, names)]
        held = {name for name in names if name in _attributes(value)}
        parts += [f"{name} = {self.of(getattr(value, name), names)}" for name in sorted(held)]
        if not _has_attributes(value) and not number and not is_library(kind):
            # An object of an extension may have state that Python does not show.
            self.unknown.append(f"a {_name(kind)}")
        return parts

    def _kernel(self, value: Any) -> Iterator[str]:
        """A Triton kernel or its tuner, a configuration, or a constant of Triton's."""
        parts = {name: getattr(value, name, None) for name in _TRITON}
        if any(each is not None for each in parts.values()):
            for name, each in parts.items():
                yield f"{name} = {self.of(each)}"
        elif hasattr(value, "all_kwargs"):
            yield f"{self.of(value.all_kwargs())} {self.of(getattr(value, 'pre_hook', None))}"
        else:
            yield re.sub(r"0x[0-9a-f]+", "", repr(value))


def _arguments_of(code: CodeType) -> Sequence[str]:
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


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
