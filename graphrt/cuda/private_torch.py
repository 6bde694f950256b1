"""The door to names of torch that are not public, for CUDA: see `graphrt.core.base.private_torch`.

A torch that was built for CPUs has none of the functions; there the platform is not available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.core.base.private_torch import PrivateNames

NAMES = PrivateNames()

Pool = tuple[int, int]

_NO_CAPTURES = "no CUDA graph can be captured"

memory_stats: Callable[[int], Mapping[str, Any]] = NAMES.take(
    "torch._C._cuda_memoryStats", without=_NO_CAPTURES, build="cuda"
)
"""The allocator's counters of a device, nested; the public function flattens them, which takes too
long for every capture."""

route_thread_to_pool: Callable[[int, Pool], None] = NAMES.take(
    "torch._C._cuda_beginAllocateCurrentThreadToPool",
    without="what eager breaks return cannot be allocated in the pool",
    build="cuda",
)
stop_routing_to_pool: Callable[[int, Pool], None] = NAMES.take(
    "torch._C._cuda_endAllocateToPool",
    without="what eager breaks return cannot be allocated in the pool",
    build="cuda",
)
release_pool: Callable[[int, Pool], None] = NAMES.take(
    "torch._C._cuda_releasePool",
    without="what eager breaks return cannot be allocated in the pool",
    build="cuda",
)

empty_host_cache: Callable[[], None] = NAMES.take(
    "torch._C._host_emptyCache",
    without="a `torch.cuda.MemPool` cannot be adopted again after its last graph",
    build="cuda",
)
"""Frees pinned memory that nobody uses, and forgets its pools without a graph."""

raw_stream_of: Callable[[int], int] = NAMES.take(
    "torch._C._cuda_getCurrentRawStream",
    without="nothing can be replayed, as the current stream is asked for before",
    build="cuda",
)
"""The driver's handle of a device's current stream: every replay asks for it."""

current_device: Callable[[], int] = NAMES.take(
    "torch._C._cuda_getDevice",
    without="nothing can be replayed, as the current stream is asked for before",
    build="cuda",
)

_NO_WORKSPACE_SIZE = "workspaces of cuBLAS are told by the sizes that this torch is known to use"

cublas_workspace_bytes: Callable[[], int] | None = NAMES.take(
    "torch._C._cuda_getCublasWorkspaceSize",
    without=_NO_WORKSPACE_SIZE,
    seen=("2.13",),
    build="cuda",
)
cublaslt_workspace_bytes: Callable[[], int] | None = NAMES.take(
    "torch._C._cuda_getCublasLtWorkspaceSize",
    without=_NO_WORKSPACE_SIZE,
    seen=("2.13",),
    build="cuda",
)

demangle: Callable[[str], str] | None = NAMES.take(
    "torch._C._demangle",
    without="kernels of graphs are not found by their names in a profiler's trace",
)

spin: Callable[[int], None] | None = NAMES.take(
    "torch._C._cuda_sleep",
    without="the time of a replay's first layer has the launch of its graph in it",
    build="cuda",
)
"""A kernel of so many cycles, which occupies a stream."""

Wait = Callable[..., None]


def replace_event_wait(replaced: Callable[[Wait], Wait]) -> Callable[[], None]:
    """Replace the method `torch.cuda.Event.wait` by `replaced(wait)`; the returned function puts
    the original back."""
    wait: Wait = torch.cuda.Event.wait
    torch.cuda.Event.wait = replaced(wait)  # type: ignore[method-assign]

    def restore() -> None:
        torch.cuda.Event.wait = wait  # type: ignore[method-assign]

    return restore
