"""The fixed places through which what runs eagerly, or is handed out, reaches its readers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.sharing import together, write
from graphrt.core.base.thread_mode import unseen


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
        fixed: dict[int, torch.Tensor] = {}
        moved: list[tuple[int, torch.Tensor]] = []
        for path, leaf in tree.leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.numel() == 0 or stays(path, leaf):
                unmoved.add(path)
                fixed[id(leaf)] = leaf
            elif id(leaf) not in {id(each) for _, each in moved}:
                moved.append((len(moved) + len(unmoved), leaf))
        for group in together([leaf for _, leaf in moved]):
            (number, first), *rest = [moved[each] for each in group.places]
            if rest:
                flat = self._memory((site, number), group.nbytes, first.device).untyped_storage()
                for leaf in (first, *(leaf for _, leaf in rest)):
                    fixed[id(leaf)] = unseen(partial(group.over, flat, leaf))
                    write(fixed[id(leaf)], leaf)
                continue
            buffer = None if allocate is None else allocate(first)
            if buffer is None:
                buffer = self.buffer((site, number), first)
            buffer.copy_(first)
            fixed[id(first)] = buffer
        return tree.map_tensors(lambda leaf: fixed[id(leaf)], result), frozenset(unmoved)

    def buffer(self, key: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """The buffer of `key` with the shape of `like`; grows if it is too small.

        It has the strides of `like` too, unless elements of that share memory.
        """
        shape, strides = like.shape, separate_strides(like)
        need = like.nbytes
        if not like.is_contiguous():
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            need = like.element_size() * (1 + last)

        flat = self._memory(key, need, like.device)

        def placed() -> torch.Tensor:
            typed = torch.empty(0, dtype=like.dtype, device=like.device)
            return typed.set_(flat.untyped_storage(), 0, shape, strides)

        # Nothing of this may be recorded, and replays write outside of inference mode too.
        return unseen(placed)

    def _memory(self, key: tuple[int, int], need: int, device: torch.device) -> torch.Tensor:
        """At least so many bytes, the same ones at each call that asks for no more."""
        flat = self._buffers.get(key)
        if flat is None or flat.numel() < need or flat.device != device:
            if flat is not None:
                # Graphs that were captured with it write and read it still.
                self._outgrown.append(flat)
            flat = unseen(lambda: torch.empty(need, dtype=torch.uint8, device=device))
            self._buffers[key] = flat
        return flat

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


def separate_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of `like`, or those of a contiguous tensor if its elements share memory."""
    strides = like.stride()
    if 0 in strides and any(s == 0 and n > 1 for n, s in zip(like.shape, strides, strict=True)):
        return torch.empty(like.shape, dtype=like.dtype, device="meta").stride()
    return strides
