"""The door to names of torch that are not public, for CUDA: see `graphrt.core.base.private_torch`.

A torch that was built for CPUs has none of the functions; there the platform is not available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from graphrt.core.base.private_torch import PrivateNames

NAMES = PrivateNames()

Pool = tuple[int, int]

_of_cuda = partial(NAMES.take, build="cuda")
_routing = partial(_of_cuda, without="what eager breaks return cannot be allocated in the pool")
_at_replays = partial(
    _of_cuda, without="nothing can be replayed, as the current stream is asked for before"
)
_workspace = partial(
    _of_cuda,
    without="workspaces of cuBLAS are told by the sizes that this torch is known to use",
    seen=("2.13",),
)

memory_stats: Callable[[int], Mapping[str, Any]] = _of_cuda(
    "torch._C._cuda_memoryStats", without="no CUDA graph can be captured"
)
"""The allocator's counters of a device, nested; the public function flattens them, which takes too
long for every capture."""

route_thread_to_pool: Callable[[int, Pool], None] = _routing(
    "torch._C._cuda_beginAllocateCurrentThreadToPool"
)
stop_routing_to_pool: Callable[[int, Pool], None] = _routing("torch._C._cuda_endAllocateToPool")
release_pool: Callable[[int, Pool], None] = _routing("torch._C._cuda_releasePool")

empty_host_cache: Callable[[], None] = NAMES.take(
    "torch._C._host_emptyCache",
    without="a `torch.cuda.MemPool` cannot be adopted again after its last graph",
    build="cuda",
)
"""Frees pinned memory that nobody uses, and forgets its pools without a graph."""

raw_stream_of: Callable[[int], int] = _at_replays("torch._C._cuda_getCurrentRawStream")
"""The driver's handle of a device's current stream: every replay asks for it."""
current_device: Callable[[], int] = _at_replays("torch._C._cuda_getDevice")

cublas_workspace_bytes: Callable[[], int] | None = _workspace(
    "torch._C._cuda_getCublasWorkspaceSize"
)
cublaslt_workspace_bytes: Callable[[], int] | None = _workspace(
    "torch._C._cuda_getCublasLtWorkspaceSize"
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
