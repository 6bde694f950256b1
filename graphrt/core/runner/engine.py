"""One step of a runner, from its batch and its inputs to its outputs.

1. Take the pool's turn: meanwhile nobody else steps, captures or destroys graphs in it.
2. Dispatch the batch. With `GraphOptions(lazy=True)` capture the graph that it lacks.
3. Ask the checks whether the step is tried, or runs eagerly because its graph is in quarantine or a
   setting has changed.
4. `serve` every other step as it was dispatched: by its graph on padded inputs, or eagerly.

`native/path.c` does 1 to 3 in C for a batch that was dispatched before and has no updates and no
`agreed`. `native/replay.c` does 4 where the `PreparedStep` has a `native` step: a single graph that
fetches its inputs and returns one tensor, without a `bind`. For every other step C calls this
module: `step` if it has done nothing yet, `serve` if it has counted the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.core.base import errors, tree
from graphrt.core.base._native_door import NativePath
from graphrt.core.batch.descriptor import Batch, checked_batch, room_for_reqs
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import Count
from graphrt.core.dispatch.reasons import Agreed, Dispatch, Reason
from graphrt.core.inputs.buffers import batch_of, reqs_of
from graphrt.core.replay.gradients import marked
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.runner.capture_session import capture_for_step
from graphrt.core.runner.contract import Step, Values
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.graph_table import PreparedStep


class StepEngine:
    """Dispatches the steps of one runner, has them checked, and has its `StepExecutor` run them.

    The runner calls what `entrance()` returned for each step, and `verify` and
    `run_padded_eagerly` in a turn of the pool that it has taken itself.
    """

    # Slots, because C accesses these at fixed offsets.
    __slots__ = ("__dict__", "last_dispatch", "live_tokens")

    def __init__(self, executor: StepExecutor) -> None:
        graphs = executor.graphs
        # How the last step ran; None before the first.
        self.last_dispatch: Dispatch | None = None
        # The live tokens of all steps that a graph has served or should have.
        self.live_tokens = 0
        self._checks = graphs.checks
        self._dispatcher = graphs.dispatcher
        self._executor = executor
        self._graphs = graphs
        # Whether some input may require a gradient, so that `serve` marks outputs.
        self._marks = graphs.checks.on and bool(executor.inputs.graded)
        self._owner = graphs.setup.owner
        self._pool = executor.pool

    def entrance(self) -> Callable[..., Any]:
        """What a runner calls for each step: `step`, or the same in C. The runner keeps it: stored
        here it would be a reference cycle, and graphs would live until the next garbage
        collection."""
        if NativePath is None or type(self._pool) is not GraphPool:
            # C reads a pool's slots in memory, where a host's subclass may have properties.
            return self.step
        return NativePath(
            step=self.step,
            check=partial(self.serve, check=True),
            serve=self.serve,
            failed=self.failed,
            pool=self._pool,
            owner=self._owner,
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
            counts=Count,
            prepared=PreparedStep,
        )

    def step(
        self,
        batch: Batch | None,
        values: Values,
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """Run one step; see `GraphRunner.__call__`."""
        pool = self._pool
        if pool.elsewhere is not None and pool.elsewhere():
            with pool.on_device():
                return self.step(batch, values, updates, metadata, agreed)
        if under_way and is_inside_capture():
            return self._executor.run_as_part(batch, values, updates, metadata)
        # `in_turn`, repeated inline. The turn comes first: a graph that was looked up before it
        # might be destroyed by another thread.
        if pool.owner is not None:
            raise pool.busy_error(self._owner)
        try:
            pool.owner = self._owner
            if batch is None:
                batch = batch_of(self._executor.inputs, values)
            if self._graphs.sealing.may_capture:
                values = capture_for_step(self._graphs, batch, values, agreed)
            dispatch = self._dispatcher.dispatch(batch, agreed=agreed)
            # Without a graph there is nothing to check.
            check = dispatch.slot >= 0 and not self.is_clear(dispatch.slot, batch)
            outputs = self.serve(batch, dispatch, values, updates, metadata, agreed, check)
            # In `try`, not in `finally`: a Ctrl-C as `finally` begins would leave the pool taken.
            pool.owner = None
            return outputs
        except BaseException:  # in place of `@undoing`, which costs 0.3 us a step
            pool.owner = None
            raise

    def is_clear(self, slot: int, batch: Batch) -> bool:
        """Whether the step of a graph is replayed without a check: its batch needs no trial, and
        the next of `Glances.looks` finds nothing changed."""
        checks = self._checks
        if not checks.on:
            return True
        # The size that needs no trial, as a step of that size has no padding; -1 is no batch's.
        rows = checks.pending.get(slot)
        if rows is not None and rows != (batch[:2] if type(rows) is tuple else batch[0]):
            return False
        return next(checks.glances.looks)

    def serve(
        self,
        batch: Batch,
        dispatch: Dispatch,
        values: Values,
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
        check: bool = False,
    ) -> Any:
        """Run a step as it was dispatched: eagerly without a graph, as one replay of a single
        graph, or by the wrapper in a context. With `check` the checks decide first whether the step
        is tried, runs eagerly although it has a graph, or is replayed after all.

        If an input requires a gradient the outputs are marked, so that `backward` raises:
        see gradients.py.
        """
        self.last_dispatch = dispatch
        executor, not_served_before = self._executor, self._dispatcher.not_served
        try:
            prepared = None if check or dispatch.slot < 0 else self._graphs.steps[dispatch.slot]
            entry = None if prepared is None else prepared.entry
            # All but the replay of a single graph: a step with updates, without a graph, of several
            # parts, of an entry that was destroyed, or whose wrapper compares its arguments first.
            if updates is not None or entry is None or entry.graph is None or entry.compares_next:
                resolved = executor.updates_of(updates)
                step = Step(batch, dispatch, values, resolved, metadata, agreed is not None)
                if check:
                    self.last_dispatch, outputs = self._checked(step)
                elif dispatch.slot < 0:
                    outputs = self._run_unpadded(self._at_agreed_size(step, agreed))
                else:
                    self.last_dispatch, outputs = self._replayed(step)
            else:
                assert prepared is not None
                outputs = executor.run(prepared, batch, values)
        except BaseException:  # a Ctrl-C too: the step counts as FAILED
            self.failed(dispatch, updates, not_served_before)
            raise
        if self.last_dispatch.slot >= 0:
            self.live_tokens += batch[0]
        required = executor.inputs.with_gradients(values) if self._marks else ()
        return marked(outputs, required) if required else outputs

    def _checked(self, step: Step) -> tuple[Dispatch, Any]:
        """Run a step as the checks decide; returns its dispatch as it ran, and its live outputs.

        Ranks that agreed on a graph differ in their live rows. So an eager step has the graph's
        size on each of them, and none tries a step only because it is padded. After a vote for a
        trial each rank makes it, whatever it knows itself: other ranks' collectives would wait.
        """
        self._graphs.check_open()
        dispatch, checks = step.dispatch, self._checks
        reason = None if checks.decided else checks.why_eager(dispatch, agreed=step.agreed)
        if reason is None:
            tried = checks.try_step(self._executor, step)
            if tried is None:
                return self._replayed(step)
            if not isinstance(tried, Reason):
                return tried
            reason = tried
        # Before the run: if the forward raises, `last_dispatch` must not say HIT.
        self.last_dispatch = eager = self._dispatcher.without_graph(dispatch, step.batch, reason)
        if not step.agreed:
            without = step._replace(dispatch=eager, graph_mode=dispatch.mode)
            return eager, self._run_unpadded(without)
        try:
            return eager, self._executor.run_padded(step, eager=True)
        finally:
            checks.after_eager_step()

    def _replayed(self, step: Step) -> tuple[Dispatch, Any]:
        """Replay a step; returns its dispatch as it ran, and its outputs. Where an eager part
        returns what its graph cannot read, the step runs again, eagerly, if the checks allow it."""
        try:
            return step.dispatch, self._executor.run_padded(step)
        except errors.BreakError as error:
            if not (error.by_part and self._checks.may_repeat(self._executor, step, error)):
                raise
        self.last_dispatch = eager = self._dispatcher.without_graph(
            step.dispatch, step.batch, Reason.QUARANTINED
        )
        without = step._replace(dispatch=eager, graph_mode=step.dispatch.mode)
        return eager, self._run_unpadded(without)

    def failed(
        self, dispatch: Dispatch, updates: Any = None, not_served_before: int | None = None
    ) -> None:
        """Count a step that raised as FAILED, unless it was counted already.

        `not_served_before` is the dispatcher's count before the step: if it has grown, a wrapper or
        the checks have counted this step. C passes None: in its steps nothing else counts.
        """
        self._executor.step_failed(updates)
        if dispatch.slot >= 0 and not_served_before in (None, self._dispatcher.not_served):
            self.last_dispatch = self._dispatcher.failed(dispatch)

    def run_padded_eagerly(
        self, batch: Batch, dispatch: Dispatch, values: Values, updates: Any, metadata: Any
    ) -> Any:
        """See `GraphRunner.run_padded_eagerly`: in a turn of the pool, as all that follows."""
        batch, executor = checked_batch(batch), self._executor
        steps, slot = self._graphs.steps, dispatch.slot
        prepared = steps[slot] if 0 <= slot < len(steps) else None
        # The dispatch may be old, or another runner's. A batch that is larger than its graph would
        # be written past the end of the buffers.
        if (
            prepared is None
            or prepared.descriptor != dispatch.descriptor
            or batch.num_tokens > prepared.descriptor.num_tokens
        ):
            raise errors.InvalidBatchError(
                "run_padded_eagerly() needs the dispatch of a captured graph",
                got=f"{batch} and {dispatch}",
                expected="a dispatch with Reason.HIT of this batch, by a graph that is captured",
                advice="capture() first; dispatch = runner.dispatcher.dispatch(batch), and call "
                "this only where dispatch.reason is Reason.HIT",
            )
        try:
            step = Step(batch, dispatch, values, executor.updates_of(updates), metadata)
            return executor.run_padded(step, eager=True)
        except BaseException:  # a Ctrl-C too: UNCHANGED must not repeat these updates
            executor.step_failed(updates)
            raise
        finally:
            self._checks.after_eager_step()

    def verify(self, batch: Batch | None, values: Values, updates: Any, metadata: Any) -> Any:
        """See `GraphRunner.verify`."""
        self._graphs.check_open()
        # Dispatch checks a copy of its own, and the runs without padding use this batch.
        batch = checked_batch(batch_of(self._executor.inputs, values) if batch is None else batch)
        dispatch = self._dispatcher.dispatch(batch)
        if dispatch.reason is Reason.NOT_CAPTURED:
            raise errors.VerificationError(
                "there is no graph yet that could be verified",
                got=f"{batch}: {dispatch.reason.value}",
                expected="a captured graph",
                advice="capture() first",
            )
        try:
            resolved = self._executor.updates_of(updates)
            step = Step(batch, dispatch, values, resolved, metadata)
            self.last_dispatch = dispatch
            if dispatch.slot < 0:
                return tree.cloned(self._run_unpadded(step))
            outputs, failure = self._graphs.checks.verify(self._executor, step)
        except BaseException:  # a Ctrl-C too: which updates the graph has is unknown
            self._executor.step_failed(updates)
            raise
        self.live_tokens += batch[0]
        if failure is not None:
            raise failure
        return outputs

    def _at_agreed_size(self, step: Step, agreed: Agreed | None) -> Step:
        """A step of ranks without a graph for all, at the size that they have `agreed` on: that of
        a graph if a limit has not let it stay. Before the first capture the axes of outputs are
        unknown, so that none is padded."""
        if not isinstance(agreed, Dispatch) or not self._graphs.begun:
            return step
        (tokens, reqs), inputs = agreed.descriptor[:2], self._executor.inputs
        if agreed.slot >= 0:
            reqs = room_for_reqs(agreed.descriptor, inputs.reqs)
        live = step.batch.num_tokens, reqs_of(inputs, step.batch, step.values)
        if reqs is None or tokens < live[0] or reqs < live[1]:
            return step
        dispatch = step.dispatch._replace(descriptor=agreed.descriptor)
        self.last_dispatch = dispatch
        return step._replace(dispatch=dispatch)

    def _run_unpadded(self, step: Step) -> Any:
        """Run a step eagerly on its live rows alone. With `strict` raises `CaptureSealedError` for
        a batch that the plan has graphs for, such as one larger than every size, or one whose
        graph was destroyed."""
        self._graphs.check_open()
        graphs, batch, reason = self._graphs, step.batch, step.dispatch.reason
        if reason is Reason.NOT_CAPTURED and graphs.begun:
            self._pool.check_open()
            gone = graphs.dispatcher.planned_for(batch) if graphs.sealing.refuses else None
            if gone is not None and gone.slot not in graphs.left_out:
                graphs.sealing.refuse(
                    "the graph of the batch was destroyed",
                    got=batch,
                    expected=f"{gone.mode.name} [{gone.descriptor}]",
                    advice="capture() makes it again; or strict=False to run it eagerly",
                )
        if graphs.sealing.refuses and reason in (Reason.TOO_LARGE, Reason.NO_GRAPH):
            plan = graphs.setup.plan
            is_decode = batch.query_len in plan.sizes.decode
            mode = plan.mode.decode_mode if is_decode else plan.mode.mixed_mode
            if mode is not GraphMode.NONE:
                graphs.sealing.refuse(
                    f"no graph serves the batch: {reason.value}",
                    got=batch,
                    expected=f"a batch that one of {len(plan.keys)} graphs serves",
                )
        return self._checks.run_eagerly(self._executor, step)
