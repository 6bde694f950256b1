"""The allocator pools that the graphs of one `GraphPool` were captured into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NewType, cast
from weakref import WeakSet, ref

import torch

from graphrt.cuda.sharing import Sharing

PoolHandle = NewType("PoolHandle", tuple[int, int])


class GraphMemory:
    """One allocator pool, and those before it that could not be used again."""

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self.sharing = Sharing()
        self._handles = [_new_handle()]
        self._graphs: WeakSet[Any] = WeakSet()
        self._keeper: ref[Any] | None = None
        self._used = False
        self._ranges: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._foreign: set[int] = set()
        self._ranges_version: tuple[int, int] | None = None

    def handle(self) -> PoolHandle:
        """The allocator pool to use now."""
        # A pool whose last graph was reset is being freed: to enter it again trips an assertion
        # of the allocator ("use_count > 0").
        if self._used and not self._alive():
            self._renew()
            torch.cuda.empty_cache()
        self._used = True
        return self._handles[-1]

    def _alive(self) -> bool:
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None and has_captured(keeper):
            return True
        for graph in self._graphs:
            if has_captured(graph):
                self._keeper = ref(graph)
                return True
        return False

    def add(self, graph: Any) -> None:
        """Count `graph` among those that keep the present pool alive."""
        self._graphs.add(graph)

    def abandon(self, graph: Any) -> None:
        """Never capture into the present pool again: an allocator may still route into it.

        Its filter points at `graph`, which must therefore never be destroyed.
        """
        _undead.append(graph)
        with suppress(RuntimeError):  # "not currently recording": it was the host's only
            torch._C._cuda_endAllocateToPool(self.device, self._handles[-1])
        self._renew()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Route this thread's allocations into the pool; no capture of it may be open."""
        handle = self.handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device, handle)
            torch._C._cuda_releasePool(self.device, handle)

    def owns(self, address: int) -> bool:
        """Whether an address is in the pool; to be asked while a graph keeps the pool alive.

        Ranges of a living pool never go away, so only a miss needs the allocator. A miss that is
        remembered too long is safe: what is not known for pool memory is held and copied.
        """
        if address in self._foreign:
            return False
        if self._in_ranges(address):
            return True
        self._refresh()
        if self._in_ranges(address):
            return True
        self._foreign.add(address)
        return False

    def _in_ranges(self, address: int) -> bool:
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ranges[place][1]

    def bytes(self) -> int:
        self._refresh()
        return sum(end - start for start, end in self._ranges)

    def clear(self) -> None:
        self._graphs.clear()
        self.sharing = Sharing()
        self._handles = [_new_handle()]
        self._used = False
        self._forget_ranges()

    def _renew(self) -> None:
        self._handles.append(_new_handle())
        self._graphs = WeakSet()
        self._used = False
        self._forget_ranges()

    def _forget_ranges(self) -> None:
        self._ranges, self._starts = [], []
        self._foreign.clear()
        self._ranges_version = None

    def _refresh(self) -> None:
        # Segments only come and go with device allocations, which these two count.
        reserved = torch._C._cuda_memoryStats(self.device)["reserved_bytes"]["all"]
        version = (reserved["allocated"], reserved["freed"])
        if version == self._ranges_version:
            return
        # Of all pools: asked for one, torch 2.11 releases the integers of its id once too often,
        # which corrupts memory from the 257th pool on (Python never frees smaller integers).
        segments = [
            segment
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == self.device and segment["segment_pool_id"] in self._handles
        ]
        self._ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in segments)
        self._starts = [start for start, _ in self._ranges]
        self._foreign.clear()
        used = {segment["segment_pool_id"] for segment in segments}
        self._handles = [
            handle for handle in self._handles if handle in used or handle == self._handles[-1]
        ]
        self._ranges_version = version


def has_captured(graph: Any) -> bool:
    """Whether `graph` holds a finished capture, and with it a share of its allocator pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


_undead: list[Any] = []


def _new_handle() -> PoolHandle:
    return cast(PoolHandle, torch.cuda.graph_pool_handle())
