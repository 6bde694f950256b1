"""The memory of captured graphs, from the caching allocator of torch."""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

from graphrt.core.device import Allocator, PoolHandle, PoolMemory, no_other_capture
from graphrt.cuda.private_torch import (
    memory_stats,
    release_pool,
    route_thread_to_pool,
    stop_routing_to_pool,
)
from graphrt.cuda.sharing import Sharing
from graphrt.cuda.update import UpdateCounts


class GraphMemory(PoolMemory):
    """Allocator pools of CUDA memory, the executables that graphs in them share, and how their
    tasks were updated."""

    def __init__(self, adopted: PoolHandle | None = None) -> None:
        super().__init__(
            Allocator(
                current_device=torch.cuda.current_device,
                new_handle=torch.cuda.graph_pool_handle,
                empty_cache=empty_cache,
                stats=memory_stats,
                snapshot=torch.cuda.memory_snapshot,
                route_thread=route_thread_to_pool,
                stop_routing=stop_routing_to_pool,
                release_share=release_pool,
                hold=_hold,
            ),
            adopted,
        )
        self.sharing = Sharing()
        self.updates = UpdateCounts()

    def clear(self) -> None:
        super().clear()
        self.sharing = Sharing()
        self.updates = UpdateCounts()


def _hold(device: int, handle: PoolHandle) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)), warnings.catch_warnings():  # type: ignore[no-untyped-call]
        warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
        try:
            graph.capture_begin(handle, capture_error_mode="thread_local")  # type: ignore[arg-type]
        except RuntimeError:
            # Of its two allocators the first may have begun.
            with suppress(RuntimeError):  # "not currently recording to mempool_id"
                stop_routing_to_pool(device, handle)
                release_pool(device, handle)
            raise
        graph.capture_end()
    return graph


def empty_cache() -> None:
    """Give what nobody uses back to the devices: to all of them, which no capture on another one
    may see; while one is under way it is kept."""
    with no_other_capture(torch.device("cuda", torch.cuda.current_device())) as alone:
        if alone:
            torch.cuda.empty_cache()
