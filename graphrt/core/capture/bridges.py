"""Eager parts and the fixed buffers through which their results reach the next segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import BreakError
from graphrt.core.base.thread_mode import unseen
from graphrt.core.replay.eager_part import EagerPart, name_of

if TYPE_CHECKING:
    from graphrt.core.capture.recorder import Capture


class Bridges:
    """Fixed places for the results of eager parts.

    Where tensors can be allocated in the pool a place is pool memory, which is free again once its
    last captured reader is done. Elsewhere there is one buffer per break site and result, as large
    as the largest capture needed; smaller captures use a part of it, as only one step runs in a
    pool at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def run(
        self,
        capture: Capture,
        site: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[EagerPart, Any]:
        """Run an eager part during capture: what to replay, and the results that readers see."""
        result = function(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tree.tensors((args, kwargs))}
        fresh: set[int] = set()
        aliased: set[str] = set()
        seen: list[torch.Tensor] = []
        for path, leaf in tree.leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage().data_ptr()
            if leaf.numel() == 0 or storage in known or capture.owns(leaf):
                aliased.add(path)
                seen.append(leaf)
                continue
            if storage in fresh:
                raise BreakError(
                    f"eager break {name_of(function)} returned two tensors that share memory",
                    got=f"the one at {path or 'the top'}",
                    expected="separate tensors, which separate buffers can stand for",
                    advice="return one of them, or clone it",
                )
            fresh.add(storage)
            buffer = capture.pooled_like(leaf)
            if buffer is None:
                buffer = self.buffer((site, len(seen)), leaf)
            buffer.copy_(leaf)
            seen.append(buffer)
        # Readers get strong references, so that liveness is theirs; the entry keeps weak ones.
        tensors = iter(seen)
        readable = tree.map_tensors(lambda _: next(tensors), result)
        args, kwargs, recorded = tree.map_tensors(capture.captured_ref, (args, kwargs, readable))
        return EagerPart(function, args, kwargs, recorded, frozenset(aliased)), readable

    def buffer(self, key: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """The buffer of `key` with the shape of `like`; grows if it is too small.

        It has the strides of `like` too, unless elements of that share memory.
        """
        shape, strides = like.shape, separate_strides(like)
        need = like.nbytes
        if not like.is_contiguous():
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            need = like.element_size() * (1 + last)
        # Nothing of this may be recorded, and replays write outside of inference mode too.
        with unseen():
            flat = self._buffers.get(key)
            if flat is None or flat.numel() < need or flat.device != like.device:
                if flat is not None:
                    # Graphs that were captured with it write and read it still.
                    self._outgrown.append(flat)
                flat = torch.empty(need, dtype=torch.uint8, device=like.device)
                self._buffers[key] = flat
            typed = torch.empty(0, dtype=like.dtype, device=like.device)
            return typed.set_(flat.untyped_storage(), 0, shape, strides)

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


def separate_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of `like`, or those of a contiguous tensor if its elements share memory."""
    strides = like.stride()
    if any(s == 0 and n > 1 for n, s in zip(like.shape, strides, strict=True)):
        return torch.empty(like.shape, device="meta").stride()
    return strides
