"""What a call is given and leaves: the same objects, the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import OutputError, tree


def place_of(tensor: torch.Tensor) -> object:
    return tree.identity(tensor) if tensor.layout is torch.strided else None


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def are_same(before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]) -> bool:
    """Whether containers hold the very objects that they held before."""
    return len(before) == len(after) and all(
        path == other_path and leaf is other
        for (path, leaf), (other_path, other) in zip(before, after, strict=True)
    )


def can_change(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what is called with these is given containers, and may put anything else into them.
    Copied at every replay, so not asked of what no copy is made of, such as a module."""
    return any(map(_holds_container, (*args, *kwargs.values())))


def _holds_container(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_container, value))
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, list | dict) or (is_record and not isinstance(value, torch.Tensor))


def memory_of(values: Any) -> set[int]:
    """Where the memory of strided tensors begins."""
    strided = [t for t in tree.tensors(values) if t.layout is torch.strided]
    return {t.untyped_storage().data_ptr() for t in strided}


def strided(result: Any, what: str = "the forward") -> Any:
    """What a forward, or an eager part, returns; raises `OutputError` for a tensor that has no one
    memory."""
    for tensor in tree.tensors(result):
        if tensor.layout is not torch.strided:
            raise OutputError(
                f"{what} returns a tensor that has no strided memory of its own",
                got=f"{tensor.layout}, {tensor.dtype}",
                expected="a strided tensor",
                advice="return to_dense(), or the parts of it",
            )
    return result
