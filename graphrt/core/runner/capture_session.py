"""How the graphs of a runner are captured, and when.

`CaptureScheduler` says which: all that are missing, a few at a time, or the one that a step misses.
`CaptureSession` captures them, and undoes each that fails. `StreamLedger` counts the streams that
they take. `graphrt.CaptureSession`, of `GraphPool.capture_session()`, is another class: it is for
hosts that capture piece by piece.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, note, undoing
from graphrt.core.base.errors import (
    GraphRTError,
    PageableCopyError,
    ResourceExhaustedError,
    StreamBudgetError,
)
from graphrt.core.base.homes import public
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import check_takes
from graphrt.core.base.texts import counted, seconds_text
from graphrt.core.batch.context import CaptureTransaction, ForwardContext
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.device.contract import GraphWork, StreamRoom
from graphrt.core.device.platform import Platform
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.inputs.declared import flat_of
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay.recording import enter_under_way, freeze_garbage, thaw_garbage, warming_up
from graphrt.core.replay.tasks import WORST_CASE
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.graph_table import (
    GraphRecord,
    GraphTable,
    PlannedGraph,
    PreparedStep,
    tell_dropped,
)
from graphrt.core.runner.host import Phase
from graphrt.core.runner.trials import try_examples
from graphrt.core.trust.warm_up import WatchedState
from graphrt.core.trust.watching.watch import WorkCount

Progress = Callable[[int, int, BatchDescriptor], None]
"""Told how many graphs are done, of how many, and which one comes next (at the end: the last)."""

_WIDTH = 24
"""Of a bar, in characters."""

Before = Callable[[int, CaptureKey], None]
"""Told before each graph how many are done, and its key."""


@public("graphrt.types")
@dataclass(frozen=True)
class CaptureProgress:
    """The result of one `capture_next()`.

    `captured` is what was captured in this call, `left` how many graphs are still to be tried.
    """

    captured: tuple[GraphRecord, ...]
    left: int


class ProgressBar:
    """Rewrites one line of a terminal before each graph, and ends it after the last."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """The bar is written to `stream`, by default to stderr where that is a terminal."""
        if stream is None and sys.stderr.isatty():
            stream = sys.stderr
        self._stream = stream
        self._began = time.perf_counter()
        self._written = 0

    def __call__(self, done: int, total: int, descriptor: BatchDescriptor, more: str = "") -> None:
        """See `graphrt.GraphRunner.capture`; `more` is what somebody else knows of the capture."""
        if self._stream is None:
            return
        took = seconds_text(time.perf_counter() - self._began) + (f", {more}" if more else "")
        line, end = f"captured {counted(total, 'graph')} in {took}", "\n"
        if done < total:
            bar = "#" * (_WIDTH * done // total)
            line, end = f"[{bar:.<{_WIDTH}}] {done}/{total}, next: {descriptor}, {took}", ""
        # What a longer line before it has left is written over.
        self._stream.write(f"\r{line:<{self._written}}{end}")
        self._stream.flush()
        self._written = len(line)


def progress_of(progress: Progress | bool | None) -> Progress | None:
    """What is called for `capture(progress=)`. Raises `InvalidOptionError`."""
    if progress is None or isinstance(progress, bool):
        return ProgressBar() if progress else None
    check_takes("progress", progress, "progress(done, total, descriptor)")
    return progress


class CaptureScheduler:
    """Captures the planned graphs that the dispatcher does not serve yet, then seals.

    Every method is called in a turn of the graphs' owner. Each call makes a new `CaptureSession`:
    between two of them steps change the state that a session saves.
    """

    def __init__(self, executor: StepExecutor) -> None:
        self._graphs = executor.graphs
        self._setup = executor.graphs.setup
        self._executor = executor
        # Whether captures look at every operator for constants that are made on the host. That
        # takes time, and most forwards make none: a first capture that needs it is made again.
        self.lifts_constants = False

    def all(self, progress: Progress | None) -> None:
        """Capture every missing graph, those too that were dropped or have failed before."""
        graphs = self._graphs
        graphs.left_out.clear()
        before = len(graphs.records)
        keys = graphs.missing(self._setup.plan.capture_order())
        self._agree_on(keys)

        def tell(done: int, key: CaptureKey) -> None:
            if progress is not None:
                progress(done, len(keys), key[1])

        CaptureSession(graphs, self).run(keys, tell)
        if keys:
            tell(len(keys), keys[-1])
        self._finish()
        new = graphs.records[before:]
        logger.info("captured %d graphs in %.2f s", len(new), sum(each.capture_s for each in new))

    def next(self) -> CaptureProgress:
        """Capture one graph; seal after the last."""
        graphs, left = self._graphs, self._left()
        before = len(graphs.records)
        self._agree_on(left[:1])
        if left:
            # Before the graph is tried, it is not to blame.
            tried: list[CaptureKey] = []
            try:
                session = CaptureSession(graphs, self)
                session.run(left[:1], lambda _, key: tried.append(key), more=True)
            except Exception:
                self._leave_out(graphs.missing(tried))
                raise
            left = self._left()
        elif not self._setup.plan.keys and not graphs.sealing.closed:
            # Modules that compile themselves have to, and are sealed.
            CaptureSession(graphs, self).run(())
        captured = tuple(graphs.records[before:])
        if not left and (captured or not graphs.sealing.closed):
            graphs.checks.captured(graphs.dispatcher.published)
            try:
                self._finish()
            except Exception:
                if not graphs.sealing.closed:
                    # A trial has failed, and would fail again: nothing more is captured until
                    # `release()`.
                    self._leave_out(self._setup.plan.keys)
                raise
        return CaptureProgress(captured, len(left))

    def for_step(
        self, batch: Batch, dispatch: Dispatch, values: Mapping[str, Any], agreed: Agreed | None
    ) -> tuple[Dispatch, Mapping[str, Any]]:
        """With `GraphOptions(lazy=True)` capture the missing graph that would serve a step better
        than its dispatch says; a failing one only once. Returns how the step is dispatched then,
        and its inputs, out of the reach of the capture."""
        graphs = self._graphs
        wanted = graphs.dispatcher.planned_for(batch, agreed=agreed)
        if wanted is None or (dispatch.slot >= 0 and not preferred(wanted, dispatch)):
            return dispatch, values
        if wanted.slot in graphs.left_out or graphs.checks.glances.changed_settings():
            return dispatch, values
        # The capture fills the buffers, in which inputs may lie; and inputs may be outputs of the
        # last step, which ran on another stream.
        self._setup.pool.streams.follow()
        values = tree.cloned(dict(flat_of(values)))
        try:
            CaptureSession(graphs, self).run([(wanted.mode, wanted.descriptor)])
        except Exception:
            self._leave_out([(wanted.mode, wanted.descriptor)])
            raise
        return graphs.dispatcher.dispatch(batch, agreed=agreed), values

    def _agree_on(self, keys: Sequence[CaptureKey]) -> None:
        """With `Host(ranks=)` raise where another rank is to capture others than these."""
        ranks = self._setup.host.ranks
        if ranks is not None:
            wanted = [f"{mode.name} [{descriptor}]" for mode, descriptor in keys]
            ranks.agree_on_captures(self._graphs, wanted)

    def _finish(self) -> None:
        """Seal the graphs, as complete as they get, and try them."""
        graphs, setup = self._graphs, self._setup
        graphs.seal()
        if graphs.dropped:
            tell_dropped(graphs.dropped, len(setup.plan.keys), strict=setup.options.strict)
        if setup.host.example is not None:
            try_examples(self._executor, setup.host.example, graphs.release)

    def _leave_out(self, keys: Iterable[CaptureKey]) -> None:
        for key in keys:
            self._graphs.left_out.setdefault(self._graphs.dispatcher.reserve(*key))

    def _left(self) -> list[CaptureKey]:
        """The graphs still to be tried, in the plan's order."""
        graphs = self._graphs
        missing = graphs.missing(self._setup.plan.capture_order())
        return [key for key in missing if graphs.dispatcher.reserve(*key) not in graphs.left_out]


