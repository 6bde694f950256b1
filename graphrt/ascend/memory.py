"""The memory of captured graphs, from the caching allocator of torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from graphrt.ascend.private_torch import (
    memory_stats,
    release_pool,
    route_thread_to_pool,
    stop_routing_to_pool,
)
from graphrt.ascend.streams import OwnStreams
from graphrt.core.device.lent_streams import Loan
from graphrt.core.device.pool_memory import Allocator, PoolHandle, PoolMemory


class GraphMemory(PoolMemory):
    """The memory that the ACL graphs of one pool share, in pools of torch_npu's allocator."""

    def __init__(
        self,
        npu: Any,
        streams: OwnStreams,
        empty_cache: Callable[[], object] | None = None,
        adopted: PoolHandle | None = None,
    ) -> None:
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
                hold=partial(_hold, npu, streams),
            ),
            adopted,
        )
        self._streams = streams
        # They keep the streams lent that graphs were captured on.
        self._loans: set[Loan | None] = set()

    def capturing_on(self, stream: Any) -> None:
        """Keep a stream lent as long as there may be graphs that were captured on it."""
        self._loans.add(self._streams.loan_of(stream))

    def clear(self) -> None:
        super().clear()
        self._loans.clear()


def _hold(npu: Any, streams: OwnStreams, device: int, handle: PoolHandle) -> Any:
    """An empty graph that keeps an allocator pool alive."""
    graph = npu.NPUGraph()
    with npu.stream(streams.lend()):
        try:
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        except RuntimeError:
            # It routes two allocators, of device and of pinned memory: the first may be routed.
            with suppress(RuntimeError):  # "not currently recording to mempool_id"
                stop_routing_to_pool(device, handle)
                release_pool(device, handle)
            raise
        graph.capture_end()
    return graph
