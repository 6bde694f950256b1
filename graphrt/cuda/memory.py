"""The memory of captured graphs, from the caching allocator of torch."""

from __future__ import annotations

import torch

from graphrt.core.device.pool_memory import Allocator, PoolMemory
from graphrt.cuda.sharing import Sharing
from graphrt.cuda.update.ladder import UpdateCounts


class GraphMemory(PoolMemory):
    """Allocator pools of CUDA memory, the executables that graphs in them share, and how their
    tasks were updated."""

    def __init__(self) -> None:
        super().__init__(
            Allocator(
                current_device=torch.cuda.current_device,
                new_handle=torch.cuda.graph_pool_handle,
                empty_cache=torch.cuda.empty_cache,
                stats=torch._C._cuda_memoryStats,
                snapshot=torch.cuda.memory_snapshot,
                route_thread=torch._C._cuda_beginAllocateCurrentThreadToPool,
                stop_routing=torch._C._cuda_endAllocateToPool,
                release_share=torch._C._cuda_releasePool,
            )
        )
        self.sharing = Sharing()
        self.updates = UpdateCounts()

    def clear(self) -> None:
        super().clear()
        self.sharing = Sharing()
        self.updates = UpdateCounts()
