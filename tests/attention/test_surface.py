"""What a signature of graphrt.attention names can be imported from graphrt.attention."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import graphrt.attention as public


def signatures(thing: Any) -> Iterator[Any]:
    """The public callables behind a name: itself, or a class's own methods and properties."""
    if not inspect.isclass(thing):
        if inspect.isfunction(thing):
            yield thing
        return
    for name, member in vars(thing).items():
        member = member.fget if isinstance(member, property) else member
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            yield member


def names_in(function: Any) -> set[str]:
    """The names in the annotations of a function, those of fields of a dataclass included."""
    texts = [text for text in function.__annotations__.values() if isinstance(text, str)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text, mode="eval"))]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def is_everyones(name: str) -> bool:
    return name == "torch" or any(
        hasattr(module, name) for module in (builtins, typing, collections.abc)
    )


@pytest.mark.parametrize("name", public.__all__)
def test_every_type_of_a_public_signature_is_public(name: str) -> None:
    if name in ("SplitPolicy", "TritonAttention"):
        pytest.importorskip("triton", reason="needs Triton")
    wanted = {each for function in signatures(getattr(public, name)) for each in names_in(function)}
    assert {each for each in wanted if not is_everyones(each)} <= set(public.__all__)


def test_the_list_of_public_names_is_sorted_as_ruff_sorts() -> None:
    upper = [name for name in public.__all__ if name[0].isupper()]
    assert public.__all__ == sorted(upper) + sorted(set(public.__all__) - set(upper))
