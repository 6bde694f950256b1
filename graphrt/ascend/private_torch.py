"""The door to names of torch_npu that are not public: see `graphrt.core.base.private_torch`.

torch_npu may not be imported before it is asked for, so each is looked up when it is first used.
The versions are those of torch_npu; only 2.13 was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import PrivateName, PrivateNames

NAMES = PrivateNames()

Pool = tuple[int, int]

_SEEN = ("2.13",)
_NO_GRAPHS = "no ACL graph can be captured"
_NO_ALLOCATION = "tensors cannot be allocated in a pool"


def _declare(name: str, without: str, seen: tuple[str, ...] = _SEEN) -> PrivateName:
    return NAMES.declare(f"torch_npu._C.{name}", without=without, seen=seen, build="npu")


_STATS = _declare("_npu_memoryStats", _NO_GRAPHS)
_ROUTE = _declare("_npu_beginAllocateCurrentThreadToPool", _NO_ALLOCATION)
_STOP = _declare(
    "_npu_endAllocateToPool",
    "_npu_endAllocateCurrentStreamToPool is called, as torch_npu 2.11 is said to call it",
)
_OLD_STOP = _declare(
    "_npu_endAllocateCurrentStreamToPool",
    f"_npu_endAllocateToPool is called; without both {_NO_ALLOCATION}",
    seen=(),
)
_RELEASE = _declare("_npu_releasePool", _NO_ALLOCATION)
_WEAK_REF = _declare("_weak_ref_tensor", _NO_GRAPHS)
_RAW_STREAM = _declare("_npu_getCurrentRawStreamNoWait", "nothing can be replayed")
_DEVICE = _declare("_npu_getDevice", "nothing can be replayed")


@cache
def _found(name: PrivateName) -> Callable[..., Any]:
    function: Callable[..., Any] = name.find()
    return function


def memory_stats(device: int) -> Mapping[str, Any]:
    """The allocator's counters of a device, nested."""
    stats: Mapping[str, Any] = _found(_STATS)(device)
    return stats


def route_thread_to_pool(device: int, pool: Pool) -> None:
    """Allocate what this thread allocates in `pool`, and take a share of it."""
    _found(_ROUTE)(device, pool)


def stop_routing_to_pool(device: int, pool: Pool) -> None:
    """Allocate in `pool` no longer; raises `RuntimeError` if nothing does."""
    _stop_routing()(device, pool)


@cache
def _stop_routing() -> Callable[..., Any]:
    try:
        return _found(_STOP)
    except MissingTorchNameError:
        return _found(_OLD_STOP)


def release_pool(device: int, pool: Pool) -> None:
    """Give back a share of `pool`."""
    _found(_RELEASE)(device, pool)


def weak_ref(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, without keeping it in use."""
    alias: torch.Tensor = _found(_WEAK_REF)(tensor)
    return alias


def raw_stream_of() -> Callable[[int], int]:
    """The function that returns CANN's handle of a device's current stream, for every replay.

    The other form of this call first waits for torch_npu's queue of launches.
    """
    return _found(_RAW_STREAM)


def current_device() -> int:
    """The index of the current device."""
    return int(_found(_DEVICE)())