class CaptureSession:
    """Captures some graphs of a runner, in a turn of the pool.

    1. Compiled modules that are not compiled yet run once, and compile.
    2. Each graph: the forward is warmed up on padding (the first of its
       kind is watched) unless a graph of another mode has run it on the same
       inputs, captured in a transaction, and the graph is published.
    3. The batch axes of outputs are found, if need be by eager runs at other sizes; then the
       tensors that graphs read, and the steps to check.

    The forward's state is put back after each of its runs. A graph that fails is taken back and the
    error raised; those before it serve. A graph that the device has no room for is dropped:
    smaller ones after it may fit.
    """

    def __init__(self, graphs: GraphTable, scheduler: CaptureScheduler) -> None:
        setup = self._setup = graphs.setup
        self._graphs = graphs
        self._scheduler = scheduler
        # Steps on another stream may still use the state that is saved.
        setup.pool.streams.follow()
        platform, limit = setup.pool.platform, setup.options.state_limit(setup.pool.platform)
        self._state = WatchedState(
            setup.host.state,
            limit_bytes=limit,
            reads=graphs.reads if graphs.reads.watched else None,
            warmed_up=graphs.warmed_up,
            pads=setup.inputs.declared.addresses,
            device_type=platform.device_type,
            is_in_graphs=partial(platform.owns, setup.pool.memory),
            has_parts=setup.plan.mode.has_piecewise,
        )
        self._streams = StreamLedger(setup.pool.platform, setup.options.breaks)
        # The work of warm-ups that graphs of another mode need not run again, by their inputs.
        self._warm: dict[Hashable, GraphWork | None] = {}
        self._doors = SideDoors()
        # Whether a PIECEWISE capture is still to come: only those ask what eager parts have made,
        # and watching for that takes longer than small operators do.
        self._has_doors = False

    @undoing
    def run(
        self,
        undo: Undo,
        keys: Sequence[CaptureKey],
        before: Before = lambda done, key: None,
        *,
        more: bool = False,
    ) -> None:
        """Capture and publish the graphs of `keys` in their order; whether `more` are to come in
        other sessions."""
        setup, graphs = self._setup, self._graphs
        graphs.destroy_leftovers()
        if graphs.records:
            # Graphs that are captured already read the old addresses.
            graphs.reads.check_named()
            graphs.checks.check_settings()
            # At its end what is there then counts as there at the capture of all.
            graphs.checks.look_at_host()
        for module in setup.compiled:
            module.rebind_weights()
        uncompiled = [module for module in setup.compiled if not module.compiled]
        for module in uncompiled:
            module.unseal()
        if not keys and not uncompiled:
            return
        undo.later(setup.inputs.reset)
        undo.later(setup.pool.streams.follow)
        # The host's numbers go on where they were; those of a device are not restored.
        undo.later(partial(torch.set_rng_state, torch.get_rng_state()))
        with setup.host.around_capture():
            # Warm-ups write what the steps before may be reading still, on whichever stream.
            setup.pool.streams.follow()
            if uncompiled:
                # Of all rows, where no graph is planned.
                rows = BatchDescriptor(setup.inputs.tokens, setup.inputs.reqs)
                self._run(self._graph(*(keys or [(GraphMode.NONE, rows)])[0]))
            if not graphs.records:
                graphs.reads.record()
            if keys:
                undo.later(partial(thaw_garbage, self))
                freeze_garbage(self)
                self._capture(keys, before, more=more)

    def _capture(self, keys: Sequence[CaptureKey], before: Before, *, more: bool) -> None:
        """Capture the graphs; after a failure serve those before it if it is known how."""
        try:
            for done, key in enumerate(keys):
                before(done, key)
                self._has_doors = any(mode is GraphMode.PIECEWISE for mode, _ in keys[done:])
                self._capture_or_drop(key)
            self._settle(more=more)
        except BaseException as error:
            try:
                self._settle(more=more, probes=isinstance(error, Exception))
            except Exception as second:
                self._graphs.release()
                note(error, f"no graph serves, as their outputs are unknown: {second}")
            raise

    def _capture_or_drop(self, key: CaptureKey) -> None:
        graph = self._graph(*key)
        try:
            self._capture_one(graph)
        except ResourceExhaustedError as error:
            self._graphs.drop(graph, error)
        except BaseException as error:
            note(error, f"while capturing {graph}")
            raise

    @undoing
    def _capture_one(self, undo: Undo, graph: PlannedGraph) -> None:
        """Capture and publish a graph; if that raises, it is whole or gone."""
        # Once more: there may have been no room to put the state back.
        undo.after_error(self._state.restore)
        undo.after_error(self._graphs.destroy_leftovers)
        for span in self._graphs.spans:
            undo.enter(span("capture", str(graph)))
        self._graphs.begin(graph)
        self._graphs.publish(graph, self._captured(graph))

    def _captured(self, graph: PlannedGraph) -> GraphRecord:
        """Warm up and capture one graph, in its transaction, which can take it back."""
        pool, transaction = self._setup.pool, graph.transaction
        started, before = time.perf_counter(), pool.bytes()
        if self._setup.owns_pool and not self._graphs.records:
            before = 0
        self._streams.check(graph)
        warm_up_s, work = self._warm_up(graph)
        is_cold = not self._setup.options.warmups
        transaction.lifts_constants |= is_cold or self._graphs.reads.are_on_host()
        # Without checks no generator of the forward's own is noted.
        is_noted = not is_cold and self._graphs.reads.watched
        transaction.may_draw = not is_noted or self._state.has_drawn
        transaction.work = work
        self._streams.check(graph, work)
        outside = pool.platform.driver_bytes()
        try:
            self._attempt(graph)
        except ResourceExhaustedError as error:
            if isinstance(error, StreamBudgetError):
                self._streams.failed(graph)
            raise
        except Exception as error:
            if is_cold or warm_up_s:
                raise
            # What the warm-up that it shares had prepared may be gone: a table of the last size. A
            # forward that cannot be captured at all raises again below.
            logger.info("%s is warmed up by itself, as its capture failed: %s", graph, error)
            transaction.rollback()
            self._warm.clear()
            warm_up_s, _ = self._warm_up(graph)
            self._attempt(graph)
        return GraphRecord(
            graph.mode,
            graph.descriptor,
            time.perf_counter() - started,
            _growth(before, pool.bytes()),
            _growth(outside, pool.platform.driver_bytes()),
            self._streams.took(graph),
            warm_up_s,
            started,
        )

    def _warm_up(self, graph: PlannedGraph) -> tuple[float, GraphWork | None]:
        """Run the forward as often as the options say; returns the seconds it took, and the work
        that the last run issued where the device asks for it. A graph of another mode may have run
        it on the same inputs already."""
        prepared, state, host = graph.prepared, self._state, self._setup.host
        inputs = graph.descriptor.serves, prepared.tokens, prepared.reqs
        if inputs in self._warm and state.is_known(graph.descriptor.kind, prepared.tokens):
            work = self._warm[inputs]
            in_pieces = graph.mode is GraphMode.PIECEWISE
            return 0.0, None if work is None else replace(work, in_pieces=in_pieces)
        began, work = time.perf_counter(), None
        try:
            for _ in range(self._setup.options.warmups):
                count = self._streams.counter(graph)
                self._run(graph, kind=graph.descriptor.kind, count=count)
                work = None if count is None else count.work
        except Exception as error:
            # Nobody has explained it: the device may just have no room for this size.
            if not isinstance(error, GraphRTError):
                explained = self._setup.pool.platform.explain(error)
                if isinstance(explained, ResourceExhaustedError):
                    raise explained from error
            raise
        # Hooks are told the descriptor, and may choose kernels by it. What one size alone writes is
        # saved until the next one runs.
        if host.bind is None and host.metadata is None and not state.is_of_one_graph:
            self._warm[inputs] = work
        return time.perf_counter() - began, work

    def _attempt(self, graph: PlannedGraph) -> None:
        try:
            self._run(graph, graph.transaction)
        except PageableCopyError:
            if graph.transaction.lifts_constants:
                raise
            graph.transaction.rollback()
            graph.transaction.lifts_constants = self._scheduler.lifts_constants = True
            self._attempt(graph)

    @undoing
    def _run(
        self,
        undo: Undo,
        graph: PlannedGraph,
        transaction: CaptureTransaction | None = None,
        *,
        kind: Hashable = None,
        count: WorkCount | None = None,
    ) -> None:
        """Run the forward on padding: in `transaction`, or a warm-up of a `kind`, counted."""
        prepared, state, setup = graph.prepared, self._state, self._setup
        pool, inputs, host = setup.pool, setup.inputs, setup.host
        # Outputs of the step before may be in the buffers.
        pool._expire_outputs()
        # Every row becomes padding.
        inputs.reset(prepared.layout)
        if prepared.ring is not None and transaction is not None:
            # Its graph is to fetch what is in the buffers already.
            assert prepared.layout.fetch is not None
            prepared.ring.expect_capture(prepared.layout.fetch)
        if host.bind is not None:
            phase: Phase = "warmup" if transaction is None else "capture"
            host.bind(prepared.readable, graph.descriptor, phase)
        context = ForwardContext(
            GraphMode.NONE if transaction is None else graph.mode,
            graph.descriptor,
            updates=WORST_CASE,
            metadata=None if host.metadata is None else host.metadata(graph.descriptor),
            capture=transaction,
            num_reqs=prepared.reqs,
        )
        context.enlist = setup.enlist
        undo.later(state.restore)
        undo.later(partial(setattr, pool, "owner", self._graphs.setup.owner))
        pool.owner = context
        undo.later(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(False)
        undo.set(warming_up, transaction is None)
        undo.set(side_doors, self._doors if self._has_doors else None)
        enter_under_way(undo, context)
        undo.later(context.leave)

        def calls() -> Callable[[], Any]:
            call = partial(prepared.call, **prepared.arguments(fresh=True))
            return call if count is None else partial(count.run, call)

        with context:
            if transaction is None:
                outputs = state.run(kind, prepared.tokens, graph.transaction.fixed, calls)
                prepared.check_written(state.inputs_written)
            else:
                outputs = state.capture(
                    graph.descriptor.kind,
                    graph.mode,
                    prepared.tokens,
                    calls(),
                    in_one=graph.mode in self._graphs.wrappers,
                )
                state.look()
            prepared.outputs.see(outputs)

    def _settle(self, *, more: bool, probes: bool = True) -> None:
        """Find the batch axes of the outputs, with `probes` by eager runs if need be, and prepare
        the steps that hand them out; then find the tensors that graphs read, and note which steps
        to check."""
        setup, graphs = self._setup, self._graphs
        self._has_doors = False
        resolve = partial(setup.outputs.resolve, query_len=setup.query_len)
        if probes:
            self._state.settle(partial(resolve, self._probe))
        else:
            resolve(None)
            if graphs.reads.watched:
                graphs.reads.settle()
        published = graphs.dispatcher.published
        graphs.checks.captured(published, more=more)
        for dispatch in published:
            prepared = graphs.steps[dispatch.slot]
            if prepared is not None:
                prepared.hold()

    @undoing
    def _probe(self, undo: Undo, tokens: int, reqs: int) -> None:
        """Run one eager step of a size that no graph need have, and note what it returns."""
        query_len = self._setup.query_len
        rows = BatchDescriptor(tokens, reqs, query_len is not None, query_len=query_len)
        # `_run` may have failed in this very call, and `OutputLayout.resolve` continues after
        # errors: restore again.
        undo.after_error(self._state.restore)
        self._run(self._graph(GraphMode.NONE, rows))

    def _graph(self, mode: GraphMode, descriptor: BatchDescriptor) -> PlannedGraph:
        """The graph of a key, or, under NONE, an eager step of this size."""
        setup, graphs = self._setup, self._graphs
        slot = -1 if mode is GraphMode.NONE else graphs.dispatcher.reserve(mode, descriptor)
        # Pieces that the forward brings along itself are reached by running it.
        wrapper = graphs.wrappers.get(mode)
        prepared = PreparedStep(descriptor, setup, wrapper)
        transaction = CaptureTransaction(
            slot,
            prepared.storages(),
            metadata_is_declared=setup.host.metadata is not None,
            lifts_constants=self._scheduler.lifts_constants,
        )
        return PlannedGraph(mode, descriptor, slot, prepared, transaction)


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


class StreamLedger:
    """How many of the device's streams a graph of each mode and kind takes: counted in the warm-up,
    then measured around the last capture. Where the device does not tell, nothing is refused.

    A capture that runs out of streams in its middle may cost the process: see the platform.
    """

    def __init__(self, platform: Platform, breaks: tuple[str, ...] = ()) -> None:
        self._platform = platform
        self._breaks = frozenset(breaks)
        room = platform.stream_room()
        # The platform's reserve as of the session's beginning: it may shrink with what is free.
        self._reserve = 0 if room is None else room.reserve
        self.counts = room is not None
        self._before: StreamRoom | None = None
        self._needs: dict[Hashable, tuple[int, str]] = {}

    def counter(self, graph: PlannedGraph) -> WorkCount | None:
        """For the work of a warm-up of this graph, where the device tells of streams."""
        if not self.counts:
            return None
        count = WorkCount(self._platform.stream_id_reader(), self._breaks)
        count.work.in_pieces = graph.mode is GraphMode.PIECEWISE
        return count

    def check(self, graph: PlannedGraph, work: GraphWork | None = None) -> None:
        """Before a graph, and after its warm-up, which issued this `work`; without it nothing is
        known of the first graph of a kind.

        Raises `StreamBudgetError` if the graph will take more streams than it may.
        """
        room = self._before = self._room()
        needed = self._needs.get((graph.mode, graph.descriptor.kind))
        if needed is None and work is not None:
            needed = self._platform.streams_needed(work), "at most, by what its warm-up issued"
        if room is not None and needed is not None and needed[0] > room.usable:
            raise self._too_few(*needed, room)

    def took(self, graph: PlannedGraph) -> int | None:
        """Note what a graph took since `check`, and return it; raises `StreamBudgetError` if that
        is of what must stay free."""
        before, after = self._before, self._room()
        if before is None or after is None:
            return None
        taken = max(0, before.free - after.free)
        self._needs[graph.mode, graph.descriptor.kind] = taken, f"as many as {graph} took"
        if after.free < after.reserve:
            raise self._too_few(taken, "found at its end", before)
        return taken

    def failed(self, graph: PlannedGraph) -> None:
        """Note that a graph ran out of streams after its capture had begun."""
        if self._before is not None:
            needed = self._before.usable + 1, f"more than {graph} found"
            self._needs[graph.mode, graph.descriptor.kind] = needed

    def _room(self) -> StreamRoom | None:
        room = self._platform.stream_room() if self.counts else None
        return None if room is None else StreamRoom(room.free, self._reserve)

    def _too_few(self, needed: int, why: str, room: StreamRoom) -> StreamBudgetError:
        kept = f", {room.reserve} of them kept in reserve" if room.reserve else ""
        return StreamBudgetError(
            "the device has too few free streams for this graph",
            got=f"{room.free} free{kept}",
            expected=f"{needed} ({why})",
            advice="capture fewer sizes or fewer pieces; what is captured serves",
        )
