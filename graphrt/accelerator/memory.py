"""The allocator pools behind one `GraphPool`, as far as the device lets graphs share one."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from graphrt.accelerator.library import Snapshot
from graphrt.core.device.pool_memory import PoolHandle, captured_pool


class GraphMemory:
    """The graphs that were captured for one `GraphPool` and the allocator pools they hold.

    `snapshot` tells which memory a pool has; without it nothing is owned, so that whatever a
    graph reads or writes is referenced strongly and no later capture gets its memory.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.device: int = torch.accelerator.current_device_index()
        self._snapshot = snapshot
        self._graphs: WeakSet[Any] = WeakSet()
        self._abandoned: set[PoolHandle] = set()
        self._ranges: list[tuple[int, int]] = []
        self._ranges_version: object = None

    def handle(self) -> PoolHandle | None:
        """The allocator pool to capture into now; None lets the device make a new one."""
        # Only a graph that holds its capture keeps its pool alive. Entering a pool whose last graph
        # was reset fails assertions of allocators.
        return next((pool for pool in self._pools() if pool not in self._abandoned), None)

    def add(self, graph: Any) -> None:
        """Note a captured graph, which keeps its pool alive."""
        self._graphs.add(graph)

    def abandon(self, handle: PoolHandle | None) -> None:
        """Never capture into this pool again: an allocator may still place allocations there."""
        if handle is not None:
            self._abandoned.add(handle)

    def owns(self, address: int) -> bool:
        """Whether the address is memory of one of the pools; False if the device does not tell."""
        self._refresh()
        return any(start <= address < end for start, end in self._ranges)

    def bytes(self) -> int | None:
        """Bytes that the pools hold of the device; None if the device does not tell."""
        if self._snapshot is None:
            return None
        self._refresh()
        return sum(end - start for start, end in self._ranges)

    def clear(self) -> None:
        """Forget all graphs; they are reset already."""
        self._graphs.clear()
        self._ranges = []
        self._ranges_version = None

    def _pools(self) -> list[PoolHandle]:
        pools = [captured_pool(graph) for graph in self._graphs]
        return sorted({pool for pool in pools if pool is not None})

    def _refresh(self) -> None:
        if self._snapshot is None:
            return
        pools = self._pools()
        version = (pools, *_device_allocations(self.device))
        if None not in version and version == self._ranges_version:
            return
        # Segments of all pools: devices differ in how a snapshot of one pool is asked for.
        self._ranges = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in self._snapshot()
            if segment["device"] == self.device and tuple(segment["segment_pool_id"]) in pools
        ]
        self._ranges_version = version


def _device_allocations(device: int) -> tuple[int | None, int | None]:
    """Counters that change with every segment that is made or freed; None if there are none."""
    try:
        stats = torch.accelerator.memory_stats(device)
    except (AttributeError, RuntimeError):
        return None, None
    counted = "reserved_bytes.all.allocated", "reserved_bytes.all.freed"
    return stats.get(counted[0]), stats.get(counted[1])
