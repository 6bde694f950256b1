"""Memory of a caching allocator that the graphs of one `GraphPool` are captured into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType
from weakref import WeakSet

import torch

from graphrt.core.base.errors import InvalidOptionError, PoolError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown
from graphrt.core.base.torch_names import storage_at

PoolHandle = NewType("PoolHandle", tuple[int, int])


@dataclass(frozen=True)
class Allocator:
    """The caching allocator of one kind of device, by the calls that torch has for it."""

    current_device: Callable[[], int]
    new_handle: Callable[[], Any]
    """A handle of a pool that nothing was allocated in yet."""
    empty_cache: Callable[[], object]
    """Give cached memory that nobody uses back to the device."""
    stats: Callable[[int], Mapping[str, Any]]
    """The allocator's counters for a device, as `torch.cuda.memory_stats_as_nested_dict`."""
    snapshot: Callable[[], Sequence[Mapping[str, Any]]]
    """The segments of all pools, as `torch.cuda.memory_snapshot`."""
    route_thread: Callable[[int, PoolHandle], object]
    """Route this thread's allocations into a pool, and take a share of it."""
    stop_routing: Callable[[int, PoolHandle], object]
    """End that; raises `RuntimeError` if nothing is routed there. The share stays."""
    release_share: Callable[[int, PoolHandle], object]
    """Give one share of a pool back: without any the pool is freed."""
    hold: Callable[[int, PoolHandle], Any]
    """A graph of nothing that holds a pool until its `reset`: also the part of it that is page-
    locked host memory, of which no binding takes a share. Raises `RuntimeError`."""


class _Routing(AbstractContextManager[None]):
    """While it is entered, a thread's allocations come from a pool. Leaving it once more, or after
    an interrupt kept it from being entered, changes nothing."""

    def __init__(self, memory: PoolMemory, allocator: Allocator, handle: PoolHandle) -> None:
        self._memory = memory
        self._allocator = allocator
        self._to = memory.device, handle
        # Whether routing may have begun and not ended.
        self._entered = False

    def __enter__(self) -> None:
        self._entered = True
        self._memory._routed.add(id(self))
        self._allocator.route_thread(*self._to)

    def __exit__(self, *exc_info: object) -> None:
        if not self._entered:
            return
        self._memory._routed.discard(id(self))
        try:
            self._allocator.stop_routing(*self._to)
        except RuntimeError:  # "not currently recording": it was left, or never entered
            self._entered = False
            return
        self._entered = False
        self._allocator.release_share(*self._to)


class SavedMemory(NamedTuple):
    """The segments of a pool, as (start, end); the blocks in use in them, each with its copy on the
    host; and whether `is_mapped` knows such memory."""

    ranges: Collection[tuple[int, int]]
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    is_known: bool


