"""The public surface: what a host may import, and that everything it names can be imported too."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from graphrt.platforms import Platform

PACKAGE = Path(__file__).resolve().parent.parent / "graphrt"
PUBLIC = (
    "graphrt",
    "graphrt.errors",
    "graphrt.platforms",
    "graphrt.types",
    "graphrt.lowlevel",
    "graphrt.compile",
    "graphrt.attention",
    "graphrt.observe",
    "graphrt.testing",
    "graphrt.cpu",
    "graphrt.cuda",
    "graphrt.ascend",
    "graphrt.accelerator",
    "graphrt.hosts.diffusers",
    "graphrt.hosts.vllm_ascend",
)
"""Modules whose `__all__` is the surface; see docs/development/architecture.md."""


@cache
def own_names() -> set[str]:
    """Classes and type aliases that any module of graphrt defines at its top."""
    capitalised = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            # What has a leading underscore, or is a constant, is no type.
            capitalised |= {n for n in names if re.fullmatch(r"[A-Z][a-z]\w*|[A-Z]+[a-z]\w+", n)}
    return capitalised


SURFACE = {
    (module, name): getattr(importlib.import_module(module), name)
    for module in PUBLIC
    for name in importlib.import_module(module).__all__
}
NAMES = {name for _, name in SURFACE}
OBJECTS = sorted(
    {id(value): (module, name) for (module, name), value in reversed(SURFACE.items())}.values()
)


def members(value: Any) -> Iterator[Any]:
    """A public object, and the public methods and properties that a class of graphrt has."""
    yield value
    if not inspect.isclass(value):
        return
    # What a platform's own graphs and memory are is nobody's business: the contract says `Any`.
    contract = set(vars(Platform)) if issubclass(value, Platform) and value is not Platform else ()
    for owner in inspect.getmro(value):
        if not owner.__module__.startswith("graphrt"):
            continue
        for name, member in vars(owner).items():
            # A base's own, where a class overrides it, is nothing that a caller sees.
            if name in contract or inspect.getattr_static(value, name, None) is not member:
                continue
            if name.startswith("_") and name not in ("__init__", "__call__"):
                continue
            inner = member.fget if isinstance(member, property) else member
            inner = getattr(inner, "__func__", inner)
            if isinstance(inner, types.FunctionType):
                yield inner


def annotations(value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            yield from (str(field.type) for field in dataclasses.fields(value))
        return
    if isinstance(value, types.FunctionType):
        yield from (str(each) for each in value.__annotations__.values())


def named_in(annotation: str) -> set[str]:
    """The types of graphrt in an annotation."""
    try:
        tree = ast.parse(annotation, mode="eval")
    except SyntaxError:
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & own_names()


@pytest.mark.parametrize("module", PUBLIC)
def test_the_names_in_all_are_sorted_and_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert list(loaded.__all__) == sorted(loaded.__all__, key=_natural)
    assert all(hasattr(loaded, name) for name in loaded.__all__)
    assert loaded.__doc__


def _natural(name: str) -> tuple[int, str]:
    # Constants, then classes, then the rest, as ruff sorts them.
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(("module", "name"), OBJECTS, ids=lambda value: str(value))
def test_types_named_in_public_signatures_can_be_imported(module: str, name: str) -> None:
    missing = {
        f"{getattr(member, '__qualname__', name)}: {named}"
        for member in members(SURFACE[module, name])
        for annotation in annotations(member)
        for named in named_in(annotation)
        if named not in NAMES
    }
    assert missing == set()


@pytest.mark.parametrize(("module", "name"), OBJECTS, ids=lambda value: str(value))
def test_names_quoted_in_public_docstrings_can_be_imported(module: str, name: str) -> None:
    missing = {
        f"{getattr(member, '__qualname__', name)}: {named}"
        for member in members(SURFACE[module, name])
        for named in re.findall(r"`(\w+)[.`(]", inspect.getdoc(member) or "")
        if named in own_names() and named not in NAMES
    }
    assert missing == set()


@pytest.mark.parametrize(("module", "name"), OBJECTS, ids=lambda value: str(value))
def test_every_public_class_and_function_has_a_docstring(module: str, name: str) -> None:
    value = SURFACE[module, name]
    if not (inspect.isclass(value) or isinstance(value, types.FunctionType)):
        return
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    generated = inspect.isclass(value) and str(own).startswith(f"{name}(")
    assert own and not generated, f"{module}.{name}"


def test_every_error_class_is_public_and_derives_from_graphrterror_or_warning() -> None:
    errors = importlib.import_module("graphrt.core.base.errors")
    root = errors.GraphRTError
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert name in importlib.import_module("graphrt.errors").__all__
            assert issubclass(value, (root, Warning))


def test_the_surface_check_finds_a_name_that_cannot_be_imported() -> None:
    source = textwrap.dedent("Callable[[Plan | None], Sequence[PreparedStep]]")
    assert named_in(source) == {"Plan", "PreparedStep"}
    assert "PreparedStep" not in NAMES and "Plan" in NAMES


@pytest.mark.parametrize("module", ["graphrt", "errors", "platforms", "types", "lowlevel"])
def test_the_module_attribute_of_public_names_is_importable_by_hosts(module: str) -> None:
    """Else tracebacks, help and reprs show modules that no host may import."""
    surface = importlib.import_module("graphrt" if module == "graphrt" else f"graphrt.{module}")
    for name in surface.__all__:
        value = getattr(surface, name)
        if isinstance(value, (type, types.FunctionType)):
            home = importlib.import_module(value.__module__)
            assert value.__module__ in PUBLIC or not value.__module__.startswith("graphrt"), name
            assert getattr(home, name) is value
