"""The source files that a trace went through: compiled code is right only while they are the same.
Also the names in code, and whether it is a library's.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import linecache
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphrt.core.base.library_files import is_python_file
from graphrt.core.base.log import logger

PACKAGES = ("sympy", "mpmath", "numpy", "networkx", "triton")
"""Packages that torch itself calls; their versions are in the key."""
Names = frozenset[str]
_NUMBER = re.compile(r"\d+")


class TracedSources:
    """Collects the source files of the functions that Dynamo traced.

    A module is known by its dotted name below its top-level package, never by an absolute path, and
    its digest is that of the file's content together with the traced functions' bytecode: a file
    that was edited after it was imported must not vouch for code that never ran.

    Python, torch and what torch calls are left out; their versions are in the key. `unreadable` are
    the files whose source cannot be read.
    """

    def __init__(self) -> None:
        self.unreadable: dict[str, None] = {}
        # Name of a module -> digests of its traced functions and of its file.
        self._digests: dict[str, set[str]] = {}
        self._seen: set[CodeType] = set()

    def add(self, code: CodeType) -> bool:
        """Add a code object; returns whether its source could be read."""
        path = code.co_filename
        if code in self._seen or is_library_file(path):
            return path not in self.unreadable
        self._seen.add(code)
        name, content = module_name(path), _source(path)
        digests = self._digests.setdefault(name, set())
        digests.add(f"code {code_digest(code)}")
        digest = hashlib.sha256(content).hexdigest()
        if content and f"file {digest}" not in digests:
            digests.add(f"file {digest}")
            logger.debug("traced %s (%s)", name, digest[:16])
        if not content and not path.startswith("<"):
            self.unreadable[path] = None
        return path not in self.unreadable

    def digests(self) -> dict[str, str]:
        """Module names and digests."""
        return {
            name: hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
            for name, digests in sorted(self._digests.items())
        }


def _source(path: str) -> bytes:
    """The content of a source file; empty if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        # A notebook cell or generated code is in linecache only. checkcache() drops the lines of a
        # deleted file, which linecache has in some processes and not in others.
        linecache.checkcache(path)
        return "".join(linecache.getlines(path)).encode()


def module_name(path: str) -> str:
    """The dotted name from the top-level package on; "<string>" and the like without numbers.

    Files that share a name, such as two scripts, share a digest too.
    """
    if path.startswith("<"):
        return _NUMBER.sub("", path)
    file = Path(path)
    parts = [] if file.stem == "__init__" else [file.stem]
    between: list[str] = []
    for directory in file.parents:
        if (directory / "__init__.py").is_file():
            parts = [directory.name, *between, *parts]
            between = []
        elif between:
            break
        else:
            # Maybe a package without an __init__.py, inside one that has it.
            between = [directory.name]
    return ".".join(parts) or file.stem


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


def code_digest(code: CodeType) -> str:
    """Equal in every process that compiled the same source with the same Python."""
    parts = (
        code.co_name,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars + code.co_cellvars,
        _constant(code.co_consts),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


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
    it asks for `getattr`, its texts may be names."""
    names = frozenset(name for each in codes_in(code) for name in each.co_names)
    return names | texts_in(code) if "getattr" in names else names


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
