"""The memory of captured graphs, from the caching allocator of torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.ascend.private_torch import (
    memory_stats,
    release_pool,
    route_thread_to_pool,
    stop_routing_to_pool,
)
from graphrt.core.device import Allocator, PoolMemory


class GraphMemory(PoolMemory):
    """Allocator pools of NPU memory."""

    def __init__(self, npu: Any, empty_cache: Callable[[], object] | None = None) -> None:
        super().__init__(
            Allocator(
                current_device=npu.current_device,
                new_handle=npu.graph_pool_handle,
                empty_cache=empty_cache or npu.empty_cache,
                stats=memory_stats,
                snapshot=npu.memory_snapshot,
                route_thread=route_thread_to_pool,
                stop_routing=stop_routing_to_pool,
                release_share=release_pool,
            )
        )
