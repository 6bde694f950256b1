"""What a call is given and leaves: the same objects, the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree


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
