"""Walking the tensors of nested arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt.cpu.private_torch import storage_id


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def replace_tensors(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """`value` with the tensors whose `id` is in `replaced` exchanged."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(v, replaced) for v in value)
    if isinstance(value, tuple):
        return type(value)(*(replace_tensors(v, replaced) for v in value))
    if type(value) is dict:
        return {k: replace_tensors(v, replaced) for k, v in value.items()}
    return value


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for two tensors that share memory."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return storage_id(tensor)


def storages_of(value: Any) -> set[int]:
    """Those of all tensors in nested containers."""
    return {storage_of(t) for t in tensors_in(value)}


def core(tensor: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that repeat one element, which cannot be written through."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if step == 0 else n for n, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
