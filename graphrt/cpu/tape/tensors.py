"""Walking the tensors of nested arguments and results."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.cpu.private_torch import storage_ids


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses, in order."""
    tensors: list[torch.Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple):
            left.extend(item[::-1])
        elif isinstance(item, dict):
            left.extend([*item.values()][::-1])
        elif hasattr(type(item), "__dataclass_fields__"):
            left.extend([getattr(item, name) for name in type(item).__dataclass_fields__][::-1])
    return tensors


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


def fresh_among(tensors: list[torch.Tensor], arguments: Any) -> list[torch.Tensor]:
    """Those of `tensors` that share no memory with the tensors in `given`."""
    held = set(storage_ids(tensors_in(arguments)))
    storages = storage_ids(tensors)
    return [t for t, storage in zip(tensors, storages, strict=True) if storage not in held]


def core(tensor: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that repeat one element, which cannot be written through."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if step == 0 else n for n, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
