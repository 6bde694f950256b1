"""One step of a runner, from its batch and its inputs to its outputs.

1. Take the pool's turn: meanwhile nobody else steps, captures or destroys graphs in it.
2. Dispatch the batch. Where graphs are captured lazily, capture the one that it lacks.
3. Ask the checks. `check` runs what has to be tried, and what must not be replayed any more.
4. `serve` every other step as it was dispatched: by its graph on padded inputs, or eagerly.

`native/` does the same in C for the steps that are most of a decode: of a batch that was dispatched
before, to a single graph that fetches its inputs. It leaves every other step to this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from graphrt.core.base._native_door import NativePath
from graphrt.core.base.errors import (
    InputSlotError,
    InvalidBatchError,
    PoolClosedError,
    VerificationError,
)
from graphrt.core.base.option_values import shown
from graphrt.core.base.sharing import cloned
from graphrt.core.batch.descriptor import Batch, checked_batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import Reserved
from graphrt.core.dispatch.reasons import Agreed, Dispatch, Reason
from graphrt.core.inputs.buffers import batch_of, wrong_requests
from graphrt.core.inputs.layout import InputLayout
from graphrt.core.inputs.slot import InputSlot, agreed_too_late
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.prepared import PreparedStep
from graphrt.core.runner.trials import StepTrials, StepValues
from graphrt.core.runner.updates import LastUpdates

CaptureMissing = Callable[
    [Batch, Dispatch, Mapping[str, Any], "Agreed | None"], "Mapping[str, Any] | None"
]
"""See `CaptureScheduler.for_step`."""


class StepEngine:
    """Dispatches the steps of one runner, has them checked, and runs them."""

    __slots__ = (
        "_checks",
        "_dispatcher",
        "_executor",
        "_graphs",
        "_pool",
        "capture_missing",
        "closed",
        "last_dispatch",
        "live_tokens",
        "slots",
        "trials",
        "updates",
    )

    def __init__(self, graphs: GraphTable) -> None:
        setup = graphs.setup
        self.closed = False
        self.last_dispatch: Dispatch | None = None
        self.live_tokens = 0
        # Called where a step may find a better graph missing.
        self.capture_missing: CaptureMissing = lambda *_: None
        self._graphs = graphs
        self._dispatcher = graphs.dispatcher
        self._checks = graphs.checks
        self._pool = setup.pool
        self.updates = LastUpdates(graphs.steps)
        self.slots = Slots(graphs)
        executor = self._executor = StepExecutor(graphs)
        self.trials = StepTrials(executor, graphs, self.updates)

    def check_open(self) -> None:
        """Raise `PoolClosedError` after `close()`, and while the interpreter shuts down: torch then
        ends the process where a tensor goes that has a view, as trials and eager steps make."""
        if self.closed:
            raise PoolClosedError("the runner is closed", advice="create a new GraphRunner")
        if sys.is_finalizing():
            raise PoolClosedError(
                "the interpreter is shutting down",
                advice="step before it: in a `with` block or an atexit handler, not in __del__",
            )

    def entrance(self) -> Callable[..., Any]:
        """`step`, or its twin in C. Kept by the runner: here it would be a cycle, and graphs live
        until garbage is collected."""
        if NativePath is None or type(self._pool) is not GraphPool:
            # A pool of the host's may have properties in place of what C reads where it lies.
            return self.step
        return NativePath(
            step=self.step,
            check=self.check,
            serve=self.serve,
            failed=self.failed,
            pool=self._pool,
            owner=self._graphs.owner,
            engine=self,
            dispatcher=self._dispatcher,
            sealing=self._graphs.sealing,
            checks=self._checks,
            glances=self._checks.glances,
            steps=self._graphs.steps,
            elsewhere=self._pool.elsewhere,
            under_way=under_way,
            batches=Batch,
            version=type(self._dispatcher.version),
            reserved=Reserved,
            prepared=PreparedStep,
        )

    def step(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """Run one step; see `GraphRunner.step`."""
        pool = self._pool
        if pool.elsewhere is not None and pool.elsewhere():
            with pool.on_device():
                return self.step(batch, values, updates, metadata, agreed)
        if under_way and is_inside_capture():
            if batch is None:
                batch = (
                    values.batch
                    if type(values) is InputSlot
                    else batch_of(self._executor.inputs, values)
                )
            return self._executor.run_as_part(batch, values, updates, metadata)
        # A turn, written out: see `Turn`. First, so that nothing is looked up that may go.
        if pool.owner is not None:
            raise pool.busy_error(self._graphs.owner)
        try:
            pool.owner = self._graphs.owner
            found: Dispatch | None = None
            if batch is None:
                batch, values, agreed, found = self._opened(values, agreed)
            if found is None:
                found = self._dispatcher.dispatch(batch, agreed=agreed)
            if self._graphs.sealing.may_capture:
                found, values = self._captured(batch, found, values, agreed)
            if found.slot < 0 or self.is_clear(found.slot, batch[0]):
                outputs = self.serve(batch, found, values, updates, metadata, agreed)
            else:
                outputs = self.check(batch, found, values, updates, metadata, agreed)
            # Inside of `try`, and no `finally`: an interrupt on the way out must not keep the pool.
            pool.owner = None
            return outputs
        except BaseException:  # `undoing`, written out: it costs 0.3 us a step
            pool.owner = None
            raise

    def _opened(
        self, values: Mapping[str, Any], agreed: Agreed | None
    ) -> tuple[Batch, Mapping[str, Any], Agreed | None, Dispatch | None]:
        """The batch of a step that was given none: its slot's, or what the inputs' shapes say."""
        if type(values) is not InputSlot:
            return batch_of(self._executor.inputs, values), values, agreed, None
        if agreed is not None:
            raise agreed_too_late(values)
        found, opened = self.slots.open(values)
        return values.batch, opened, values.agreed, found

    def _captured(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], agreed: Agreed | None
    ) -> tuple[Dispatch, Mapping[str, Any]]:
        """The step's dispatch and inputs, after its graph was captured if that is wanted."""
        kept = self.capture_missing(batch, found, values, agreed)
        if kept is None:
            return found, values
        values = kept
        return self._dispatcher.dispatch(batch, agreed=agreed), values

    def is_clear(self, slot: int, tokens: int) -> bool:
        """Whether the step of a graph, of so many live tokens, is simply replayed."""
        checks = self._checks
        if not checks.on:
            return True
        return checks.pending.get(slot, tokens) == tokens and next(checks.glances.looks)

    def serve(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """Run a step as it was dispatched. With an input that requires a gradient it is tried if
        nobody knows yet which outputs depend on that, and those that do are marked."""
        gradients = self._graphs.setup.run_forward.gradients
        graded = gradients.of_inputs and self._executor.inputs.require_gradients(values)
        if graded and gradients.look(values) and found.slot >= 0 and self._checks.on:
            return self.check(batch, found, values, updates, metadata, agreed)
        self.last_dispatch = found
        told = self._dispatcher.counted_otherwise
        try:
            if found.slot < 0:
                self.check_open()
                outputs = self._run_unpadded(batch, found, StepValues(values, updates, metadata))
                return gradients.marked(outputs, values)
            step = self._graphs.steps[found.slot]
            assert step is not None
            entry = step.entry
            # More than one graph, or with tasks, or its wrapper has to look at the arguments.
            if updates is not None or entry is None or entry.graph is None or entry.unchecked:
                outputs = self._run_padded(batch, found, StepValues(values, updates, metadata))
            else:
                outputs = self._executor.run(step, batch, values, None)
        except BaseException:  # a Ctrl-C too: the step counts as FAILED
            self.updates.step_failed(updates)
            self.failed(found, told)
            raise
        self.live_tokens += batch[0]
        return gradients.marked(outputs, values) if graded else outputs

    def check(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """Run a step that is tried, or whose graph may not be replayed any more."""
        self.check_open()
        self._graphs.setup.run_forward.gradients.look(values)
        told = self._dispatcher.counted_otherwise
        try:
            given = StepValues(values, updates, metadata)
            ran, outputs = self._checked(batch, found, given, agreed=agreed is not None)
        except BaseException:  # a Ctrl-C too: the step counts as FAILED
            self.updates.step_failed(updates)
            self.failed(found, told)
            raise
        self.last_dispatch = ran
        self.live_tokens += batch[0] if ran.slot >= 0 else 0
        return self._graphs.setup.run_forward.gradients.marked(outputs, values)

    def _checked(
        self, batch: Batch, found: Dispatch, given: StepValues, *, agreed: bool
    ) -> tuple[Dispatch, Any]:
        """How the step ran, and its live outputs.

        Where ranks have `agreed` on its size each has its own live rows: what would then be done by
        some of them only, or at other sizes, is left out.
        """
        reason = self._checks.why_eager(found)
        if reason is not None:
            ran = self._dispatcher.run_eagerly(found, batch, reason)
            if not agreed:
                return ran, self._run_unpadded(batch, ran, given)
            outputs = self._run_padded(batch, found, given, eager=True)
            self._checks.look_after_eager_step()
            return ran, outputs
        differing = self.trials.differing(batch, found, given.values, agreed)
        if self._checks.wants_trial(found.slot, differing):
            return self.trials.run(batch, found, given, differing, agreed=agreed)
        return found, self._run_padded(batch, found, given)

    def failed(self, found: Dispatch, told: int | None = None) -> None:
        """Count a step that raised as one that no graph has served; `told` is how many steps were
        counted otherwise before it: it may be one of those since."""
        dispatcher = self._dispatcher
        if found.slot >= 0 and told in (None, dispatcher.counted_otherwise):
            self.last_dispatch = dispatcher.failed(found)

    def run_padded_eagerly(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        """See `GraphRunner.run_padded_eagerly`: in a turn of the pool, as all that follows."""
        steps = self._graphs.steps
        if found.slot < 0:
            raise _no_graph_to_pad_to(found.reason)
        if found.slot >= len(steps) or steps[found.slot] is None:
            # Its graph has gone since.
            raise _no_graph_to_pad_to(Reason.NOT_CAPTURED)
        batch = checked_batch(batch)
        given = StepValues(values, updates, metadata)
        return self._run_padded(batch, found, given, eager=True)

    def verify(
        self, batch: Batch | None, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        """See `GraphRunner.verify`."""
        if batch is None:
            batch = batch_of(self._executor.inputs, values)
        given = StepValues(values, updates, metadata)
        # Its runs without padding take the batch as it is.
        batch = checked_batch(batch)
        found = self._dispatcher.dispatch(batch)
        planned = self._graphs.setup.eager_launch or found.reason is Reason.NOT_CAPTURED
        if found.slot < 0 and not planned:
            self.last_dispatch = found
            return cloned(self._run_unpadded(batch, found, given))
        if found.slot < 0 or self._graphs.setup.eager_launch:
            raise _no_graph_to_verify(batch, found.reason)
        try:
            verdict = self.trials.verify(batch, found, given)
        except BaseException:  # a Ctrl-C too: what was to be updated is unknown
            self.updates.step_failed(given.updates)
            raise
        self.last_dispatch = found
        self.live_tokens += batch[0]
        if verdict.failure is not None:
            raise verdict.failure
        return verdict.outputs

    def _run_padded(
        self, batch: Batch, found: Dispatch, given: StepValues, *, eager: bool = False
    ) -> Any:
        """Run a step on the inputs that the graph of `found` reads, in a context of its own."""
        graphs, executor = self._graphs, self._executor
        slot = -1 if graphs.setup.eager_launch else found.slot
        updates = self.updates.resolve(given.updates, batch, slot, replayed=not eager)
        context = executor.context(batch, found, updates, given.metadata, eager=eager)
        step = graphs.steps[found.slot]
        assert step is not None
        return executor.run(step, batch, given.values, context, eager=eager)

    def _run_unpadded(self, batch: Batch, found: Dispatch, given: StepValues) -> Any:
        """Run a step on its live rows alone; raises `CaptureSealedError` where it should have had
        a graph, and `strict` says that this is an error."""
        sealing = self._graphs.sealing
        if sealing.refuses and self._should_have_a_graph(batch, found):
            sealing.refuse(
                f"no graph serves the batch: {found.reason.value}",
                got=batch,
                expected=f"a batch that one of {len(self._graphs.setup.plan.keys)} graphs serves",
            )
        updates = self.updates.resolve(given.updates, batch)
        try:
            return self._executor.run_unpadded(batch, found, given.values, updates, given.metadata)
        finally:
            self._checks.look_after_eager_step()

    def _should_have_a_graph(self, batch: Batch, found: Dispatch) -> bool:
        """Whether the plan has graphs for batches of this kind, so that a miss is a mistake."""
        mode = self._graphs.setup.plan.mode
        decode = batch.query_len in self._graphs.setup.plan.sizes.decode
        wanted = mode.decode_mode if decode else mode.mixed_mode
        missing = found.reason in (Reason.TOO_LARGE, Reason.NO_GRAPH)
        return missing and wanted is not GraphMode.NONE


def _no_graph_to_verify(batch: Batch, reason: Reason) -> VerificationError:
    return VerificationError(
        "there is no graph yet that could be verified",
        got=f"{batch}: {reason.value}",
        expected="a captured graph",
        advice="capture() first",
    )


def _no_graph_to_pad_to(reason: Reason) -> InvalidBatchError:
    return InvalidBatchError(
        "there is no graph whose padding the step could have",
        got=reason.name,
        expected="a dispatch with Reason.HIT",
        advice="capture() before; found = runner.dispatcher.dispatch(batch), and go on where "
        "found.reason is Reason.HIT",
    )


class Slots:
    """Makes the slots of one runner, and takes them back."""

    def __init__(self, graphs: GraphTable) -> None:
        self._graphs = graphs
        self._inputs = graphs.setup.inputs
        self._pool = graphs.setup.pool

    def make(self, batch: Batch, agreed: Agreed | None) -> InputSlot:
        """A slot for the inputs of `batch`, where the graph is that serves it."""
        # A turn, written out: see `Turn`.
        pool = self._pool
        if pool.owner is not None:
            raise pool.busy_error(self._graphs.owner)
        try:
            pool.owner = self._graphs.owner
            slot = self._make(batch, agreed)
            pool.owner = None
            return slot
        except BaseException:  # a turn, written out: see `Turn`
            pool.owner = None
            raise

    def _make(self, batch: Batch, agreed: Agreed | None) -> InputSlot:
        inputs, graphs = self._inputs, self._graphs
        found: Dispatch | None = None
        # A step that captures its graph first cannot have its inputs in place.
        if not graphs.sealing.may_capture:
            found = graphs.dispatcher.dispatch(batch, agreed=agreed)
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = self._requests(batch)
        step = None
        layout: InputLayout | None = None
        if found is not None and found.slot >= 0:
            step = graphs.steps[found.slot]
            assert step is not None
            if not 1 <= reqs <= step.reqs:
                raise wrong_requests(reqs, step.reqs)
            layout = step.layout
        elif found is not None and tokens <= inputs.tokens and reqs <= inputs.reqs:
            layout = inputs.layout(tokens, reqs)
        self._pool.follow_stream()
        slot = inputs.slot(layout, tokens, reqs)
        slot.batch, slot.maker, slot.agreed = batch, self, agreed
        if found is not None:
            slot.planned = found, step
        return slot

    def open(self, slot: InputSlot) -> tuple[Dispatch | None, Mapping[str, Any]]:
        """How the step of a slot is dispatched, and its inputs; None where it is to be dispatched
        now. Raises `InputSlotError`."""
        if slot.maker is not self:
            raise InputSlotError(
                "a slot was given to another runner than made it",
                got=shown(slot),
                expected="a slot of this runner",
                advice="runner.slot(batch) of the runner that is called",
            )
        # As `use` does, which names what is wrong.
        if slot.used or slot.turn != self._inputs.turn:
            slot.use(self._inputs.turn)
        slot.used = True
        if slot.planned is not None:
            found, step = slot.planned
            steps, at = self._graphs.steps, found.slot
            if step is None or (at < len(steps) and steps[at] is step):
                return found, slot
        return None, {name: value.clone() for name, value in slot.items()}

    def _requests(self, batch: Batch) -> int:
        """The requests of a batch that does not say how many it has."""
        if batch.query_len:
            return batch.num_tokens // batch.query_len
        if self._inputs.has_requests:
            raise InvalidBatchError(
                "a slot is made before there are inputs, whose shapes would say how many requests "
                "the batch has",
                got=shown(batch),
                expected="num_reqs, or query_len",
                advice="Batch(num_tokens, num_reqs)",
            )
        return min(batch.num_tokens, self._inputs.reqs)
