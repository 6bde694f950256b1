"""Steps on padded inputs: by a graph, or by the forward itself as the graph would run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graphrt.core.base.sharing import cloned
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, live_query_len
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.inputs.buffers import StaticInputs, reqs_of, wrong_requests
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Bind, Phase
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.runner.steps.tried import Probe


class PaddedSteps:
    """Runs the steps of one runner whose batches are dispatched to a graph."""

    def __init__(
        self,
        steps: Sequence[PaddedStep | None],
        run_forward: Callable[..., Any],
        bind: Bind | None,
        inputs: StaticInputs,
        pool: GraphPool,
        dispatcher: GraphDispatcher,
        owner: object,
        *,
        clones: bool,
        eager_launch: bool,
    ) -> None:
        """`steps` are those of graphs, by slot; `owner` has the pool's turn in every step."""
        self._owner = owner
        self.inputs = inputs
        self.pool = pool
        self._bind = bind
        self._steps = steps
        self._run_forward = run_forward
        self.dispatcher = dispatcher
        self._clones = clones
        self._eager_launch = eager_launch

    def run(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        context: ForwardContext,
        *,
        eager: bool,
        probe: Probe | None = None,
    ) -> Any:
        """Run a step in `context`; returns the live rows of the outputs.

        `probe` runs the forward in its own way. Raises `InvalidInputError` and
        `InvalidBatchError`.
        """
        step = self._steps[found.slot]
        assert step is not None
        context.num_reqs = step.reqs
        context.dispatcher = self.dispatcher
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = reqs_of(self.inputs, batch, values)
        if not 1 <= reqs <= step.reqs:
            raise wrong_requests(reqs, step.reqs)
        if found.mode is GraphMode.PIECEWISE:
            context.query_len = live_query_len(batch)
        if self.pool.closed:
            self.pool.check_open()
        pool = self.pool
        try:
            pool._pass_to(context)
            stream = pool.follow_stream()
            ring = None if eager else step.ring
            self.inputs.fill(values, step.layout, tokens, reqs, stream, ring is not None)
            if pool.handed_out:
                # Not before: they may have been among the inputs.
                pool._expire_outputs()
            if self._bind is not None:
                phase: Phase = "eager" if eager or self._eager_launch else "replay"
                self._bind(step.readable, step.descriptor, phase)
            call = self._run_forward if eager else step.call
            runs = call is self._run_forward
            arguments = step.fresh_arguments() if runs else step.arguments()
            run = partial(call, **arguments)
            with context:
                outputs = run() if probe is None else probe.run(run)
            if ring is not None:
                ring.launched()
            if self._clones and runs:
                outputs = cloned(outputs)
            outputs = step.live(outputs, tokens, reqs, pool)
            pool._pass_to(self._owner)
            return outputs
        except BaseException:
            pool._pass_to(self._owner)
            context.leave()
            raise
