"""How the graphs of a runner are captured, and when.

`capture_all`, `capture_outdated`, `capture_next` and `capture_for_step` say which: all that are
missing, those that went, one of them, or the one that a step misses. `RunnerCapture` captures them,
and undoes each that fails. `StreamLedger` counts the streams that they take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from graphrt.core.base import errors, tree
from graphrt.core.base._undo import Undo, note, undoing
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import context_of
from graphrt.core.base.texts import counted, error_text
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture import refusals
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.device.contract import (
    Capability,
    EndedCaptureError,
    FirstCallError,
    GraphWork,
)
from graphrt.core.dispatch.ladders import preference
from graphrt.core.dispatch.reasons import Agreed
from graphrt.core.plan.sizes import CaptureKey, largest_of
from graphrt.core.replay.entry import graphs_of
from graphrt.core.replay.recording import enter_under_way, freeze_garbage, warming_up
from graphrt.core.replay.tasks import WORST_CASE
from graphrt.core.runner import graph_table
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.host import Phase
from graphrt.core.runner.streams import StreamLedger, WorkCount

Progress = Callable[[int, int, BatchDescriptor], None]
"""Told how many graphs are done, of how many, and which one comes next (at the end: the last)."""

Choose = Callable[[graph_table.GraphTable, Sequence[CaptureKey]], CaptureKey]
"""Says which of the missing graphs is captured next."""

_MOST_FAILURES = 2
"""After so many captures of a kind that had to be repeated, its further graphs are warmed up."""

_MANY = 1 << 30
"""More blocks than a capture leaves."""


@dataclass(frozen=True)
class CaptureProgress:
    """The result of one `capture_next()`.

    `captured` is what was captured in this call, `left` how many graphs further calls would try. It
    is true while some are left. `ready` says that the largest and the smallest graph of each mode
    are there, or left out.
    """

    captured: tuple[graph_table.GraphRecord, ...]
    left: int
    ready: bool = False

    def __bool__(self) -> bool:
        return self.left > 0


# Each of these is called in a turn of the pool, and makes a new `RunnerCapture`: steps between two
# calls change the state that it saves.


def capture_all(executor: StepExecutor, progress: Progress | None) -> None:
    """Capture every missing graph that is not left out; then seal."""
    graphs = executor.graphs
    _capture_session(graphs, graphs.missing(left=True), progress)
    _finish(executor)


def capture_outdated(executor: StepExecutor, progress: Progress | None) -> None:
    """Destroy the graphs that may be wrong by now, and capture again all that were there and went.
    Seal if that was so before, or none is missing: else steps and `capture_next()` go on."""
    graphs = executor.graphs
    sealed = graphs.sealing.closed
    graphs.release_outdated()
    keys = graphs.lost()
    sealed = sealed or len(keys) == len(graphs.missing(left=True))
    lazy = graphs.sealing.may_capture and not sealed
    _capture_session(graphs, keys, progress, for_step=lazy, more=not (sealed or lazy))
    if sealed:
        _finish(executor)


def _capture_session(
    graphs: graph_table.GraphTable,
    keys: Sequence[CaptureKey],
    progress: Progress | None,
    *,
    for_step: bool = False,
    more: bool = False,
) -> None:
    _agree_on(graphs, keys)
    RunnerCapture(graphs, for_step=for_step).run(keys, progress, more=more)
    if keys and progress is not None:
        progress(len(keys), len(keys), keys[-1][1])


def capture_next(executor: StepExecutor, choose: Choose | None = None) -> CaptureProgress:
    """Capture one graph, the first that is missing or what `choose` says; seal after the last."""
    graphs = executor.graphs
    before, missing = len(graphs.records), graphs.missing(left=True)
    keys = [choose(graphs, missing)] if choose is not None and missing else missing[:1]
    _agree_on(graphs, keys)
    # A plan without graphs has no keys, and its compiled modules still have to compile, once.
    if keys or not (graphs.setup.plan.keys or graphs.sealing.closed):
        RunnerCapture(graphs).run(keys, more=bool(keys))
    captured, left = tuple(graphs.records[before:]), graphs.missing(left=True)
    # At the last graph, or if nothing is sealed yet: a further call neither warns nor tries again.
    if not left and (captured or not graphs.sealing.closed):
        graphs.checks.captured(graphs.dispatcher.published)
        _finish(executor)
    return CaptureProgress(captured, len(left))


def capture_for_step(
    graphs: graph_table.GraphTable,
    batch: Batch,
    values: Mapping[str, Any],
    agreed: Agreed | None,
) -> Mapping[str, Any]:
    """With `GraphOptions(lazy=True)` capture the missing graph that would serve a step better than
    those that are there; a failing one only once. Returns the step's inputs: after a capture, which
    may overwrite them, copies. The dispatch that follows counts the step. Under a limit the largest
    of each mode come first, and what this needs is told by `GraphLimit.admits`, for ranks before
    their vote."""
    limit, dispatch = graphs.limit, graphs.dispatcher.peek(batch, agreed=agreed)
    wanted = graphs.dispatcher.planned_for(batch, agreed=agreed)
    if wanted is None or (dispatch.slot >= 0 and preference(wanted) >= preference(dispatch)):
        if limit is not None and dispatch.slot >= 0:
            limit.asked.append((dispatch.mode, dispatch.descriptor))
        return values
    if wanted.slot in graphs.left_out or graphs.checks.changed_settings():
        return values
    keys = [(wanted.mode, wanted.descriptor)]
    if limit is not None:
        if agreed is None and not limit.admits(keys[0]):
            return values
        largest = largest_of(graphs.setup.plan.keys)
        keys = [key for key in graphs.missing(left=True) if key in largest] or keys
    # The capture fills the buffers, which the inputs may be views of. They may also be outputs of
    # the last step, on another stream: wait for it. `check` refuses freed memory, of which a copy
    # would end the process.
    graphs.setup.pool.streams.follow()
    declared = graphs.setup.inputs.declared
    values = tree.cloned(declared.check(values, batch.num_tokens, batch.num_reqs))
    try:
        RunnerCapture(graphs, for_step=True).run(keys)
    except Exception:
        graphs.leave_out(keys)
        graphs.dispatcher.dispatch(batch, agreed=agreed)  # this step counts too
        raise
    return values


def _agree_on(graphs: graph_table.GraphTable, keys: Sequence[CaptureKey]) -> None:
    """With `Host(ranks=)` raise where another rank is to capture others than these."""
    ranks = graphs.setup.host.ranks
    if ranks is not None:
        wanted = [f"{mode.name} [{descriptor}]" for mode, descriptor in keys]
        ranks.agree_on_captures(graphs, wanted)


def _finish(executor: StepExecutor) -> None:
    """Seal the graphs, as complete as they get, and try them."""
    graphs, setup = executor.graphs, executor.graphs.setup
    graphs.seal()
    if graphs.limit is not None:
        beyond = counted(len(graphs.missing()) - len(graphs.dropped), "graph")
        logger.info("captured %s; %s left out", graphs.limit.report(), beyond)
    if graphs.dropped:
        _tell_dropped(graphs)
    if setup.plan.is_measured:
        plan = graphs.plan()
        logger.info("captured %s", next(each for each in plan.lines() if each.startswith("in all")))
        if setup.options.strict:
            plan.refuse_less()
    if setup.host.example is not None:
        try:
            graphs.checks.try_examples(executor, setup.host.example)
        except Exception:
            # A trial would fail again: `capture_next()` tries no graph until `release()`.
            graphs.leave_out(setup.plan.keys)
            raise


def _tell_dropped(graphs: graph_table.GraphTable) -> None:
    """Warn of graphs that did not fit on the device; with `strict` raise
    `ResourceExhaustedError`. Of each reason the first graph is named."""
    setup, dropped = graphs.setup, graphs.dropped
    what = f"{len(dropped)} of {len(setup.plan.keys)} graphs did not fit on the device"
    first = {each.reason: f"{each.mode.name} [{each.descriptor}]" for each in reversed(dropped)}
    lines = "".join(
        f"\n  {graph}: {'; '.join(map(str.strip, reason.splitlines()))}"
        for reason, graph in first.items()
    )
    if setup.options.strict:
        raise errors.ResourceExhaustedError(
            what,
            got=lines,
            expected="every planned graph (strict=True)",
            advice="capture fewer sizes, or leave the KV cache less memory; what is captured "
            "serves",
        )
    errors.warn_caller(
        f"{what}, and batches that no other serves run eagerly:{lines}", errors.GraphsDroppedWarning
    )


class RunnerCapture:
    """Captures some graphs of a runner, in a turn of the pool.

    1. Compiled modules that are not compiled yet run once, and compile.
    2. Each graph: the forward is warmed up on padding (the first of its kind is watched), captured
       in a transaction, and the graph is published. Where failures cost nothing, only the first of
       a kind is warmed up, and others whose capture has failed.
    3. The batch axes of outputs are found, if need be by eager runs at other sizes; then the
       tensors that graphs read, and the steps to check.

    The forward's state is put back after each of its runs. A graph that fails is taken back and the
    error raised; those before it serve. A graph that the device has no room for is dropped:
    smaller ones after it may fit.
    """

    def __init__(self, graphs: graph_table.GraphTable, *, for_step: bool = False) -> None:
        """Under a limit graphs `for_step` take the places of others; else a session stops there."""
        setup = self._setup = graphs.setup
        self._graphs = graphs
        self._for_step = for_step
        # Steps on another stream may still use the state that is saved.
        setup.pool.streams.follow()
        # Runs warm-ups and captures of the forward, and puts its state back after each.
        self._state = graphs.checks.runs(setup)
        self._streams = StreamLedger(setup.pool.platform, setup.options.breaks)
        # The modes in which further sizes of a kind are captured first, and warmed up only if that
        # fails. With ranks a failure is voted on, but not while others wait in the collectives of
        # segments that have run.
        can_fail = Capability.FREE_FAILURES in setup.pool.platform.capabilities
        tries = can_fail and setup.options.warmups is None
        can_agree = setup.host.ranks is not None and not setup.pool.platform.capture_executes
        self._tried = {
            mode
            for mode in (GraphMode.FULL, GraphMode.PIECEWISE)
            if tries and (not _has_ranks() or (can_agree and mode is GraphMode.FULL))
        }
        # The seconds of the warm-ups of the graph under way.
        self._warm_up_s = 0.0
        # Notes which tensors eager parts have made. Only PIECEWISE captures ask for it; to watch an
        # operator takes longer than a small operator does.
        watches = setup.plan.mode.has_piecewise and setup.options.checks("capture")
        self._doors = SideDoors() if watches else None

        # The query length, where all graphs have the same one.
        lengths = {descriptor.query_len for _, descriptor in setup.plan.keys}
        self._query_len = lengths.pop() if len(lengths) == 1 else None

    @undoing
    def run(
        self,
        undo: Undo,
        keys: Sequence[CaptureKey],
        progress: Progress | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Capture and publish the graphs of `keys` in their order. `more` says that other sessions
        will capture graphs too: none of these is then taken for the largest or smallest."""
        setup, graphs = self._setup, self._graphs
        had_graphs = bool(graphs.begun)
        graphs.destroy_leftovers()
        if had_graphs and not graphs.begun:
            # The pool has destroyed them all: what they read, such as an old KV cache, is no more.
            graphs.release()
        if graphs.begun:
            # Graphs that are captured already read the old addresses.
            graphs.checks.check_named(graphs.named)
            changed = graphs.checks.changed_settings()
            if changed:
                raise changed
            # At its end the session notes the Python state as that of all graphs. Without this look
            # a change by the host since the older captures would never be found.
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
        undo.later(self._state.state.generators.restore)
        with context_of("around_capture", setup.host.around_capture):
            # Warm-ups write what the steps before may be reading still, on whichever stream.
            setup.pool.streams.follow()
            if uncompiled:
                # At the largest size, where no graph is planned.
                rows = BatchDescriptor(setup.inputs.tokens, setup.inputs.reqs)
                key = (keys or [(GraphMode.NONE, rows)])[0]
                self._compile(graph_table.PreparedStep(graphs, *key))
            if not graphs.records:
                graphs.named.record()
            if keys:
                freeze_garbage(undo, self)
                self._capture(keys, progress, more=more)

    def _compile(self, graph: graph_table.PreparedStep) -> None:
        """Run the forward once, which compiles its modules."""
        try:
            self._run(graph)
        except BaseException as error:
            refusals.note_place(error, str(graph))
            raise

    def _capture(
        self, keys: Sequence[CaptureKey], progress: Progress | None, *, more: bool
    ) -> None:
        """Capture the graphs. After a failure those before it serve, unless their outputs' axes
        stay unknown."""
        # After an error `capture_next()` leaves these out, and tries those behind them.
        tried: list[CaptureKey] = []
        try:
            for key in keys:
                if progress is not None:
                    progress(len(tried), len(keys), key[1])
                tried.append(key)
                self._capture_or_drop(graph_table.PreparedStep(self._graphs, *key))
            self._settle(more=more)
        except BaseException as error:
            try:
                self._settle(more=more, probes=isinstance(error, Exception))
            except Exception as second:
                self._graphs.release()
                note(error, f"no graph serves, as their outputs are unknown: {second}")
            if isinstance(error, Exception):
                self._graphs.leave_out(tried)
            raise

    def _capture_or_drop(self, graph: graph_table.PreparedStep) -> None:
        """Capture a graph, or leave it out: by the limit, or noted as dropped if the device has no
        room for it."""
        graphs, capture = self._graphs, partial(self._capture_in_budget, graph)
        limit, ranks = graphs.limit, self._setup.host.ranks
        try:
            if limit is None:
                capture()
            elif self._for_step or limit.has_room():
                key, shared = (graph.mode, graph.descriptor), not self._for_step
                agree = None if ranks is None else partial(ranks.agree_on_attempt, graphs)
                limit.capture(key, capture, graphs.evict, shared=shared, agree=agree)
            else:
                graphs.leave_out(graphs.missing())
        except errors.ResourceExhaustedError as error:
            dropped = graph_table.DroppedGraph(graph.mode, graph.descriptor, str(error))
            self._graphs.left_out[graph.slot] = dropped
        except BaseException as error:
            refusals.note_place(error, str(graph))
            raise

    def _capture_in_budget(self, graph: graph_table.PreparedStep) -> None:
        """Capture a graph. Under a budget that is measured it is left out where it is predicted not
        to fit, and taken back where it has not fitted; ranks vote on both."""
        graphs, ranks = self._graphs, self._setup.host.ranks
        budget, key = graphs.budget, (graph.mode, graph.descriptor)
        if budget is None:
            return self._capture_one(graph)
        agree = bool if ranks is None else partial(ranks.agree_on_attempt, graphs)
        if agree(not budget.has_room(key, graphs.held)):
            return graphs.leave_out([key])
        self._capture_one(graph)
        has_freed = True
        while agree(has_freed and budget.is_over(graphs.held)):
            has_freed = graphs.take_last_back(budget)

    @undoing
    def _capture_one(self, undo: Undo, graph: graph_table.PreparedStep) -> None:
        """Capture and publish a graph; if that raises, it is whole or gone."""
        # `_run` has put the state back already, unless there was no memory for it.
        undo.after_error(self._state.restore)
        undo.after_error(self._graphs.destroy_leftovers)
        for span in self._graphs.spans:
            undo.enter(span("capture", str(graph)))
        self._graphs.begun[graph.slot] = graph
        self._graphs.publish(graph, self._captured(graph))

    def _captured(self, graph: graph_table.PreparedStep) -> graph_table.GraphRecord:
        """Warm up and capture one graph, in its transaction, which can take it back."""
        pool = self._setup.pool
        started, before = time.perf_counter(), pool.bytes()
        if self._setup.owns_pool and not self._graphs.records:
            # After a release the pool holds memory still: it counts for the first graph.
            before = 0
        self._streams.check(graph)
        self._warm_up_s = 0.0
        is_tried = self._is_tried(graph)
        if is_tried:
            self._expect(graph, None, is_tried=True)
        else:
            self._warm_up_first(graph)
        outside = pool.platform.driver_bytes()
        try:
            attempts = self._attempts(graph, is_tried=is_tried)
        except errors.StreamBudgetError:
            self._streams.failed(graph)
            raise
        return graph_table.GraphRecord(
            graph.mode,
            graph.descriptor,
            time.perf_counter() - started,
            _growth(before, pool.bytes()),
            _growth(outside, pool.platform.driver_bytes()),
            self._streams.took(graph),
            self._warm_up_s,
            started,
            attempts=attempts,
        )

    def _is_tried(self, graph: graph_table.PreparedStep) -> bool:
        """Whether a graph is captured without a warm-up first: not the largest of its kind so far,
        in this session or before, nor after too many failures of that."""
        kind, tokens = graph.descriptor.kind, graph.descriptor.num_tokens
        known = self._graphs.warmed.get((graph.mode, kind), (0, 0, _MANY))
        largest, failures, least = known
        self._graphs.warmed[graph.mode, kind] = max(largest, tokens), failures, least
        # Not where the first was dropped: nothing is known of a capture of the kind.
        is_known = tokens < largest and failures < _MOST_FAILURES and least < _MANY
        return graph.mode in self._tried and is_known and self._state.may_try(kind)

    def _warm_up_first(self, graph: graph_table.PreparedStep) -> None:
        """Warm a graph up, and note what that tells its capture."""
        pool, began = self._setup.pool, time.perf_counter()
        work, has_room = None, True
        try:
            work = self._warm_up(graph)
        except errors.ResourceExhaustedError:
            in_pool = Capability.ALLOCATE_IN_POOL in pool.platform.capabilities
            if not in_pool or not self._graphs.records:
                raise
            has_room = False
        if not has_room:  # not from above: an error that is handled keeps the memory of its run
            work = self._warm_up_in_pool(graph)
        self._expect(graph, work)
        self._warm_up_s = time.perf_counter() - began

    def _expect(
        self,
        graph: graph_table.PreparedStep,
        work: GraphWork | None,
        *,
        is_tried: bool = False,
    ) -> None:
        """Note, for the next attempt, what warm-ups have told so far."""
        is_cold = self._setup.options.warmups == 0
        self._graphs.lifting.expect(is_cold or self._state.reads_host_memory())
        graph.transaction.may_draw = is_cold or self._state.may_draw(is_tried=is_tried)
        graph.transaction.work = work
        self._streams.check(graph, work)
        with self._setup.pool.capture_lock:
            self._setup.pool.platform.make_room()

    def _warm_up(self, graph: graph_table.PreparedStep) -> GraphWork | None:
        """Run the forward as often as the options say; returns the work that the last run issued
        where the device asks for it."""
        work, host = None, self._setup.host
        try:
            for _ in range(1 if (asked := self._setup.options.warmups) is None else asked):
                count = self._streams.counter(graph)
                self._run(graph, kind=graph.descriptor.kind, count=count)
                work = None if count is None else count.work
        except Exception as error:
            # An error of torch or of the forward: the device may have no room for this size.
            if not isinstance(error, errors.GraphRTError):
                explained = self._setup.pool.platform.explain(error)
                if isinstance(explained, errors.ResourceExhaustedError):
                    try:
                        raise explained.at(refusals.source_of(error)) from error
                    finally:
                        # Else the error and this frame keep each other, and the memory of the run:
                        # smaller graphs would find no room either, as no garbage is collected.
                        del explained
                if "to_padded_tensor" in error_text(error):
                    raise refusals.NESTED_PADDING(source=refusals.source_of(error)) from error
                if refusals.makes_graphs(error):
                    raise refusals.OWN_GRAPHS() from error
                specs = self._setup.inputs.declared.specs.items()
                pads = ", ".join(f"{name}={spec.pad_value}" for name, spec in specs)
                # An eager part that asks it for a value raises that None has none.
                no_metadata = host.metadata is None and "NoneType" in error_text(error)
                more = ", and current_context().metadata is None" if no_metadata else ""
                note(
                    error,
                    f"in a warm-up, where all rows are padding ({pads}; InputSpec(pad=)){more}",
                )
            raise
        return work

    @undoing
    def _warm_up_in_pool(self, undo: Undo, graph: graph_table.PreparedStep) -> GraphWork | None:
        """Warm up in the memory of the pool, in which larger graphs leave room: that of their
        intermediate tensors, which a smaller graph uses again, on the same stream."""
        platform, pool = self._setup.pool.platform, self._setup.pool
        undo.enter(platform.on_stream(platform.capture_stream(pool.stream, None)))
        undo.enter(platform.allocate_in(pool.memory))
        return self._warm_up(graph)

    def _attempts(self, graph: graph_table.PreparedStep, *, is_tried: bool) -> int:
        """Capture a graph, in two attempts at most; returns how many it took.

        The second follows where constants have to be lifted, or another thread has ended the
        capture; and, if the first was only tried, where a first call may explain what it did.
        Ranks vote on it. Segments of pieces may have run until then, and other ranks wait in their
        collectives: after such a failure only a FULL graph has a second attempt.
        """
        platform, kind = self._setup.pool.platform, (graph.mode, graph.descriptor.kind)
        warmed = self._graphs.warmed
        largest, failures, least = warmed[kind]
        has_left = False
        try:
            before = platform.allocations() or 0
            self._run(graph, captures=True, is_tried=is_tried)
            left = (platform.allocations() or 0) - before - self._state.copies()
            has_left = left > least
            is_doubtful = is_tried and self._is_first_call(graph, has_left)
            warmed[kind] = largest, failures, min(least, left)
        except Exception as error:
            is_doubtful = self._may_repeat(graph, error, is_tried)
            if not self._agreed(graph, is_doubtful or None):
                raise
            again = True
        else:
            again = self._agreed(graph, is_doubtful)
        if not again and is_doubtful:
            raise errors.CaptureError(
                "this capture has to be repeated, and another rank has failed in its own",
                advice="look at the log of that rank first",
            )
        if not again:
            return 1
        # Not from above: while an error is handled it keeps the memory of its capture.
        if not has_left:
            graph.transaction.rollback()
        if is_tried:
            self._state.take_back()
            warmed[kind] = largest, failures + 1, least
            self._warm_up_first(graph)
            if has_left and graph.wrapper is not None:
                self._fill_left(graph)
        graph.transaction.rollback()
        try:
            self._run(graph, captures=True)
        except Exception:
            self._agreed(graph, None)
            raise
        self._agreed(graph, False)
        return 2

    @undoing
    def _fill_left(self, undo: Undo, graph: graph_table.PreparedStep) -> None:
        """Give memory that a capture has left, and that cannot be taken back, the values of an
        eager call. The warm-up before has saved what this size writes."""
        assert graph.wrapper is not None
        undo.later(self._state.restore)
        if graph.ring is not None and graph.layout.fetch is not None:
            graph.ring.expect_capture(graph.layout.fetch)
        for last in graphs_of(graph.wrapper.entries[graph.descriptor].parts)[-1:]:
            last.replay()

    def _is_first_call(self, graph: graph_table.PreparedStep, has_left: bool) -> bool:
        """Whether a capture that was tried may have done what later calls do not. If it `has_left`
        memory, no walk through Python need find that, such as in a queue."""
        state = self._state
        # Draws on the host are looked for only where a run before has shown some.
        if state.may_draw(is_tried=True) and not graph.transaction.may_draw:
            return True
        of_parts = self._doors is not None and self._doors.holds_new()
        return has_left or of_parts or state.contradicts()

    def _agreed(self, graph: graph_table.PreparedStep, again: bool | None) -> bool:
        """Whether to make another attempt: with ranks, whether one of them wants that, and none has
        failed for good (None)."""
        ranks = self._setup.host.ranks
        return bool(again) if ranks is None else ranks.agree_on_attempt(self._graphs, again)

    def _may_repeat(
        self, graph: graph_table.PreparedStep, error: Exception, is_tried: bool
    ) -> bool:
        """Whether the first attempt at a capture may succeed if it is repeated. One that was tried
        is taken back in Python."""
        has_changed = is_tried and self._state.take_back()
        if isinstance(error, errors.PageableCopyError):
            return self._graphs.lifting.repeat() or is_tried
        if isinstance(error, EndedCaptureError):
            return graph.mode is GraphMode.FULL or not _has_ranks()
        explained = self._setup.pool.platform.explain(error)
        never = (errors.ResourceExhaustedError, errors.StreamBudgetError)
        if not is_tried or isinstance(error, never) or isinstance(explained, never):
            return False
        # What the forward itself raises is raised by its warm-up too, which says that all is
        # padding. A refusal stays one, unless a first call made what is refused.
        first = isinstance(error, errors.CaptureSyncError | FirstCallError)
        return first or not isinstance(error, errors.GraphRTError) or has_changed

    @undoing
    def _run(
        self,
        undo: Undo,
        graph: graph_table.PreparedStep,
        *,
        captures: bool = False,
        is_tried: bool = False,
        kind: Hashable = None,
        count: WorkCount | None = None,
    ) -> None:
        """Run the forward on padding: as the capture, in the graph's transaction, `is_tried` if no
        warm-up came before; or as a warm-up of a `kind`, whose work is counted by `count`."""
        state, setup = self._state, self._setup
        pool, inputs, host = setup.pool, setup.inputs, setup.host
        # Outputs of the step before may be views of the buffers, which are written now.
        pool._expire_outputs()
        # Every row becomes padding.
        inputs.reset(graph.layout)
        if graph.ring is not None and captures:
            # Its graph is to fetch what is in the buffers already.
            assert graph.layout.fetch is not None
            graph.ring.expect_capture(graph.layout.fetch)
        if host.bind is not None:
            phase: Phase = "capture" if captures else "warmup"
            # Read-only: no graph would read a tensor that the host puts there.
            host.bind(MappingProxyType(graph.layout.views), graph.descriptor, phase)
        context = ForwardContext(
            graph.mode if captures else GraphMode.NONE,
            graph.descriptor,
            updates=WORST_CASE,
            metadata=None if host.metadata is None else host.metadata(graph.descriptor),
            capture=graph.transaction if captures else None,
            num_reqs=graph.reqs,
        )
        context.enlist = setup.enlist
        # A probe of outputs (NONE) runs the code of most graphs.
        is_probe = graph.mode is GraphMode.NONE
        context.graph_mode = setup.plan.mode.decode_mode if is_probe else graph.mode
        undo.later(state.restore)
        if is_tried:
            # An interrupt too would leave what the capture has made in its memory, which is gone.
            undo.after_error(state.take_back)
        undo.later(partial(setattr, pool, "owner", self._graphs.setup.owner))
        pool.owner = context
        undo.later(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(False)
        undo.set(warming_up, not captures)
        # The warm-up of a FULL graph need not note what eager parts make.
        notes_parts = captures or graph.mode is GraphMode.PIECEWISE
        undo.set(side_doors, self._doors if notes_parts else None)
        enter_under_way(undo, context)
        undo.later(context.leave)

        def calls() -> Callable[[], Any]:
            # New for each run: the run before may have reshaped its arguments.
            call = partial(graph.call, **graph.arguments(fresh=True))
            return call if count is None else partial(count.run, call)

        with context:
            if captures:
                in_one = graph.wrapper is not None
                graph.transaction.replays = partial(state.before_replay, in_one)
                # Else the graph would keep what its session saved: old weights among it.
                undo.later(partial(setattr, graph.transaction, "replays", None))
                outputs = state.capture(
                    graph.mode, graph.descriptor, calls(), in_one=in_one, is_tried=is_tried
                )
            else:
                outputs = state.run(kind, graph.descriptor.num_tokens, graph.layout.views, calls)
            graph.outputs.axes.see(graph.descriptor.num_tokens, graph.reqs, outputs)

    def _settle(self, *, more: bool, probes: bool = True) -> None:
        """Find the batch axes of the outputs, with `probes` by eager runs if need be, and prepare
        the steps that hand them out; then find the tensors that graphs read, and note which steps
        to check."""
        setup, graphs = self._setup, self._graphs
        resolve = partial(setup.outputs.resolve, query_len=self._query_len)
        if probes:
            self._state.settle(partial(resolve, self._probe))
        else:
            resolve(None)
            self._state.give_up()
        published = graphs.dispatcher.published
        graphs.checks.captured(published, more=more)
        for dispatch in published:
            prepared = graphs.steps[dispatch.slot]
            if prepared is not None:
                prepared.hold()

    @undoing
    def _probe(self, undo: Undo, tokens: int, reqs: int) -> None:
        """Run one eager step of a size that no graph need have, and note what it returns."""
        query_len = self._query_len
        rows = BatchDescriptor(tokens, reqs, query_len is not None, query_len=query_len)
        # `_run` may have failed in this very call, and `OutputLayout.resolve` continues after
        # errors: restore again.
        undo.after_error(self._state.restore)
        self._run(graph_table.PreparedStep(self._graphs, GraphMode.NONE, rows))


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
