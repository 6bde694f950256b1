"""The fixed places through which what runs eagerly, or is handed out, reaches its readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.core.base import tree, unseen


class Bridges:
    """Fixed buffers for tensors that come from somewhere else at every step.

    There is one buffer per site and tensor, as large as the largest capture needed; smaller
    captures use a part of it, as only one step runs in a pool at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def fix(
        self,
        site: int,
        result: Any,
        *,
        stays: Callable[[str, torch.Tensor], bool],
        allocate: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> tuple[Any, frozenset[str]]:
        """`result` with its tensors copied to where every step will find them, and the paths of
        those that `stays(path, tensor)` left where they are, as empty ones are.

        `allocate` gives the memory for a tensor, or None for a buffer of this object.
        """
        unmoved: set[str] = set()
        fixed: list[torch.Tensor] = []
        for path, leaf in tree.leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.numel() == 0 or stays(path, leaf):
                unmoved.add(path)
                fixed.append(leaf)
                continue
            buffer = None if allocate is None else allocate(leaf)
            if buffer is None:
                buffer = self.buffer((site, len(fixed)), leaf)
            buffer.copy_(leaf)
            fixed.append(buffer)
        tensors = iter(fixed)
        return tree.map_tensors(lambda _: next(tensors), result), frozenset(unmoved)

    def buffer(self, key: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """The buffer of `key` with the shape of `like`; grows if it is too small.

        It has the strides of `like` too, unless elements of that share memory.
        """
        shape, strides = like.shape, separate_strides(like)
        need = like.nbytes
        if not like.is_contiguous():
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            need = like.element_size() * (1 + last)

        def placed() -> torch.Tensor:
            flat = self._buffers.get(key)
            if flat is None or flat.numel() < need or flat.device != like.device:
                if flat is not None:
                    # Graphs that were captured with it write and read it still.
                    self._outgrown.append(flat)
                flat = torch.empty(need, dtype=torch.uint8, device=like.device)
                self._buffers[key] = flat
            typed = torch.empty(0, dtype=like.dtype, device=like.device)
            return typed.set_(flat.untyped_storage(), 0, shape, strides)

        # Nothing of this may be recorded, and replays write outside of inference mode too.
        return unseen(placed)

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


def separate_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of `like`, or those of a contiguous tensor if its elements share memory."""
    strides = like.stride()
    if 0 in strides and any(s == 0 and n > 1 for n, s in zip(like.shape, strides, strict=True)):
        return torch.empty(like.shape, dtype=like.dtype, device="meta").stride()
    return strides
