"""The allocator pools that the graphs of one `GraphPool` were captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NewType, cast
from weakref import WeakSet

PoolHandle = NewType("PoolHandle", tuple[int, int])


class GraphMemory:
    """One allocator pool, and those before it that could not be used again."""

    def __init__(self, torch_npu: Any) -> None:
        self._npu, self._c = torch_npu.npu, torch_npu._C
        self.device: int = self._npu.current_device()
        self._handles = [self._new_handle()]
        self._graphs: WeakSet[Any] = WeakSet()
        self._used = False
        self._ranges: list[tuple[int, int]] = []
        self._ranges_version: tuple[int, int] | None = None

    def handle(self) -> PoolHandle:
        """The allocator pool to use now."""
        # A pool whose last graph was reset is being freed: to enter it again trips an assertion
        # of the allocator ("use_count > 0").
        if self._used and not any(has_captured(graph) for graph in self._graphs):
            self._renew()
            self._npu.empty_cache()
        self._used = True
        return self._handles[-1]

    def add(self, graph: Any) -> None:
        """Count `graph` among those that keep the present pool alive."""
        self._graphs.add(graph)

    def abandon(self, graph: Any) -> None:
        """Never capture into the present pool again: the host allocator still routes into it.

        Its filter points at `graph`, which must therefore never be destroyed.
        """
        _undead.append(graph)
        self._renew()

    def release_share(self) -> None:
        """Give back the share of the pool that a failed capture took."""
        self._c._npu_releasePool(self.device, self._handles[-1])

    def stop_routing(self) -> bool:
        """Stop routing device allocations into the pool; False if that had happened already."""
        try:
            self._c._npu_endAllocateToPool(self.device, self._handles[-1])
        except RuntimeError:  # "not currently recording to mempool_id"
            return False
        return True

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Route this thread's allocations into the pool; no capture of it may be open."""
        handle = self.handle()
        self._c._npu_beginAllocateCurrentThreadToPool(self.device, handle)
        try:
            yield
        finally:
            self._c._npu_endAllocateToPool(self.device, handle)
            self._c._npu_releasePool(self.device, handle)

    def owns(self, address: int) -> bool:
        self._refresh()
        return any(start <= address < end for start, end in self._ranges)

    def bytes(self) -> int:
        self._refresh()
        return sum(end - start for start, end in self._ranges)

    def clear(self) -> None:
        self._graphs.clear()
        self._handles = [self._new_handle()]
        self._used = False
        self._ranges_version = None

    def _renew(self) -> None:
        self._handles.append(self._new_handle())
        self._graphs = WeakSet()
        self._used = False

    def _refresh(self) -> None:
        # Segments only come and go with device allocations, which these two count.
        reserved = self._c._npu_memoryStats(self.device)["reserved_bytes"]["all"]
        version = (reserved["allocated"], reserved["freed"])
        if version == self._ranges_version:
            return
        # Of all pools: asked for one, torch_npu 2.13 releases the integers of its id once too
        # often, which corrupts memory from the 257th pool on (Python frees no smaller integers).
        segments = [
            segment
            for segment in self._npu.memory_snapshot()
            if segment["device"] == self.device and segment["segment_pool_id"] in self._handles
        ]
        self._ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
        used = {segment["segment_pool_id"] for segment in segments}
        self._handles = [
            handle for handle in self._handles if handle in used or handle == self._handles[-1]
        ]
        self._ranges_version = version

    def _new_handle(self) -> PoolHandle:
        return cast(PoolHandle, self._npu.graph_pool_handle())


def has_captured(graph: Any) -> bool:
    """Whether `graph` holds a finished capture, and with it a share of its allocator pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


_undead: list[Any] = []
