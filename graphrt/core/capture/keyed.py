"""Graphs for hosts that dispatch by keys of their own: captured by a call, replayed by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import (
    IN_PIECES,
    CaptureError,
    CaptureSealedError,
    GraphRTError,
    NestedCaptureError,
    Uncopied,
)
from graphrt.core.base.option_values import (
    MOST,
    check_callable,
    check_hashable,
    check_kind,
    refused,
    shown,
)
from graphrt.core.batch.context import CaptureTransaction, ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode, graphs_off
from graphrt.core.capture.constants import Lifting
from graphrt.core.capture.limit import GraphLimit, LimitReport
from graphrt.core.capture.options import NO_LIMIT, GraphOptions
from graphrt.core.capture.refusals import NESTED_CAPTURE
from graphrt.core.capture.wrapper import CallChecks, GraphWrapper, wrapper_class
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay.entry import Entry, SegmentHooks
from graphrt.core.replay.pool import GraphPool, in_turn
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.replay.tasks import UNCHANGED, WORST_CASE, Updates

_WITHOUT_PIECES = (
    "take it out of the forward: graphs by key have no pieces, which GraphRunner and wrappers have "
    '(mode="PIECEWISE")'
)


_WITH_SIZES = (
    "GraphRunner(forward, ...) if its tasks have lists of host arguments: a key tells them no "
    "requests and, without a limit of graphs, one token"
)


class KeyedGraphs(Uncopied):
    """FULL graphs of a host that has keys of its own, and dispatches by them.

    `graphs.capture(key, forward)` captures at once, sealed or not, and `graphs[key].replay()`
    replays; `graphs.run(key, forward)` does what a limit of graphs allows. Like
    `torch.cuda.CUDAGraph`, a graph reads what its forward read where it was.

    A forward with tasks whose host arguments are lists, as attention's are, needs a `GraphRunner`:
    a key tells them no requests and, without a limit, one token. `run` takes no updates.
    """

    def __init__(
        self,
        pool: GraphPool | None = None,
        *,
        options: GraphOptions | None = None,
        hooks: SegmentHooks | None = None,
        trials: Callable[[], CallChecks | None] | None = None,
    ) -> None:
        """Graphs are captured in `pool`, by default a new one; `options` and `hooks` are those of
        `GraphWrapper`. With `trials=WrapperTrials` each graph has one, which checks it as it does a
        wrapper's; it keeps its forward."""
        check_kind("pool", pool, GraphPool)
        check_kind("options", options, GraphOptions)
        if trials is not None:
            check_callable("trials", trials)
        self.pool = GraphPool() if pool is None else pool
        make, mode = wrapper_class(self.pool.platform), GraphMode.FULL
        own = None if options is None else options.merged(NO_LIMIT)
        # Makes the wrapper of one graph.
        self._wrap = partial(make, runtime_mode=mode, pool=self.pool, options=own, hooks=hooks)
        # Raises now, not at the first capture, if an option is wrong.
        self._wrap(_destroyed)
        self._new_trials = trials
        # kind of graphs -> whether they lift constants.
        self._kinds: WeakKeyDictionary[object, Lifting] = WeakKeyDictionary()
        # key -> its graph, which may have been destroyed together with all others of the pool.
        self._graphs: dict[Hashable, KeyedGraph] = {}
        self._limit = GraphLimit.of(options, self.pool)

    @property
    def limit_report(self) -> LimitReport | None:
        """What the graphs hold under `max_graphs` or `graph_bytes`; None without a limit."""
        return None if self._limit is None else self._limit.report()

    def run(self, key: Hashable, forward: Callable[[], Any]) -> Any:
        """Replay the graph of a key. Where there is none, capture it if the limit allows that now,
        else call `forward`, the same for a key always. Raises what `capture` and `replay` do."""
        check_callable("forward", forward)
        check_hashable("the key of a graph", key)
        if key in self:
            return self[key].replay()
        if graphs_off():
            return forward()
        if self._limit is not None:
            with self.pool.capture_lock:
                is_admitted = self._limit.admits((GraphMode.FULL, self._descriptor(key)))
            if not is_admitted:
                return forward()
        return self._capture(key, forward)[1]

    def capture(
        self, key: Hashable, forward: Callable[[], Any], *, kind: object = None
    ) -> KeyedGraph:
        """Capture `forward`, which takes no arguments: it reads and writes memory that stays.

        Graphs of one `kind`, an object that weak references can be made to, run the same code for
        batches of other sizes: operators of the first are looked at for memory and random numbers
        of the host, and of the others only if it used some. Without it those of each graph are.

        The call has the effect of one eager call of it; one before, as a warm-up, is the host's
        matter. From several threads, captures wait for one another. If `pool.on_capture` raises,
        the graph is there all the same. Raises `CaptureError` for a key that has a graph,
        `InvalidBatchError` for one that cannot be hashed, `PoolClosedError`, and what captures
        raise; `NestedCaptureError` inside of another capture. Under a limit the least used graph
        makes room; `ResourceExhaustedError` where none may.
        """
        check_callable("forward", forward)
        try:
            self._kinds.get(self if kind is None else kind)
        except TypeError as cause:
            expected = "an object that weak references can be made to, and that can be hashed"
            advice = "kind=model, or another object of a class of yours"
            raise refused("kind= is no such object", kind, expected, advice) from cause
        return self._capture(key, forward, wanted=True, kind=kind)[0]

    def _descriptor(self, key: Hashable) -> BatchDescriptor:
        # Under a limit a whole number is a size, and the graph of the largest stays.
        is_size = self._limit is not None and type(key) is int and 0 < key < MOST
        return BatchDescriptor(cast(int, key) if is_size else 1, variant=key)

    def _capture(
        self,
        key: Hashable,
        forward: Callable[[], Any],
        *,
        wanted: bool = False,
        kind: object = None,
    ) -> tuple[KeyedGraph, Any]:
        """Capture `forward`; returns the graph, and the result of the call that was captured."""
        descriptor = self._descriptor(key)
        if is_inside_capture():
            raise NESTED_CAPTURE()
        # The device's lock, and no second one: a thread that captures, and so has the first, may
        # drop a graph here, and would wait for the second.
        with self.pool.capture_lock:
            trials = None if self._new_trials is None else self._new_trials()
            wrapper = self._wrap(forward, trials=trials)
            if kind is not None:
                wrapper._lifting = self._kinds.setdefault(kind, wrapper._lifting)
            capture = partial(self._captured, key, descriptor, wrapper, wanted=wanted)
            if self._limit is None:
                graph, outputs = capture()
            else:
                wrapper._count_in(self._limit)
                named = GraphMode.FULL, descriptor
                graph, outputs = self._limit.capture(
                    named, capture, self._evict, wanted=wanted, warns=not wanted
                )
        # After the lock: `pool.on_capture` may wait for another thread that captures.
        if graph.alive and not graph.is_eager:
            self.pool._captured(wrapper, descriptor)
        return graph, outputs

    def _evict(self, key: CaptureKey) -> None:
        in_turn(self.pool, "KeyedGraphs.run()", partial(self._destroy, [key[1].variant]))

    @undoing
    def _captured(
        self,
        undo: Undo,
        key: Hashable,
        descriptor: BatchDescriptor,
        wrapper: GraphWrapper,
        *,
        wanted: bool,
    ) -> tuple[KeyedGraph, Any]:
        self.pool.check_open()
        if key in self:
            raise CaptureError(
                "a key was captured a second time",
                got=shown(key),
                expected="one graph for each key",
                advice="call drop(key) before capturing it again",
            )
        transaction = CaptureTransaction(0, metadata_is_declared=True, tells_pool=False)
        context = ForwardContext(
            GraphMode.FULL, descriptor, updates=WORST_CASE, capture=transaction
        )
        undo.after_error(partial(self._graphs.pop, key, None))
        undo.after_error(transaction.rollback)
        undo.after_error(context.leave)
        try:
            with context:
                outputs = wrapper()
        except GraphRTError as error:
            if transaction.task_names and type(error) is CaptureError:
                error.advice = _WITH_SIZES
                error.args = (error._message(),)
            if error.advice is not None and IN_PIECES in error.advice:
                error.advice = error.advice.replace(IN_PIECES, _WITHOUT_PIECES)
                error.args = (error._message(),)
            raise
        if transaction.task_names and not wanted:
            raise CaptureError(
                "run() takes no updates, which the tasks of this forward need at every step",
                got=f"tasks {', '.join(sorted(transaction.task_names))}",
                expected="a forward without updatable tasks",
                advice="a GraphRunner; or capture(key, forward), and replay(key, updates)",
            )
        graph = self._graphs[key] = KeyedGraph(key, descriptor, wrapper, outputs)
        return graph, outputs

    def replay(self, key: Hashable, updates: Updates | Any = None) -> Any:
        """`self[key].replay(updates)`; raises `KeyError` for a key without a graph."""
        return self[key].replay(updates)

    def drop(self, key: Hashable) -> None:
        """Destroy the graph of a key, if there is one; waits for captures of other threads, and
        raises `PoolBusyError` while a step is under way in the pool."""
        check_hashable("the key of a graph", key)
        with self.pool.capture_lock:
            if key in self._graphs:
                in_turn(self.pool, "KeyedGraphs.drop()", partial(self._destroy, [key]))

    def clear_graphs(self) -> None:
        """Destroy every graph; raises `PoolBusyError` while a step is under way in the pool."""
        with self.pool.capture_lock:
            in_turn(self.pool, "KeyedGraphs.clear_graphs()", partial(self._destroy, self._graphs))

    def _destroy(self, keys: Iterable[Hashable]) -> None:
        for key in list(keys):
            self._graphs[key].destroy()
            del self._graphs[key]

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


