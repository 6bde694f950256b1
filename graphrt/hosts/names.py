"""Versions and dotted names of a host's package: an adapter checks them before it uses them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MISSING: Any = object()


def find(module: str, path: str) -> Any:
    """The object of a dotted name of a module; `MISSING` if there is none."""
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return MISSING
    for name in path.split("."):
        value = getattr(value, name, MISSING)
        if value is MISSING:
            break
    return value


def is_known(version: str, known: Iterable[str]) -> bool:
    """Whether a version is one of those that are `known`, or a patch of one."""
    return any(version == each or version.startswith(f"{each}.") for each in known)


def missing_names(names: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The names, given by module, that do not exist."""
    for module, paths in names.items():
        yield from (f"{module}.{path}" for path in paths if find(module, path) is MISSING)


def missing_arguments(arguments: Mapping[tuple[str, str], Iterable[str]]) -> Iterator[str]:
    """The arguments, given by module and dotted name of a function, that the function does not
    take; the function itself, if it does not exist."""
    for (module, path), expected in arguments.items():
        function = find(module, path)
        if function is MISSING:
            yield f"{module}.{path}"
            continue
        taken = inspect.signature(inspect.unwrap(function)).parameters
        yield from (
            f"argument {each!r} of {module}.{path}" for each in expected if each not in taken
        )
