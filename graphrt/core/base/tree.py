"""Nested containers of tensors: tuple, list, dict, named tuple and dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same structure with `function` applied to everything that is no container."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        # copy() keeps the type and what it carries besides its items (HF's ModelOutput does).
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(function, value)
        return mapped
    if isinstance(tree, tuple):
        values = [map_leaves(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed: Any = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = map_leaves(function, getattr(tree, field.name))
            object.__setattr__(changed, field.name, value)
        return changed
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A tree of the same structure with `function` applied to every tensor."""
    return map_leaves(lambda x: function(x) if isinstance(x, torch.Tensor) else x, tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, such as `["hidden"][0]` or `.logits`, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor of the tree in the order of `leaves`."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, tuple | list):
        for value in tree:
            _collect(value, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _collect(getattr(tree, field.name), found)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a graph bakes in about a tensor: address, shape, strides, dtype and device."""
    return (
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )
