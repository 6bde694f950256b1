"""Eager parts in the runs of a trial, and their results in one run, given to the parts of another.

Eager parts run at every replay, so a clock in one is right, though two eager runs differ then. Two
runs whose parts give the same show whether anything else differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.capture.guard import CaptureGuard, SideDoors, in_eager_part, refuse_transform
from graphrt.core.trust.places.slots import same_value

_MOST_SHIFTED_BYTES = 1 << 24


class TriedParts(SideDoors):
    """The eager parts of a run of a trial, which watches know as such: nothing is captured there,
    so nobody looks at what they make."""

    def watched(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: CaptureGuard | None = None,
    ) -> Any:
        if in_eager_part.get() is not None:
            # A part within a part is part of it.
            return function(*args, **kwargs)
        refuse_transform(function)
        given = tree.placed(tree.tensors((args, kwargs)), parts=True)
        try:
            in_eager_part.set(frozenset([key for _, key, _ in given if key is not None]))
            # As in a capture: graph and part each make their own casts.
            torch.clear_autocast_cache()
            result = self._call(function, args, kwargs)
            torch.clear_autocast_cache()
            return result
        finally:
            in_eager_part.set(None)

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)


class ShiftedParts(TriedParts):
    """Eager parts that are given other numbers than the forward has, so that values which they
    keep of their arguments differ."""

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = unseen(lambda: tree.map_tensors(_shifted, (args, kwargs)))
        before = unseen(lambda: tree.map_tensors(_copied_if_small, given))
        result = function(*given[0], **given[1])
        # What they write into a tensor that they are given is the forward's, as ever.
        _write_changed((args, kwargs), given, before)
        return result


class PartResults(TriedParts):
    """Notes the arguments and results of a run's eager parts; after `again()` the parts of the
    next run return these results."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Any] = []
        self._found: list[Any] = []
        self._at: int | None = None
        self.differs = False
        """Whether parts of the second run were other ones, or given something else."""

    def again(self) -> PartResults:
        """Let the parts of the next run give what those of the first one gave."""
        self._at = 0
        return self

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = unseen(lambda: _copied((args, kwargs)))
        result = function(*args, **kwargs)
        if self._at is None:
            self._given.append(given)
            self._found.append(unseen(lambda: _copied((result, args, kwargs))))
            return result
        at, self._at = self._at, self._at + 1
        if at >= len(self._found) or not unseen(lambda: _same(given, self._given[at])):
            self.differs = True
            return result
        unseen(lambda: _write((result, args, kwargs), self._found[at]))
        return result


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3 + 1 if _is_small(tensor) and tensor.is_floating_point() else tensor


def _copied_if_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if _is_small(tensor) else tensor


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether there is room for another one; beside a cache there may be none."""
    return tensor.numel() * tensor.element_size() <= _MOST_SHIFTED_BYTES


def _write_changed(own: Any, now: Any, before: Any) -> None:
    """Write what has changed in copies over what they are copies of."""
    leaves = [[*tree.leaves(each)] for each in (own, now, before)]
    for (_, ours), (_, changed), (_, then) in zip(*leaves, strict=True):
        if not isinstance(ours, torch.Tensor) or changed is ours:
            continue
        if not unseen(partial(_equal, changed, then)):
            with inference_guard(ours.is_inference()):
                ours.copy_(changed)


def _copied(value: Any) -> Any:
    return tree.map_tensors(torch.Tensor.clone, value)


def _same(ours: Any, theirs: Any) -> bool:
    mine, other = list(tree.leaves(ours)), list(tree.leaves(theirs))
    if [path for path, _ in mine] != [path for path, _ in other]:
        return False
    return all(_equal(a, b) for (_, a), (_, b) in zip(mine, other, strict=True))


def _equal(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return same_value(ours, theirs)
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    return torch.equal(tree.octets(ours), tree.octets(theirs))


def _write(own: Any, then: Any) -> None:
    """Write the tensors of an earlier run over those of this one."""
    mine, other = list(tree.leaves(own)), list(tree.leaves(then))
    for (_, ours), (_, theirs) in zip(mine, other, strict=False):
        if isinstance(ours, torch.Tensor) and not _equal(ours, theirs):
            with inference_guard(ours.is_inference()):
                ours.copy_(theirs)
