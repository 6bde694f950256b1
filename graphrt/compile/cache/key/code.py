"""What code names, and whose it is."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphrt.compile.cache.key.sources import is_covered

_PACKAGES = ("sympy", "mpmath", "numpy", "networkx", "triton")
"""What torch itself calls; their versions are in the key."""

Names = frozenset[str]


def names_in(code: CodeType) -> Names:
    """The names of globals and attributes in code, and in the functions that are made in it."""
    return frozenset(name for each in codes_in(code) for name in each.co_names)


@functools.cache
def is_known(path: str) -> bool:
    """Whether a file belongs to Python, to torch, or to what torch is made with."""
    return is_covered(path) or os.path.realpath(path).startswith(_package_roots())


@functools.cache
def _package_roots() -> tuple[str, ...]:
    found = (importlib.util.find_spec(name) for name in _PACKAGES)
    return tuple(
        str(Path(os.path.realpath(each.origin)).parent) + os.sep
        for each in found
        if each is not None and each.origin is not None
    )


def covers(value: Any) -> bool:
    """Whether a module, class or function is torch's or Python's own."""
    if isinstance(value, FunctionType):
        return is_known(value.__code__.co_filename)
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "")
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_known(file)
    name = "" if module is None else module.__name__
    return name.partition(".")[0] in {"torch", *sys.builtin_module_names}


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
