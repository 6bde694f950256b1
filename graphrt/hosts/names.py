"""Versions and dotted names of a host's package: an adapter checks them before it uses them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from graphrt.core.base.private_torch import imported
from graphrt.errors import UnsupportedHostError

MISSING: Any = object()


def find(module: str, path: str) -> Any:
    """The object of a dotted name of a module; `MISSING` if there is none."""
    value = imported(module)
    if value is None:
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
    """The names, given by module, that do not exist; of a function also the arguments that it does
    not take, where they are given: `replay(key, batch)`."""
    for module, paths in names.items():
        for path, bracket, arguments in (each.partition("(") for each in paths):
            if bracket:
                yield from missing_arguments({(module, path): arguments.rstrip(")").split(", ")})
            elif find(module, path) is MISSING:
                yield f"{module}.{path}"


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


def missing_uses(uses: Mapping[tuple[str, str], Collection[str]]) -> Iterator[str]:
    """The names that the code of functions, given by module and dotted name, does not use: graphrt
    relies on objects of these names."""
    for (module, path), expected in uses.items():
        function = find(module, path)
        if function is not MISSING:
            used = set(_named_in(inspect.unwrap(function).__code__))
            lacking = sorted(each for each in expected if each not in used)
            yield from (f"{each!r} in the code of {module}.{path}" for each in lacking)


def _named_in(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named_in(constant)


def refuse(
    host: str, version: str, known: Iterable[str], switch: str, missing: Collection[str] = ()
) -> None:
    """Raise `UnsupportedHostError` for a version of an engine that is not `known`, or for names
    that it lacks."""
    expected = ", ".join(f"{each}.*" for each in known)
    advice = f"install one of these, or leave {switch} unset for {host}'s own graphs"
    if not is_known(version, known):
        what = f"graphrt does not know this version of {host}"
        raise UnsupportedHostError(what, got=version, expected=expected, advice=advice)
    if missing:
        raise UnsupportedHostError(
            f"{host} {version} is not as graphrt knows it",
            got="no " + ", no ".join(missing),
            expected=f"{host} {expected} as it was published",
            advice=advice,
        )
