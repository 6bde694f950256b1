"""Nested containers of tensors: their leaves, the order of leaves, and endless containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import OutputError


@dataclass
class Hidden:
    states: list[Any]
    length: int


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tree_leaves_have_reading_order_and_python_paths() -> None:
    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    nested = {"x": Pair(a, [3, ()]), "y": Hidden([b, {"z": c}], 2), "t": Hidden}
    assert [path for path, _ in tree.leaves(nested)] == [
        "['x'][0]",
        "['x'][1][0]",
        "['y'].states[0]",
        "['y'].states[1]['z']",
        "['y'].length",
        "['t']",
    ]
    assert [t.item() for t in tree.tensors(nested)] == [0, 1, 2]
    assert tree.leaves(a, "arg") == [("arg", a)]


def test_map_leaves_maps_only_tensors_by_default() -> None:
    nested = Pair(torch.ones(1), Hidden(["text"], 2))
    assert tree.map_leaves(id, nested) == Pair(id(nested.first), nested.second)
    assert tree.map_leaves(type, nested, object) == Pair(torch.Tensor, Hidden([str], int))


@pytest.mark.parametrize("walk", [tree.leaves, tree.tensors, lambda x: tree.map_leaves(id, x)])
def test_walking_a_container_that_contains_itself_raises_a_named_error(walk: Any) -> None:
    itself: list[Any] = [1]
    itself += [itself, itself]
    with pytest.raises(OutputError, match="holds itself"):
        walk(Hidden(itself, 1))
