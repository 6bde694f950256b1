"""The memory of captured graphs, from the caching allocator of torch."""

from __future__ import annotations

import torch

from graphrt.core.device import Allocator, PoolMemory
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

    def __init__(self) -> None:
        super().__init__(
            Allocator(
                current_device=torch.cuda.current_device,
                new_handle=torch.cuda.graph_pool_handle,
                empty_cache=torch.cuda.empty_cache,
                stats=memory_stats,
                snapshot=torch.cuda.memory_snapshot,
                route_thread=route_thread_to_pool,
                stop_routing=stop_routing_to_pool,
                release_share=release_pool,
            )
        )
        self.sharing = Sharing()
        self.updates = UpdateCounts()

    def clear(self) -> None:
        super().clear()
        self.sharing = Sharing()
        self.updates = UpdateCounts()