class KeyedGraph:
    """A graph of `KeyedGraphs`, under its `key`.

    With graphs off, and in quarantine (where `trials` may put it), a replay calls the forward. That
    ends with the pool, as graphs do.
    """

    def __init__(
        self, key: Hashable, descriptor: BatchDescriptor, wrapper: GraphWrapper, outputs: Any
    ) -> None:
        """Of the one capture of `wrapper`, if graphs are on, which returned these `outputs`."""
        self.key = key
        self.descriptor = descriptor
        # Whether graphs are off: then nothing was captured.
        self.is_eager = not wrapper.entries
        self.trials: Any = wrapper._graphs.trials
        """What `trials=` has made for it, such as a `WrapperTrials`; else None."""
        self._wrapper = wrapper
        # The updates that an eager run repeats where a replay is given none.
        self._updates: Any = WORST_CASE if self.is_eager else None
        if self.is_eager:
            # An entry without a graph, so that it is destroyed with the pool as others are.
            wrapper._graphs.entries[descriptor] = Entry(descriptor, (), outputs, {}, None)
        elif self.trials is None:
            wrapper.runnable = _destroyed

    def __repr__(self) -> str:
        return f"KeyedGraph({self.key!r})"

    @property
    def alive(self) -> bool:
        """Whether it may be replayed still."""
        return self.descriptor in self._wrapper.entries

    @property
    def outputs(self) -> Any:
        """What its forward returned when it was captured, in memory of the pool: what the last
        replay left there, until the next step of the pool; with graphs off, and in quarantine, what
        it returned last.
        Raises `KeyError` once it is destroyed.
        """
        if not self.alive:
            raise KeyError(self.key)
        return self._wrapper.entries[self.descriptor].outputs

    def replay(self, updates: Updates | Any = None) -> Any:
        """Replay it, as one step of the pool; returns what its forward returned.

        `updates` are the host arguments of its tasks. Raises `PoolBusyError`, `CaptureSealedError`
        once it is destroyed, `NestedCaptureError` inside of a capture, and what updates raise.
        """
        if under_way and is_inside_capture():
            raise NestedCaptureError(
                "a graph was replayed inside of a capture: it would leave no trace there",
                got=shown(self),
                expected="its forward in its place",
                advice="call the forward itself where something else is captured",
            )
        if not self.alive:
            _destroyed()
        # An eager run has no host arguments of the step before: these are kept for it here.
        if self._updates is not None and (updates is None or updates is UNCHANGED):
            updates = self._updates
        with ForwardContext(GraphMode.FULL, self.descriptor, 0, updates=updates):
            outputs = self._wrapper()
        if self._wrapper.runnable is not _destroyed:
            # A copy: the host may change its own before the next replay.
            self._updates = deepcopy(updates) if isinstance(updates, Mapping) else updates
        # Only in quarantine does the wrapper count eager calls: then its forward has run now.
        if self.is_eager or self._wrapper._eager_calls:
            self._wrapper.entries[self.descriptor].outputs = outputs
        return outputs

    def destroy(self) -> None:
        """Destroy it; the caller has the pool's turn."""
        self._wrapper.destroy_graphs(None)
        self._wrapper.runnable = _destroyed


def _destroyed() -> NoReturn:
    raise CaptureSealedError(
        "a graph was replayed that has been destroyed",
        expected="one that is alive",
        advice="capture it again",
    )
