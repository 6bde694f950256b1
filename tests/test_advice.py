"""Every named error says one thing to try: where it is raised, or by its class."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphrt.compile
from graphrt import GraphRTError, errors

PACKAGE = Path(__file__).resolve().parent.parent / "graphrt"
ERRORS = {
    name: value
    for module in (errors, graphrt.compile)
    for name, value in vars(module).items()
    if inspect.isclass(value) and issubclass(value, GraphRTError)
} | {"GraphRTError": GraphRTError}

PARTS = {"got", "expected"}
"""Keywords by which an error is known that is made by another name than its class's."""


ADDS_IT = {"_refuse", "refuse"}
"""Functions that make an error of these parts, and say themselves what to try."""


def without_advice(source: str) -> Iterator[str]:
    """The errors that are made there with nothing to try."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        keywords = {keyword.arg for keyword in node.keywords}
        if name in ADDS_IT or (name not in ERRORS and not keywords & PARTS):
            continue
        by_class = name == "DriverError" or (
            name in ERRORS and ERRORS[name].usual_advice is not None
        )
        if not by_class and "advice" not in keywords and None not in keywords:
            yield f"{node.lineno}: {name}"


def test_every_raised_error_of_graphrt_has_advice() -> None:
    faults = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in without_advice(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("source", ["raise GraphRTError('x')", "raise error('x', got=1)"])
def test_the_check_finds_an_error_without_advice(source: str) -> None:
    assert len([*without_advice(source)]) == 1
