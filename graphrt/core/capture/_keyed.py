"""Graphs by a key of the host's: captured now, replayed by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

from graphrt.core.base import (
    CaptureError,
    MissingGraphError,
    NestedCaptureError,
    Uncopied,
    check_callable,
    check_hashable,
    check_kind,
    shown,
)
from graphrt.core.batch import BatchDescriptor, ForwardContext, GraphMode, current_context
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import NESTED_CAPTURE
from graphrt.core.capture.transaction import CaptureTransaction
from graphrt.core.capture.wrapper import wrapper_class
from graphrt.core.replay import (
    WORST_CASE,
    GraphPool,
    SegmentHooks,
    Updates,
    in_turn,
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
        self._eager = _EagerGraphs(self.pool)
        self._wrapper = wrapper_class(self.pool.platform)(
            self._run, GraphMode.FULL, pool=self.pool, options=options, hooks=hooks
        )
        self._graphs: dict[Hashable, KeyedGraph] = {}

    def capture(self, key: Hashable, forward: Callable[[], Any]) -> KeyedGraph:
        """Capture `forward`, which takes no arguments: it reads and writes memory that stays.

        The call has the effect of one eager call of it; one before, as a warm-up, is the host's
        matter. From several threads, captures wait for one another. If `pool.on_capture` raises,
        the graph is there all the same. Raises `CaptureError` for a key that has a graph,
        `InvalidBatchError` for one that cannot be hashed, `PoolClosedError`, and what captures
        raise; `NestedCaptureError` inside of another capture.
        """
        check_callable("forward", forward)
        descriptor = BatchDescriptor(1, variant=key)
        if is_inside_capture():
            raise NESTED_CAPTURE()
        # The device's, and no lock besides it: who holds that one may come to drop a graph.
        with self.pool.capture_lock:
            graph, captured = self._capture(key, descriptor, forward)
        # Outside of it: what is told may wait for another thread that captures.
        if captured:
            self.pool.captured(self._wrapper, descriptor)
        return graph

    def _capture(
        self, key: Hashable, descriptor: BatchDescriptor, forward: Callable[[], Any]
    ) -> tuple[KeyedGraph, bool]:
        """The new graph, and whether it is one: with graphs off its replays are calls."""
        self.pool.check_open()
        self._forget_destroyed()
        if key in self._graphs:
            raise CaptureError(
                "a key was captured a second time",
                got=shown(key),
                expected="one graph for each key",
                advice="drop(key) before",
            )
        taken = {graph.slot for graph in list(self._graphs.values())}
        slot = next(free for free in range(len(taken) + 1) if free not in taken)
        transaction = _KeyedCapture(slot, forward)
        context = ForwardContext(
            GraphMode.FULL, descriptor, updates=WORST_CASE, capture=transaction
        )
        kept: Mapping[BatchDescriptor, Any] = self._wrapper.entries
        try:
            with context:
                outputs = self._wrapper()
            captured = bool(transaction.captured)
            if not captured:
                kept = self._eager.graphs
                transaction.add(self._wrapper, partial(self._eager.destroy_graphs, descriptor))
                self._eager.graphs[descriptor] = _EagerGraph(forward, outputs)
            graph = self._graphs[key] = KeyedGraph(key, self._wrapper, descriptor, slot, kept)
            transaction.commit()
        except BaseException:
            context.leave()
            transaction.rollback()
            raise
        return graph, captured

    def replay(self, key: Hashable, updates: Updates | None = None) -> Any:
        """`self[key].replay(updates)`; raises `KeyError` for a key without a graph."""
        return self[key].replay(updates)

    def drop(self, key: Hashable) -> None:
        """Destroy the graph of a key, if there is one; waits for captures of other threads, and
        raises `PoolBusyError` while a step is under way in the pool."""
        check_hashable("the key of a graph", key)
        with self.pool.capture_lock:
            graph = self._graphs.get(key)
            if graph is not None:
                in_turn(self.pool, "KeyedGraphs.drop()", partial(self._destroy, graph))

    def clear_graphs(self) -> None:
        """Destroy every graph; raises `PoolBusyError` while a step is under way in the pool."""
        with self.pool.capture_lock:
            in_turn(self.pool, "KeyedGraphs.clear_graphs()", self._destroy_all)

    def _destroy_all(self) -> None:
        self._wrapper.destroy_graphs(None)
        self._eager.destroy_graphs(None)
        self._forget_destroyed()

    def __getitem__(self, key: Hashable) -> KeyedGraph:
        graph = self._graphs[key]
        if not graph.alive:
            raise KeyError(key)
        return graph

    def __contains__(self, key: object) -> bool:
        graph = self._graphs.get(key)
        return graph is not None and graph.alive

    def __iter__(self) -> Iterator[Hashable]:
        return iter([key for key, graph in list(self._graphs.items()) if graph.alive])

    def __len__(self) -> int:
        return sum(graph.alive for graph in list(self._graphs.values()))

    def _forget_destroyed(self) -> None:
        """Graphs that the pool has destroyed."""
        for graph in list(self._graphs.values()):
            if not graph.alive:
                self._destroy(graph)

    def _destroy(self, graph: KeyedGraph) -> None:
        """Destroy a graph, or what is left of it; its key is free afterwards."""
        self._wrapper.destroy_graphs(graph.descriptor)
        self._eager.destroy_graphs(graph.descriptor)
        # Another graph may come to have its key, its descriptor and its slot.
        graph._context.descriptor = None
        self._graphs.pop(graph.key, None)

    def _run(self) -> Any:
        context = current_context()
        assert context is not None
        if isinstance(context.capture, _KeyedCapture):
            return context.capture.take_forward()()
        eager = None if context.descriptor is None else self._eager.graphs.get(context.descriptor)
        if eager is not None:
            return eager.call(context)
        raise _destroyed(", ".join(map(repr, self)) or "a key: there are no graphs at all")


def _destroyed(expected: str) -> MissingGraphError:
    return MissingGraphError(
        "a graph was replayed that has been destroyed",
        expected=expected,
        advice="capture it again",
    )


class _KeyedCapture(CaptureTransaction):
    """The capture of one key, with the forward that its thread captures."""

    # Told once the graph is there under its key.
    tells_pool = False

    def __init__(self, slot: int, forward: Callable[[], Any]) -> None:
        super().__init__(slot, metadata_is_declared=True)
        self._forward = [forward]

    def take_forward(self) -> Callable[[], Any]:
        """The forward, once: the graph's entry knows the transaction, and shall not keep it."""
        return self._forward.pop()


