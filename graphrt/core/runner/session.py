"""`capture()`: warm-up and capture of every planned graph, undone where it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import (
    GraphRTError,
    PageableCopyError,
    ResourceExhaustedError,
    StreamBudgetError,
)
from graphrt.core.base.garbage import freeze_garbage, thaw_garbage
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.transaction import CaptureTransaction
from graphrt.core.replay.host_args import WORST_CASE
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import under_way, warming_up
from graphrt.core.runner._streams import StreamLedger
from graphrt.core.runner.host import Host, Phase
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.trust.warm_up import WatchedState

Progress = Callable[[int, int, BatchDescriptor], None]
"""Told how many graphs are done, of how many, and which one comes next (at the end: the last)."""

Enough = Callable[["PlannedGraph"], bool]
"""Asked before each graph: whether to leave it, and those after it, for another session."""


@dataclass(frozen=True)
class GraphRecord:
    """What capturing one graph took."""

    mode: GraphMode
    descriptor: BatchDescriptor
    capture_s: float
    pool_bytes: int | None
    """Bytes by which the pool grew; None where the platform cannot tell."""
    driver_bytes: int | None = None
    """Bytes that the device's driver took for the executable graphs, with what else it took
    meanwhile, for other processes too; None where the platform cannot tell."""
    streams: int | None = None
    """Streams of the device that its graphs hold; None where the platform does not tell."""


@dataclass(frozen=True)
class PlannedGraph:
    """A graph to capture: its key, its slot, and the step it will serve."""

    mode: GraphMode
    descriptor: BatchDescriptor
    slot: int
    step: PaddedStep


def capture_graphs(
    planned: Iterable[PlannedGraph],
    *,
    pool: GraphPool,
    warm_ups: WarmUps,
    bind: Callable[[PaddedStep, Phase], None],
    enlist: Callable[[Any], None],
    state: WatchedState,
    host: Host,
    publish: Callable[[PlannedGraph, GraphRecord, CaptureTransaction], None],
    take_back: Callable[[PlannedGraph, CaptureTransaction], None],
    drop: Callable[[PlannedGraph, ResourceExhaustedError], None],
    settle: Callable[[], None],
    owner: object,
    progress: Progress | None = None,
    enough: Enough | None = None,
) -> None:
    """Capture `planned` in its order and publish each graph once all its wrappers have it, until
    there are `enough`.

    A graph that fails is rolled back and the error raised; those before it stay published. One
    that the device has no room for is not begun, or rolled back, and dropped: smaller ones after it
    may fit.
    `take_back` undoes what a graph's capture, and `publish`, came to. `enlist` is asked about every
    compiled module that takes part. `state` is restored after every
    forward, so that each starts from it. `settle` is called when all are captured. `owner` has the
    pool's turn all the time: a step of another thread would read buffers that a capture fills.
    """
    graphs = list(planned)
    if not graphs:
        return
    session = _Session(pool, owner, warm_ups, bind, enlist, state, host)
    undo = Undo()
    try:
        undo.enter(pool.on_device())
        # The host's numbers go on where they were; those of a device are not restored.
        undo.later(partial(torch.set_rng_state, torch.get_rng_state()))
        undo.later(partial(thaw_garbage, session))
        freeze_garbage(session)
        with host.around():
            # Warm-ups write what the steps before may be reading still, on whichever stream.
            pool.follow_stream()
            for done, graph in enumerate(graphs):
                if enough is not None and enough(graph):
                    break
                if progress is not None:
                    progress(done, len(graphs), graph.descriptor)
                transaction = CaptureTransaction(
                    graph.slot,
                    graph.step.storages(),
                    metadata_is_declared=host.metadata is not None,
                    lifts_constants=warm_ups.lifts_constants,
                )
                session.has_doors = any(each.mode is GraphMode.PIECEWISE for each in graphs[done:])
                try:
                    publish(graph, session.capture(graph, transaction), transaction)
                except BaseException as error:
                    take_back(graph, transaction)
                    if isinstance(error, ResourceExhaustedError):
                        # Putting it back may be what there was no room for.
                        state.restore()
                        drop(graph, error)
                        continue
                    if hasattr(error, "add_note"):
                        error.add_note(f"while capturing {graph.mode.name} [{graph.descriptor}]")
                    raise
            settle()
            if progress is not None:
                progress(len(graphs), len(graphs), graphs[-1].descriptor)
        undo.now()
    except BaseException:
        undo.now()
        state.restore()
        raise


class WarmUps:
    """Which graphs of one runner are warmed up before their capture, and how often.

    With `each` all are, but those of one size and kind together if they are `alike`: if the mode
    alone makes no difference to the forward. Without, only the first of each kind is. `breaks` are
    operators that end a segment of a PIECEWISE capture.
    """

    def __init__(
        self, count: int, *, each: bool = True, alike: bool = False, breaks: tuple[str, ...] = ()
    ) -> None:
        self.count = count
        self._each = each
        self._alike = alike
        self._done: set[Hashable] = set()
        # To look at every operator takes time, and most forwards copy nothing from the host.
        self.lifts_constants = False
        self.breaks = breaks

    @classmethod
    def of(cls, options: GraphOptions, host: Host) -> WarmUps:
        """Those that options ask for."""
        # What `bind` does may depend on the descriptor; inputs depend on the size.
        alike = host.bind is None
        each, breaks = options.warm_up_each, options.breaks
        return cls(options.warmups, each=each, alike=alike, breaks=breaks)

    def begin(self, *, keep: bool) -> None:
        """Begin a session; with `keep` what others have warmed up is warm."""
        if not keep:
            self._done.clear()

    def needed(self, graph: PlannedGraph) -> bool:
        return self.count > 0 and self.kind(graph) not in self._done

    def done(self, graph: PlannedGraph) -> None:
        self._done.add(self.kind(graph))

    def kind(self, graph: PlannedGraph) -> Hashable:
        own, step = graph.descriptor, graph.step
        if not self._each:
            return graph.mode, *own.kind
        size = step.tokens, step.reqs
        return (*own.serves, *size) if self._alike else (graph.mode, *own.kind, *size)


class _Session:
    """One `capture()`, in a turn of `owner`."""

    def __init__(
        self,
        pool: GraphPool,
        owner: object,
        warm_ups: WarmUps,
        bind: Callable[[PaddedStep, Phase], None],
        enlist: Callable[[Any], None],
        state: WatchedState,
        host: Host,
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._warm_ups = warm_ups
        self._bind = bind
        self._enlist = enlist
        self._state = state
        self._host = host
        self._doors = SideDoors()
        # Whether a capture in pieces is still to come. No other asks what eager parts have made,
        # and to see that takes longer than small operators do.
        self.has_doors = True
        self._streams = StreamLedger(pool.platform, warm_ups.breaks)

    def capture(self, graph: PlannedGraph, transaction: CaptureTransaction) -> GraphRecord:
        """Warm up and capture one graph, in `transaction`, which can take it back."""
        pool, platform = self._pool, self._pool.platform
        started, before = time.perf_counter(), pool.bytes()
        key = graph.mode, graph.descriptor
        self._streams.check(*key, None)
        new = self._warm_ups.count > 0 and self._state.is_new(graph.descriptor.kind)
        warm = new or self._warm_ups.needed(graph)
        if warm:
            self._warm_up(graph)
        transaction.work = self._streams.check(*key, self._warm_ups.kind(graph))
        outside, room = platform.driver_bytes(), self._streams.room()
        try:
            self._attempt(graph, transaction)
        except ResourceExhaustedError as error:
            if isinstance(error, StreamBudgetError):
                self._streams.failed(*key, room)
            raise
        except Exception:
            if warm or not self._warm_ups.count:
                raise
            transaction.rollback()
            self._warm_up(graph)
            self._attempt(graph, transaction)
        return GraphRecord(
            graph.mode,
            graph.descriptor,
            time.perf_counter() - started,
            _growth(before, pool.bytes()),
            _growth(outside, platform.driver_bytes()),
            self._streams.took(*key, room),
        )

    def _warm_up(self, graph: PlannedGraph) -> None:
        try:
            for _ in range(self._warm_ups.count):
                self._bind(graph.step, "warmup")
                self._run(graph, GraphMode.NONE, None)
        except Exception as error:
            # Nobody has explained it: the device may just have no room for this size.
            if not isinstance(error, GraphRTError):
                explained = self._pool.platform.explain(error)
                if isinstance(explained, ResourceExhaustedError):
                    raise explained from error
            raise
        self._warm_ups.done(graph)

    def _attempt(self, graph: PlannedGraph, transaction: CaptureTransaction) -> None:
        self._bind(graph.step, "capture")
        try:
            self._run(graph, graph.mode, transaction)
        except PageableCopyError:
            if transaction.lifts_constants:
                raise
            transaction.rollback()
            transaction.lifts_constants = self._warm_ups.lifts_constants = True
            self._attempt(graph, transaction)

    def _run(
        self, graph: PlannedGraph, mode: GraphMode, transaction: CaptureTransaction | None
    ) -> None:
        context = ForwardContext(
            mode,
            graph.descriptor,
            updates=WORST_CASE,
            metadata=self._host.at_bound(graph.descriptor),
            capture=transaction,
            num_reqs=graph.step.reqs,
        )
        context.enlist = self._enlist
        undo = Undo()
        try:
            undo.later(self._state.restore)
            undo.later(partial(self._pool._pass_to, self._owner))
            self._pool._pass_to(context)
            undo.later(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            torch.set_grad_enabled(False)
            undo.later(partial(warming_up.set, warming_up.get()))
            warming_up.set(transaction is None)
            undo.later(partial(side_doors.set, side_doors.get()))
            side_doors.set(self._doors if self.has_doors else None)
            undo.later(partial(under_way.discard, id(context)))
            under_way.add(id(context))
            undo.later(context.leave)
            call = partial(graph.step.call, **graph.step.fresh_arguments())
            with context:
                if transaction is None:
                    outputs = self._state.run(
                        graph.descriptor.kind,
                        graph.step.tokens,
                        graph.step.storages(),
                        partial(self._streams.count, self._warm_ups.kind(graph), call),
                    )
                    graph.step.check_written(self._state.inputs_written)
                else:
                    outputs = self._state.capture(
                        graph.descriptor.kind, graph.mode, graph.step.tokens, call
                    )
                    self._state.look()
                graph.step.see(outputs)
            undo.now()
        except BaseException:
            undo.now()
            raise


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
