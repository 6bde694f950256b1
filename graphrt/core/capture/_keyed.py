"""Graphs by a key of the host's: captured now, replayed by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from graphrt.core.base import (
    CaptureError,
    MissingGraphError,
    NestedCaptureError,
    Uncopied,
    check_callable,
    check_kind,
)
from graphrt.core.batch import BatchDescriptor, ForwardContext, GraphMode
from graphrt.core.capture.lookup import wrapper_class
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.recorder import inside_capture
from graphrt.core.capture.transaction import CaptureTransaction
from graphrt.core.replay import (
    WORST_CASE,
    GraphPool,
    SegmentHooks,
    Updates,
    is_inside_capture,
    under_way,
)


class KeyedGraphs(Uncopied):
    """FULL graphs of a host that has keys of its own, and dispatches by them.

    `graphs.capture(key, forward)` captures at once, sealed or not, and `graphs[key].replay()`
    replays. Like `torch.cuda.CUDAGraph`, a graph reads what its forward read where it was.
    """

    def __init__(
        self,
        pool: GraphPool | None = None,
        *,
        options: GraphOptions | None = None,
        hooks: SegmentHooks | None = None,
    ) -> None:
        """In `pool`, by default one of its own; `options` and `hooks` are `GraphWrapper`'s."""
        check_kind("pool", pool, GraphPool)
        self.pool = GraphPool() if pool is None else pool
        self._forward: Callable[[], Any] | None = None
        self._wrapper = wrapper_class(self.pool.platform)(
            self._run, GraphMode.FULL, pool=self.pool, options=options, hooks=hooks
        )
        self._graphs: dict[Hashable, KeyedGraph] = {}

    def capture(self, key: Hashable, forward: Callable[[], Any]) -> KeyedGraph:
        """Capture `forward`, which takes no arguments: it reads and writes memory that stays.

        The call has the effect of one eager call of it; one before, as a warm-up, is the host's
        matter. Raises `CaptureError` for a key that has a graph, and what captures raise;
        `NestedCaptureError` inside of another capture.
        """
        check_callable("forward", forward)
        if is_inside_capture():
            raise inside_capture()
        self._forget_cleared()
        if key in self._graphs:
            raise CaptureError(
                "a key was captured a second time",
                got=repr(key),
                expected="one graph for each key",
                advice="drop(key) before",
            )
        taken = {graph.slot for graph in self._graphs.values()}
        slot = next(free for free in range(len(taken) + 1) if free not in taken)
        descriptor = BatchDescriptor(1, variant=key)
        transaction = CaptureTransaction(slot, metadata_is_declared=True)
        context = ForwardContext(
            GraphMode.FULL, descriptor, updates=WORST_CASE, capture=transaction
        )
        self._forward = forward
        try:
            with context:
                self._wrapper()
        except BaseException:
            transaction.rollback()
            raise
        finally:
            self._forward = None
        # Without a capture (GRAPHRT_MODE=NONE) its replays are calls.
        eagerly = None if transaction.commit() else forward
        graph = self._graphs[key] = KeyedGraph(key, self._wrapper, descriptor, slot, eagerly)
        return graph

    def replay(self, key: Hashable, updates: Updates | None = None) -> Any:
        """`self[key].replay(updates)`; raises `KeyError` for a key without a graph."""
        return self[key].replay(updates)

    def drop(self, key: Hashable) -> None:
        """Destroy the graph of a key, if there is one."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._wrapper.drop(graph.descriptor)
            self._graphs.pop(key, None)

    def clear_graphs(self) -> None:
        """Destroy every graph; raises `PoolBusyError` while a step is under way in the pool."""
        self._wrapper.clear_graphs()
        self._graphs.clear()

    def __getitem__(self, key: Hashable) -> KeyedGraph:
        self._forget_cleared()
        return self._graphs[key]

    def __contains__(self, key: object) -> bool:
        self._forget_cleared()
        return key in self._graphs

    def __iter__(self) -> Iterator[Hashable]:
        self._forget_cleared()
        return iter(list(self._graphs))

    def __len__(self) -> int:
        self._forget_cleared()
        return len(self._graphs)

    def _forget_cleared(self) -> None:
        """Graphs that the pool has destroyed."""
        for graph in [graph for graph in self._graphs.values() if not graph.alive]:
            self._graphs.pop(graph.key, None)

    def _run(self) -> Any:
        if self._forward is not None:
            return self._forward()
        raise MissingGraphError(
            "a graph was replayed that has been destroyed",
            expected=", ".join(map(repr, self)) or "a key: there are no graphs at all",
            advice="capture it again",
        )


class KeyedGraph:
    """A graph of `KeyedGraphs`, under its `key`."""

    __slots__ = ("_context", "_eagerly", "_wrapper", "descriptor", "key", "slot")

    def __init__(
        self,
        key: Hashable,
        wrapper: Any,
        descriptor: BatchDescriptor,
        slot: int,
        eagerly: Callable[[], Any] | None,
    ) -> None:
        self.key = key
        self.descriptor = descriptor
        self.slot = slot
        self._wrapper = wrapper
        self._context = ForwardContext(GraphMode.FULL, descriptor, slot)
        self._eagerly = eagerly

    def __repr__(self) -> str:
        return f"KeyedGraph({self.key!r})"

    @property
    def alive(self) -> bool:
        """Whether it may be replayed still."""
        return self._eagerly is not None or self.descriptor in self._wrapper.entries

    @property
    def outputs(self) -> Any:
        """What its forward returned when it was captured, in memory of the pool: what the last
        replay left there, until the next step of the pool. Raises `KeyError` once it is destroyed.
        """
        return None if self._eagerly is not None else self._wrapper.entries[self.descriptor].outputs

    def replay(self, updates: Updates | None = None) -> Any:
        """Replay it, as one step of the pool; returns what its forward returned.

        `updates` are the host arguments of its tasks. Raises `PoolBusyError`, `MissingGraphError`
        once it is destroyed, `NestedCaptureError` inside of a capture, and what updates raise.
        """
        if self._eagerly is not None:
            return self._eagerly()
        if under_way and is_inside_capture():
            raise NestedCaptureError(
                "a graph was replayed inside of a capture: it would leave no trace there",
                got=repr(self),
                expected="its forward in its place",
                advice="call the forward itself where something else is captured",
            )
        context = self._context
        context.updates = updates
        with context:
            return self._wrapper()
