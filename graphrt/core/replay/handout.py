"""Outputs as the caller gets them: fresh tensors over memory that the next step writes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from graphrt.core.base import (
    can_make_tensor_over,
    can_mark_unreadable,
    inference_guard,
    mark_unreadable,
    storage_at,
    tensor_over,
)

HandedOut = list[tuple[torch.UntypedStorage, object]]
"""The storages behind what the last step handed out, with what keeps their memory till the next."""

_CACHED_VIEWS = 256
"""Per output; beyond so many shapes of live rows views are made anew."""

_OVERWRITTEN = (
    "graphrt.errors.OverwrittenOutputError: this tensor is an output of an earlier step, and its "
    "memory was given to the step after it (or to a capture, or its graph was destroyed).\n"
    "  expected: outputs that are read before the next step of their pool begins\n"
    '  try: clone() what is needed longer, or GraphOptions(outputs="clone"), or give what runs in '
    "between a GraphPool of its own"
)


def expire(handed_out: HandedOut) -> None:
    """Make what was handed out unreadable: torch raises a `RuntimeError` when it is touched."""
    for storage, _ in handed_out:
        mark_unreadable(storage._cdata, _OVERWRITTEN)
    # Only now: interrupted before, all of it is marked another time.
    handed_out.clear()


Handout = Callable[[tuple[int, ...], HandedOut], torch.Tensor]
"""Makes a fresh tensor of some shape (the live rows) over the memory of one output."""


def handout_of(tensor: torch.Tensor, *, raw_storages: bool) -> Handout:
    """What hands out `tensor` at every step.

    Where torch can make it unreadable after the step, the caller gets a fresh tensor over a storage
    of its own; elsewhere, and where the device has no `raw_storages`, a copy.
    """
    if tensor.numel() == 0:
        return lambda shape, handed_out: tensor.new_empty(shape)
    # Conjugation and negation that torch has put off are no part of the memory.
    lazy = tensor.is_conj() or tensor.is_neg()
    if raw_storages and can_mark_unreadable and not lazy:
        one_call = tensor.is_cuda and can_make_tensor_over
        return _CudaShell(tensor) if one_call else _Shell(tensor)
    views: dict[tuple[int, ...], torch.Tensor] = {}

    def copy(shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        live = views.get(shape)
        if live is None:
            live = tensor.detach()
            for dim, size in enumerate(shape):
                live = live.narrow(dim, 0, size)
            if len(views) < _CACHED_VIEWS:
                views[shape] = live
        return live.clone()

    return copy


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What makes tensors of its dtype and device faster than anything else."""
    with inference_guard(False):
        return torch.empty(0, dtype=dtype, device=device)


class _Shell:
    """A storage made anew at every step, which owns nothing of the memory it is over."""

    __slots__ = ("_address", "_device", "_empty", "_nbytes", "_offset", "_owner", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._device = tensor.device
        self._offset = tensor.storage_offset()
        self._stride = tensor.stride()
        self._empty = _empty(tensor.dtype, tensor.device)
        # The memory itself, wherever `tensor` may be moved to; of pool memory only an alias.
        self._owner = tensor.detach()

    def __call__(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        storage = storage_at(self._address, self._device, self._nbytes)
        handed_out.append((storage, self._owner))
        fresh: torch.Tensor = self._empty.new()
        return fresh.set_(storage, self._offset, shape, self._stride)


class _CudaShell(_Shell):
    """The same by one call of torch, made for its own graphs, in place of two."""

    __slots__ = ("_described",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._described: dict[tuple[int, ...], dict[str, Any]] = {}

    def __call__(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        described = self._described.get(shape)
        if described is None:
            described = self._describe(shape)
        storage = storage_at(self._address, self._device, self._nbytes)
        handed_out.append((storage, self._owner))
        return tensor_over(described, storage)

    def _describe(self, shape: tuple[int, ...]) -> dict[str, Any]:
        described = {
            "size": shape,
            "stride": self._stride,
            "storage_offset": self._offset,
            "dtype": self._empty.dtype,
            "device": self._device,
            "data_ptr": self._address,
            "nbytes": self._nbytes,
        }
        if len(self._described) < _CACHED_VIEWS:
            self._described[shape] = described
        return described
