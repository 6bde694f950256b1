"""The way of one step through a runner: from its batch and its inputs to its outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from graphrt.core.base._native_door import NativePath, NativeSame
from graphrt.core.base.errors import PoolClosedError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, is_plain, same
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import Reserved
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.inputs.slot import InputSlot, agreed_too_late
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.runner._steps import Steps
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.runner.steps.replayed import NOT_ALONE
from graphrt.core.runner.steps.updates import LastUpdates


class StepPath:
    """Dispatches the steps of one runner, has them checked, and runs them."""

    __slots__ = (
        "_by_slot",
        "_checks",
        "_dispatcher",
        "_eager_launch",
        "_elsewhere",
        "_graded",
        "_gradients",
        "_graphs",
        "_inputs",
        "_last",
        "_owner",
        "_pool",
        "_sealing",
        "_slots",
        "_steps",
        "_updates",
        "closed",
        "last_dispatch",
        "live_tokens",
    )

    def __init__(
        self,
        graphs: GraphSet,
        inputs: StaticInputs,
        pool: GraphPool,
        steps: Steps,
        updates: LastUpdates,
    ) -> None:
        self.closed = False
        self.last_dispatch: Dispatch | None = None
        self.live_tokens = 0
        self._graphs = graphs
        self._dispatcher = graphs.dispatcher
        self._sealing = graphs.sealing
        self._checks = graphs.checks
        self._eager_launch = graphs.eager_launch
        self._gradients = graphs.gradients
        self._graded = graphs.gradients.of_inputs
        self._by_slot = graphs.steps
        self._inputs = inputs
        self._pool = pool
        self._elsewhere = pool.elsewhere
        self._owner = graphs.owner
        self._steps = steps
        self._slots = steps.slots
        self._updates = updates
        # The last batch that a graph served, by which version, and the graph.
        self._last: tuple[Any, object, Any] = None, None, None

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
        """`run`, or what does the same faster. Kept by the runner: here it would be a cycle, and
        graphs live until garbage is collected."""
        if NativePath is None or NativeSame is None or type(self._pool) is not GraphPool:
            # A pool of the host's may have properties in place of what is read where it lies.
            return self.run
        return NativePath(
            slow=self.run,
            checked=self._run_checked,
            by_context=self._run_by_context,
            failed=self.failed,
            pool=self._pool,
            owner=self._owner,
            path=self,
            dispatcher=self._dispatcher,
            sealing=self._sealing,
            checks=self._checks if self._checks.on else None,
            by_slot=self._by_slot,
            elsewhere=self._elsewhere,
            under_way=under_way,
            not_alone=NOT_ALONE,
            same=same,
            graphs=Reserved,
            steps=PaddedStep,
        )

    def run(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """Run one step; see `GraphRunner.step`."""
        if self._elsewhere is not None and self._elsewhere():
            with self._pool.on_device():
                return self.run(batch, values, updates, metadata, agreed)
        if under_way and is_inside_capture():
            if batch is None:
                batch = (
                    values.batch if type(values) is InputSlot else batch_of(self._inputs, values)
                )
            return self._steps.unpadded.run_as_part(batch, values, updates, metadata)
        # A turn, written out: see `Turn`. First, so that nothing is looked up that may go.
        pool = self._pool
        if pool.owner is not None:
            raise pool.busy_error(self._owner)
        try:
            pool.owner = self._owner
            outputs = self._run(batch, values, updates, metadata, agreed)
            # Inside of `try`, and no `finally`: an interrupt on the way out must not keep the pool.
            pool.owner = None
            return outputs
        except BaseException:
            pool.owner = None
            raise

    def _run(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """A step that has its turn."""
        found: Dispatch | None = None
        if batch is None:
            if type(values) is InputSlot:
                if agreed is not None:
                    raise agreed_too_late(values)
                batch, agreed = values.batch, values.agreed
                found, values = self._slots.open(values)
            else:
                batch = batch_of(self._inputs, values)
        if found is None:
            if agreed is None:
                last, version, graph = self._last
                dispatcher = self._dispatcher
                # Another one, whatever was published or withdrawn.
                if version is dispatcher.version and same(batch, last):
                    graph.batches += 1
                    # What is known of its rows goes by the object.
                    batch, found = last, graph.found
                else:
                    version = dispatcher.version
                    found = dispatcher.dispatch(batch)
                    if found.slot >= 0 and is_plain(batch):
                        self._last = batch, version, dispatcher.served_by(found.slot)
            else:
                found = self._dispatcher.dispatch(batch, agreed=agreed)
        if self._sealing.may_capture:
            wanted = self._graphs.lazy.wanted(batch, found, agreed)
            if wanted is not None:
                values = self._graphs.lazy.capture(self._graphs.capture, wanted, values)
                found = self._dispatcher.dispatch(batch, agreed=agreed)
        checks = self._checks
        if (
            checks.on
            and found.slot >= 0
            # What `clear` says, without a call, where no graph waits for a trial.
            and not (checks.clear(found.slot, batch[0]) if checks.pending else next(checks.looks))
        ):
            return self._run_checked(batch, found, values, updates, metadata, agreed)
        self.last_dispatch = found
        if updates is None and found.slot >= 0:
            alone = self._by_slot[found.slot]
            if alone is not None and alone.replay is not None:
                try:
                    outputs = alone.replay(alone.live, batch, values)
                except BaseException:
                    self.failed(found)
                    raise
                if outputs is not NOT_ALONE:
                    self.live_tokens += batch[0]
                    return outputs
        return self._run_by_context(batch, found, values, updates, metadata, agreed)

    def failed(self, found: Dispatch, told: int | None = None) -> None:
        """Count a step that raised as one that no graph has served; `told` is how many steps were
        counted otherwise before it: it may be one of those since."""
        dispatcher = self._dispatcher
        if found.slot >= 0 and told in (None, dispatcher.counted_otherwise):
            self.last_dispatch = dispatcher.failed(found)

    def _run_checked(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        """A step that is tried, or whose graph may not be replayed any more."""
        self.check_open()
        self._gradients.look(values)
        told = self._dispatcher.counted_otherwise
        try:
            run = self._steps.checked.run
            found, outputs = run(batch, found, values, updates, metadata, agreed is not None)
        except BaseException:
            self.failed(found, told)
            raise
        self.last_dispatch = found
        self.live_tokens += batch[0] if found.slot >= 0 else 0
        return self._gradients.marked(outputs, values)

    def _run_by_context(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None = None,
    ) -> Any:
        """A step without a graph, or of one that is more than one graph, or has tasks; or with an
        input that requires a gradient."""
        graded = self._graded is not None and self._graded(values)
        if graded and self._gradients.look(values) and found.slot >= 0 and self._checks.on:
            return self._run_checked(batch, found, values, updates, metadata, agreed)
        slot = -1 if self._eager_launch else found.slot
        given = None
        told = self._dispatcher.counted_otherwise
        try:
            if updates is not None:
                step = None if slot < 0 else self._by_slot[slot]
                given = self._updates.resolve(updates, step, slot, self._by_slot, batch)
            if found.slot < 0:
                self.check_open()
                outputs = self._steps.unpadded.run(batch, found, values, given, metadata)
                return self._gradients.marked(outputs, values)
            mode = GraphMode.NONE if self._eager_launch else found.mode
            named, slot = found.descriptor, found.slot
            context = ForwardContext(mode, named, slot, given, metadata, live=batch)
            outputs = self._steps.padded.run(batch, found, values, context, eager=False)
        except BaseException:
            self._updates.step_failed(updates)
            self.failed(found, told)
            raise
        self.live_tokens += batch[0]
        return self._gradients.marked(outputs, values) if graded else outputs
