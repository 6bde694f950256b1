"""The memory of captured graphs, from the caching allocator of torch_npu."""

from __future__ import annotations

from typing import Any

from graphrt.core.device.pool_memory import Allocator, PoolMemory


class GraphMemory(PoolMemory):
    """Allocator pools of NPU memory."""

    def __init__(self, torch_npu: Any) -> None:
        npu, c = torch_npu.npu, torch_npu._C
        # torch_npu 2.11 has it under another name.
        stop_routing = getattr(c, "_npu_endAllocateToPool", None)
        super().__init__(
            Allocator(
                current_device=npu.current_device,
                new_handle=npu.graph_pool_handle,
                empty_cache=npu.empty_cache,
                stats=c._npu_memoryStats,
                snapshot=npu.memory_snapshot,
                route_thread=c._npu_beginAllocateCurrentThreadToPool,
                stop_routing=stop_routing or c._npu_endAllocateCurrentStreamToPool,
                release_share=c._npu_releasePool,
            )
        )