class PoolMemory:
    """The allocator pool that the graphs of a `GraphPool` are captured into. Another one takes its
    place where it cannot be entered again; those before may still hold memory of graphs.

    A pool that is the host's too, given by it or shown to it, keeps its handle: this object takes
    a share of its own, so that it lives on between two graphs, until `clear`.
    """

    def __init__(self, allocator: Allocator, adopted: PoolHandle | None = None) -> None:
        """Raises `PoolError` for an `adopted` pool that has memory in use and no graph."""
        self._allocator = allocator
        self.device = allocator.current_device()
        # What `Allocator.hold` returned; None as long as the host does not know the pool.
        self._share: Any = None
        # Ids of the routings that are entered now.
        self._routed: set[int] = set()
        self._begin([], adopted)
        if adopted is not None:
            self._take_share()

    def _begin(self, before: list[PoolHandle], adopted: PoolHandle | None = None) -> None:
        """Use another pool from now on, and give the share of the last one back."""
        if self._share is not None:
            self._share.reset()
            self._share = None
        new = PoolHandle(self._allocator.new_handle()) if adopted is None else adopted
        # The present pool is the last; those before may still hold memory of graphs.
        self._handles = [*before, new]
        # The graphs that were captured into the present pool.
        self._graphs: WeakSet[Any] = WeakSet()
        # Whether the present pool was handed out for a capture.
        self._used = False
        # Whether `_ranges` has all segments: nothing was captured or routed here since.
        self._is_known = False
        # (start, end) of each segment of these pools, as of the allocator's counters in
        # `_ranges_version`.
        self._ranges: list[tuple[int, int]] = []
        self._ranges_version: tuple[int, int] | None = None

    def shown(self) -> PoolHandle:
        """As `handle`, for the host too: it stays the same until `clear`."""
        handle = self.handle()
        if self._share is None:
            self._take_share()
        return handle

    def handle(self) -> PoolHandle:
        """The allocator pool to use now."""
        # A pool whose last graph was reset is being freed: to enter it again trips an assertion
        # of the allocator ("use_count > 0").
        if self._used and self._share is None and not any(map(captured_pool, self._graphs)):
            self._begin(self._handles)
            self._allocator.empty_cache()
        self._used, self._is_known = True, False
        return self._handles[-1]

    def add(self, graph: Any) -> None:
        """Count `graph` among those that keep the present pool alive."""
        self._graphs.add(graph)

    def stop_routing(self) -> bool:
        """Stop routing allocations into the pool; False if that had happened already."""
        try:
            self._allocator.stop_routing(self.device, self._handles[-1])
        except RuntimeError:  # "not currently recording to mempool_id"
            return False
        return True

    def release_share(self) -> None:
        """Give back the share of the pool that a failed capture took."""
        self._allocator.release_share(self.device, self._handles[-1])

    def abandon(self, graph: Any) -> None:
        """Never capture into the present pool again: an allocator may still route into it.

        The allocator still asks `graph` what to route, so it must never be destroyed. The host
        cannot capture into the pool either, and the log says so.
        """
        never_destroy(graph)
        self.stop_routing()
        if self._share is not None:
            logger.warning(
                "a capture that failed could not be taken back: the allocator pool %s, which is "
                "shared with the host, can be captured into no more; GraphPool.handle is another",
                self._handles[-1],
            )
        self._begin(self._handles)

    def allocating(self) -> AbstractContextManager[None]:
        """Route this thread's allocations into the pool; no capture of it may be open."""
        return _Routing(self, self._allocator, self.handle())

    def owns(self, address: int, *, grows: bool = True) -> bool:
        """Whether an address is in the pool; to be asked while a graph keeps the pool alive. While
        it `grows` a capture may be under way in it.

        Ranges of a living pool never go away, so only a miss needs the allocator, and that once
        after each capture: it takes 20 us. The host's own captures are seen by nobody.
        """
        if self._in_ranges(address):
            return True
        if self._is_known and not grows:
            return False
        self._refresh()
        self._is_known = not (grows or self._routed or self._share is not None)
        return self._in_ranges(address)

    def bytes(self) -> int:
        self._refresh()
        return sum(end - start for start, end in self._ranges)

    def save(self, device: torch.device, is_mapped: Callable[[int], bool]) -> SavedMemory:
        """Copies of what is in use; nothing of the pool is being written. `is_mapped` tells whether
        there is memory at an address."""
        self._ranges_version = None  # blocks come and go without segments
        blocks = []
        for segment in self._refresh():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    there = _bytes_at(address, device, block["size"])
                    blocks.append((there, there.to("cpu", copy=True)))
                address += block["size"]
        ranges = [*self._ranges]
        return SavedMemory(ranges, blocks, all(is_mapped(start) for start, _ in ranges))

    def restore(self, saved: SavedMemory, is_mapped: Callable[[int], bool]) -> bool:
        """Write them back; False if a segment is gone, or has no memory."""
        self._refresh()
        ends = [at for start, end in saved.ranges for at in (start, end - 1)]
        is_back = {*saved.ranges} <= {*self._ranges}
        if not is_back or (saved.is_known and not all(map(is_mapped, ends))):
            return False
        for there, copy in saved.blocks:
            there.copy_(copy)
        return True

    def clear(self) -> None:
        """Forget all graphs, which are reset already, and give a share of the pool back."""
        self._begin([])

    def _take_share(self) -> None:
        """Keep the present pool alive between two graphs; raises `PoolError`."""
        handle = self._handles[-1]
        try:
            self._share = self._allocator.hold(self.device, handle)
        except RuntimeError as error:
            raise PoolError(
                "the allocator pool cannot be entered",
                got=f"handle {handle}: {str(error).splitlines()[0]}",
                expected="the handle of a pool that is new, or that a graph holds",
                advice="give a new handle: a pool whose last graph is gone is being freed",
            ) from error

    def _in_ranges(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._ranges)

    def _refresh(self) -> Sequence[Mapping[str, Any]]:
        """Ask the allocator for the segments of these pools, if any has come or gone."""
        # Segments only come and go with device allocations, which these two count.
        reserved = self._allocator.stats(self.device)["reserved_bytes"]["all"]
        version = (reserved["allocated"], reserved["freed"])
        if version == self._ranges_version:
            return ()
        # A snapshot of all pools: asked for one, torch 2.11 and torch_npu 2.13 release the integers
        # of its id once too often, which corrupts memory from the 257th pool on (Python never frees
        # smaller integers).
        segments = [
            segment
            for segment in self._allocator.snapshot()
            if segment["device"] == self.device and segment["segment_pool_id"] in self._handles
        ]
        self._see(segments)
        self._ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
        used = {segment["segment_pool_id"] for segment in segments}
        self._handles = [
            handle for handle in self._handles if handle in used or handle == self._handles[-1]
        ]
        self._ranges_version = version
        return segments

    def _see(self, segments: Sequence[Mapping[str, Any]]) -> None:
        """Look at the segments of the pool, whenever they have changed."""


def pool_handle(handle: Any) -> PoolHandle:
    """The handle of an allocator pool, from the two integers that a host gives; raises
    `InvalidOptionError` for anything else."""
    pair = tuple(handle) if isinstance(handle, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(each, int) for each in pair) or pair == (0, 0):
        raise InvalidOptionError(
            "no handle of an allocator pool",
            got=shown(handle),
            expected="two integers: graph_pool_handle(), MemPool.id or the pool() of a graph",
            advice="handle=torch.cuda.graph_pool_handle(), on an NPU torch.npu.graph_pool_handle()",
        )
    return PoolHandle((pair[0], pair[1]))


def captured_pool(graph: Any) -> PoolHandle | None:
    """The allocator pool of a graph that holds a finished capture, and a share of it; else None."""
    try:
        return PoolHandle(tuple(graph.pool()))
    except RuntimeError:
        return None


def never_destroy(held: Any) -> None:
    """Keep a graph that an allocator may ask about, or a stream that nobody may have again, for as
    long as the process lives."""
    _undead.append(held)


# What `never_destroy` keeps.
_undead: list[Any] = []


def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, of its dtype, shape and strides, without keeping it in use.

    Raises what torch raises where the device's tensors cannot be made of an address, and
    `MissingTorchNameError` where torch cannot do it for any.
    """
    owner = tensor.untyped_storage()
    storage = storage_at(owner.data_ptr(), tensor.device, owner.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes_at(address: int, device: torch.device, nbytes: int) -> torch.Tensor:
    storage = storage_at(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
