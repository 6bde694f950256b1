"""Code of Python for the key: its digest, the names in it, and whether it is a library's."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from graphrt.core.base.library_files import is_python_file

PACKAGES = ("sympy", "mpmath", "numpy", "networkx", "triton")
"""Packages that torch itself calls; their versions are in the key."""
Names = frozenset[str]
_EMPTY = CellType()
BY_TEXT = {"getattr", "vars", "globals", "__dict__", "attrgetter", "methodcaller"}
_HAS_DOCSTRING = 0x4000000
"""Flag of code, from Python 3.13 on."""


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether a file belongs to Python, torch or `PACKAGES`, whose versions are in the key."""
    return is_python_file(path) or os.path.realpath(path).startswith(_package_roots())


@functools.cache
def _package_roots() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, ("torch", "torchgen", "functorch", *PACKAGES))
    return tuple(
        str(Path(os.path.realpath(each.origin)).parent) + os.sep
        for each in specs
        if each is not None and each.origin is not None
    )


@functools.cache
def code_digest(code: CodeType) -> str:
    """Equal in every process with the same Python, and for code that differs in comments,
    docstrings, lines or names of local variables alone."""
    parts = [
        code.co_name,
        code.co_flags & ~_HAS_DOCSTRING,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        arguments_of(code),
        # Of Python 3.11 on: the ranges of `try`.
        getattr(code, "co_exceptiontable", b""),
        *(_instruction(code, each) for each in dis.get_instructions(code)),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _instruction(code: CodeType, each: dis.Instruction) -> tuple[object, ...]:
    if each.opcode in dis.hasconst and each.arg is not None:
        # By value: a docstring is a constant that no instruction loads, and moves all others. Not
        # `argval`, which has no names of keywords (Python 3.11).
        return each.opname, _constant(code.co_consts[each.arg])
    return each.opname, each.argrepr if each.opcode in dis.hasname else each.arg


def arguments_of(code: CodeType) -> tuple[str, ...]:
    """The names of a function's parameters."""
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, (frozenset, set)):
        # Its order differs from process to process.
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def names_in(code: CodeType) -> Names:
    """The names of globals and attributes in code, and in the functions that are made in it; where
    it asks for names by texts, its texts may be names."""
    names = frozenset(name for each in codes_in(code) for name in each.co_names)
    return names if names.isdisjoint(BY_TEXT) else names | texts_in(code)


def imports_in(code: CodeType, package: str) -> Iterator[str]:
    """The modules that code imports, whose `package` is given for relative ones."""
    for each in codes_in(code):
        instructions = list(dis.get_instructions(each))
        for place, found in enumerate(instructions):
            if found.opname == "IMPORT_NAME":
                # Before it: the level, and the names that are imported from there.
                level = instructions[place - 2].argval
                name = f"{'.' * level if isinstance(level, int) else ''}{found.argval}"
                yield importlib.util.resolve_name(name, package) if name[:1] == "." else name


def is_library(value: Any) -> bool:
    """Whether a module, class or function comes from a library's file, or is built in."""
    if isinstance(value, FunctionType):
        return is_library_file(value.__code__.co_filename)
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "")
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_library_file(file)
    name = "" if module is None else module.__name__
    return name.partition(".")[0] in {"torch", *sys.builtin_module_names}


def is_torchs(value: Any, depth: int = 8) -> bool:
    """Whether a callable is a library's, and all that it wraps: a library's decorator may hold a
    function of somebody else, and `functools.wraps` lends that the name of a library's."""
    held = [getattr(value, "__wrapped__", None)]
    if isinstance(value, functools.partial):
        return all(map(is_torchs, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FunctionType):
        held += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        own = is_library(value)
    else:
        module = getattr(value, "__module__", None) or ""
        own = module.partition(".")[0] in ("torch", "_operator", "builtins", "math")
    return own and all(is_torchs(each, depth - 1) for each in held if depth and callable(each))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def texts_in(code: CodeType) -> set[str]:
    return {text for each in codes_in(code) for text in each.co_consts if isinstance(text, str)}


@functools.cache
def globals_set_by(code: CodeType) -> Names:
    """Globals that the code itself assigns to: counters and the like, no constants."""
    return frozenset(
        str(each.argval)
        for inner in codes_in(code)
        for each in dis.get_instructions(inner)
        if each.opname == "STORE_GLOBAL"
    )
