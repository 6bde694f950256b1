"""The memory of captured graphs, from the caching allocator of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.contract import UpdateFigures
from graphrt.core.device.lent_streams import Loan
from graphrt.core.device.platform import no_other_capture
from graphrt.core.device.pool_memory import (
    Allocator,
    PoolHandle,
    PoolMemory,
    SavedMemory,
    captured_pool,
)
from graphrt.cuda._workspaces import Workspaces, is_hosts, streams_with_workspaces
from graphrt.cuda.private_torch import (
    empty_host_cache,
    memory_stats,
    release_pool,
    route_thread_to_pool,
    stop_routing_to_pool,
)
from graphrt.cuda.streams import loan_of, own_stream


class GraphMemory(PoolMemory):
    """The memory that the CUDA graphs of one pool share, in pools of torch's allocator. It also has
    the streams that they were captured on, with their workspaces, and counts updates of tasks."""

    def __init__(self, adopted: PoolHandle | None = None) -> None:
        # Graphs that recorded nothing: see `keep_empty`.
        self._empties: list[Any] = []
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
                hold=_Held,
            ),
            adopted,
        )
        self.updates = UpdateFigures()
        # Handle of a stream that graphs were captured on -> the stream, and what keeps it lent.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._loans: list[Loan | None] = []
        # Handles of the streams whose workspace is in this memory.
        self._with_workspace: set[int] = set()
        # The same, as of the last sleep.
        self._slept_with: set[int] = set()
        self._workspaces = Workspaces()

    def capturing_on(self, stream: torch.cuda.Stream) -> None:
        """Keep a stream lent until `clear`: its workspace is in this memory, and updates capture
        tasks on it again."""
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
            self._loans.append(loan_of(stream))

    def keep_empty(self, graph: Any) -> None:
        """Keep a graph that recorded nothing for now. Destroyed between two captures, it would make
        torch drop the workspace of its stream, which the first capture uses."""
        self._graphs.discard(graph)
        self._empties.append(graph)

    def before_reset(self) -> None:
        """Note which streams have their workspace in this pool, before torch drops it."""
        self._refresh()
        if self._with_workspace or any(map(is_hosts, self._streams.values())):
            self._workspaces.prepare()

    @undoing
    def after_reset(self, undo: Undo) -> None:
        """Allocate workspaces again for the graphs that are left, those of the host among them."""
        pool_is_used = self._share is not None or any(map(captured_pool, self._graphs))
        streams = [s for s in self._streams.values() if s.cuda_stream in self._with_workspace]
        if not pool_is_used:
            self._reset_empties()
        elif streams:
            undo.enter(self.allocating())
            self._workspaces.ask(streams)
            undo.now()  # the workspaces of the host's streams go outside of the pool
        self._ask_for_hosts()

    def save(self, device: torch.device, is_mapped: Callable[[int], bool]) -> SavedMemory:
        saved = super().save(device, is_mapped)
        self._slept_with = set(self._with_workspace)
        return saved

    def restore(self, saved: SavedMemory, is_mapped: Callable[[int], bool]) -> bool:
        if not super().restore(saved, is_mapped):
            return False
        # Graphs that were destroyed in the sleep were reset alone: see `after_reset`.
        self._with_workspace = self._slept_with
        self._workspaces.prepare()
        self.after_reset()
        return True

    def clear(self) -> None:
        self.before_reset()
        super().clear()
        self._ask_for_hosts()
        self.updates = UpdateFigures()
        self._streams.clear()
        self._loans.clear()

    def _ask_for_hosts(self) -> None:
        """Allocate the workspaces of the host's streams again, outside of the pool as before."""
        self._workspaces.ask(
            stream
            for handle, stream in self._streams.items()
            if is_hosts(stream) and handle not in self._with_workspace
        )

    def _reset_empties(self) -> None:
        while self._empties:
            self._empties.pop().reset()

    def _begin(self, before: list[PoolHandle], adopted: PoolHandle | None = None) -> None:
        self._reset_empties()
        super()._begin(before, adopted)

    def _see(self, segments: Sequence[Mapping[str, Any]]) -> None:
        self._with_workspace = streams_with_workspaces(segments)


class _Held:
    """An empty graph that keeps an allocator pool alive. Its stream is its own: at the reset torch
    drops that stream's workspace, which graphs of another pool might use."""

    def __init__(self, device: int, handle: PoolHandle) -> None:
        self._stream = own_stream()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            try:
                self._begin(device, handle)
            except RuntimeError:
                # A `MemPool` keeps memory of the device alone. The pinned memory of its id is freed
                # after the last graph, and can be entered again once it is gone.
                empty_host_cache()
                self._begin(device, handle)
            self._graph.capture_end()

    def _begin(self, device: int, handle: PoolHandle) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            unseen(partial(self._graph.capture_begin, handle, "thread_local"))  # type: ignore[arg-type]
        except RuntimeError:
            # It routes two allocators, of device and of pinned memory: the first may be routed.
            with suppress(RuntimeError):  # "not currently recording to mempool_id"
                stop_routing_to_pool(device, handle)
                release_pool(device, handle)
            # The generator also expects a capture now, until one ends.
            ended = torch.cuda.CUDAGraph()
            unseen(partial(ended.capture_begin, capture_error_mode="thread_local"))
            ended.capture_end()
            ended.reset()
            raise

    def reset(self) -> None:
        """Let go of the pool."""
        self._graph.reset()


def empty_cache() -> None:
    """Give the allocator's unused memory back to all devices. That would break a capture on another
    device: while one is under way nothing is given back."""
    with no_other_capture(torch.device("cuda", torch.cuda.current_device())) as alone:
        if alone:
            torch.cuda.empty_cache()