class _EagerGraph:
    """What a graph is that must not be captured: its forward, and what that returned last."""

    __slots__ = ("forward", "outputs", "updates")

    def __init__(self, forward: Callable[[], Any], outputs: Any) -> None:
        self.forward = forward
        self.outputs = outputs
        self.updates: Any = WORST_CASE

    def call(self, context: ForwardContext) -> Any:
        """One step of it; without updates the host arguments are those of the step before."""
        if context.updates is None:
            context.updates = self.updates
        self.outputs = outputs = self.forward()
        self.updates = context.updates
        return outputs


class _EagerGraphs:
    """Of `KeyedGraphs`, where graphs are off: cleared with the pool, like graphs in it."""

    def __init__(self, pool: GraphPool) -> None:
        self.graphs: dict[BatchDescriptor, _EagerGraph] = {}
        pool.add_holder(self)

    def destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        if descriptor is None:
            self.graphs.clear()
        else:
            self.graphs.pop(descriptor, None)

    def look_again(self, descriptor: BatchDescriptor) -> None:
        pass

    def in_session(self, begun: bool) -> None:
        pass


class KeyedGraph:
    """A graph of `KeyedGraphs`, under its `key`."""

    __slots__ = ("_context", "_kept", "_pool", "_wrapper", "descriptor", "key", "slot")

    def __init__(
        self,
        key: Hashable,
        wrapper: Any,
        descriptor: BatchDescriptor,
        slot: int,
        kept: Mapping[BatchDescriptor, Any],
    ) -> None:
        self.key = key
        self.descriptor = descriptor
        self.slot = slot
        self._wrapper = wrapper
        self._pool: GraphPool = wrapper.pool
        self._context = ForwardContext(GraphMode.FULL, descriptor, slot)
        self._kept = kept

    def __repr__(self) -> str:
        return f"KeyedGraph({self.key!r})"

    @property
    def alive(self) -> bool:
        """Whether it may be replayed still."""
        descriptor = self._context.descriptor
        return descriptor is not None and descriptor in self._kept

    @property
    def outputs(self) -> Any:
        """What its forward returned when it was captured, in memory of the pool: what the last
        replay left there, until the next step of the pool; with graphs off what it returned last.
        Raises `KeyError` once it is destroyed.
        """
        if not self.alive:
            raise KeyError(self.key)
        return self._kept[self.descriptor].outputs

    def replay(self, updates: Updates | None = None) -> Any:
        """Replay it, as one step of the pool; returns what its forward returned.

        `updates` are the host arguments of its tasks. Raises `PoolBusyError`, `MissingGraphError`
        once it is destroyed, `NestedCaptureError` inside of a capture, and what updates raise.
        """
        if under_way and is_inside_capture():
            raise NestedCaptureError(
                "a graph was replayed inside of a capture: it would leave no trace there",
                got=shown(self),
                expected="its forward in its place",
                advice="call the forward itself where something else is captured",
            )
        context = self._context
        # A turn, written out: see `Turn`. Before the context is touched: it is one for all threads.
        pool = self._pool
        if pool.owner is not None:
            if not self.alive:
                raise _destroyed("one that is alive")
            raise pool.busy_error(context)
        try:
            pool.owner = context
            context.updates = updates
            with context:
                outputs = self._wrapper()
            if pool.owner is context:
                # Else it waits for its updates, and keeps the pool.
                pool.owner = None
            return outputs
        except BaseException:
            if pool.owner is context:
                pool.owner = None
            raise
