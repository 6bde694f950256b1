"""The memory of captured graphs, from the caching allocator of torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.lent_streams import Loan
from graphrt.core.device.platform import no_other_capture
from graphrt.core.device.pool_memory import Allocator, PoolHandle, PoolMemory, captured_pool
from graphrt.cuda._workspaces import Workspaces, is_hosts, streams_with_workspaces
from graphrt.cuda.private_torch import (
    memory_stats,
    release_pool,
    route_thread_to_pool,
    stop_routing_to_pool,
)
from graphrt.cuda.streams import loan_of, own_stream
from graphrt.cuda.update.ladder import UpdateCounts


class GraphMemory(PoolMemory):
    """Allocator pools of CUDA memory, and how the tasks of graphs in them were updated."""

    def __init__(self, adopted: PoolHandle | None = None) -> None:
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
        self.updates = UpdateCounts()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._loans: list[Loan | None] = []
        self._with_workspace: set[int] = set()
        self._workspaces = Workspaces()

    def capturing_on(self, stream: torch.cuda.Stream) -> None:
        """Note a stream that graphs of this memory are captured on: it stays lent as long, for its
        workspace, and for tasks that are captured on it again."""
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
            self._loans.append(loan_of(stream))

    def keep_empty(self, graph: Any) -> None:
        """Destroy a graph that recorded nothing only with the others: not between two captures, as
        with it torch drops the workspace of its stream."""
        self._graphs.discard(graph)
        self._empties.append(graph)

    def before_reset(self) -> None:
        """Look for which streams the pool has workspaces, which graphs may be using."""
        self._refresh()
        if self._with_workspace or any(map(is_hosts, self._streams.values())):
            self._workspaces.prepare()

    @undoing
    def after_reset(self, undo: Undo) -> None:
        """Take workspaces back for the graphs that are left, those of the host among them."""
        left = self._share is not None or self._graphs_left()
        inside = [s for s in self._streams.values() if s.cuda_stream in self._with_workspace]
        if not left:
            self._reset_empties()
        elif inside:
            undo.enter(self.allocating())
            self._workspaces.ask(inside)
            undo.now()  # what the host's own streams get is outside of the pool
        self._ask_for_hosts()

    def clear(self) -> None:
        self.before_reset()
        super().clear()
        self._ask_for_hosts()
        self.updates = UpdateCounts()
        self._streams.clear()
        self._loans.clear()

    def _ask_for_hosts(self) -> None:
        """Outside of the pool, where the host's own are that were there before."""
        self._workspaces.ask(
            stream
            for handle, stream in self._streams.items()
            if is_hosts(stream) and handle not in self._with_workspace
        )

    def _graphs_left(self) -> bool:
        return any(captured_pool(graph) is not None for graph in self._graphs)

    def _reset_empties(self) -> None:
        while self._empties:
            self._empties.pop().reset()

    def _begin(self, before: list[PoolHandle], adopted: PoolHandle | None = None) -> None:
        self._reset_empties()
        super()._begin(before, adopted)

    def _see(self, segments: Sequence[Mapping[str, Any]]) -> None:
        self._with_workspace = streams_with_workspaces(segments)


class _Held:
    """An empty graph in a pool, and its stream: when the graph is reset, torch drops the workspace
    of that stream, which must not be another pool's by then."""

    def __init__(self, device: int, handle: PoolHandle) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = own_stream()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            try:
                unseen(partial(self._graph.capture_begin, handle, "thread_local"))  # type: ignore[arg-type]
            except RuntimeError:
                # Of its two allocators the first may have begun.
                with suppress(RuntimeError):  # "not currently recording to mempool_id"
                    stop_routing_to_pool(device, handle)
                    release_pool(device, handle)
                # It has also told the generator that a capture is under way; one that ends says no.
                over = torch.cuda.CUDAGraph()
                unseen(partial(over.capture_begin, capture_error_mode="thread_local"))
                over.capture_end()
                over.reset()
                raise
            self._graph.capture_end()

    def reset(self) -> None:
        """Let go of the pool."""
        self._graph.reset()


def empty_cache() -> None:
    """Give what nobody uses back to the devices: to all of them, which no capture on another one
    may see; while one is under way it is kept."""
    with no_other_capture(torch.device("cuda", torch.cuda.current_device())) as alone:
        if alone:
            torch.cuda.empty_cache()
