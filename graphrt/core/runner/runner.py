"""`GraphRunner`: static buffers, dispatch, capture and replay of one forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import CaptureSealedError, InvalidBatchError, PoolClosedError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.state import State
from graphrt.core.device.platform import Platform
from graphrt.core.dispatch.dispatcher import Dispatch, Reason, live_query_len
from graphrt.core.inputs.outputs import OutputAxes
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.inputs.static import StaticInputs, nest
from graphrt.core.plan.budget import Budget, CostModel
from graphrt.core.plan.limits import wrong_requests
from graphrt.core.plan.planning import plan_graphs
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import SegmentHooks
from graphrt.core.replay.tasks import UNCHANGED, check_names
from graphrt.core.runner.graphs import Bind, CaptureContext, GraphSet
from graphrt.core.runner.parts import AUTO, compilables, pool_of
from graphrt.core.runner.report import RunnerReport, report_of
from graphrt.core.runner.session import Progress
from graphrt.core.trust.verify import verify_step
from graphrt.core.trust.weights import Parameters


class GraphRunner:
    """Runs a forward for batches of any size, through graphs captured for some sizes.

    Before `capture()` every batch runs eagerly; after it, batches that no graph serves do, each
    with a reason. Equal means: bit for bit what `forward` gives on the same padded inputs.
    """

    def __init__(
        self,
        forward: Any,
        *,
        inputs: Mapping[str, InputSpec | Mapping[str, Any]],
        outputs: OutputAxes = None,
        mode: GraphMode | str | None = None,
        sizes: Sequence[int] | None = None,
        platform: Platform | str | None = None,
        options: GraphOptions | None = None,
        max_num_tokens: int | None = None,
        max_num_reqs: int | None = None,
        query_lens: Sequence[int] = (1,),
        attention: AttentionSupport | Mapping[str, AttentionSupport] = AttentionSupport.ALWAYS,
        pieces: PieceProvider | str | None = AUTO,
        loras: Sequence[int | None] = (0,),
        bounds: Sequence[tuple[int, ...]] = ((),),
        variants: Sequence[Hashable] = (None,),
        budget: Budget | None = None,
        cost: CostModel | None = None,
        bind: Bind | None = None,
        state: Iterable[State | torch.Tensor] = (),
        parameters: Parameters = None,
        pool: GraphPool | None = None,
        capture_context: CaptureContext = nullcontext,
        segment_hooks: SegmentHooks | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`inputs` names every tensor argument of `forward`; `outputs` gives the axes of what it
        returns (without them, tensors are cut whose first dimension has the padded size, so name
        them where that could be chance). `max_num_tokens` (T) and `max_num_reqs` (S) are the
        largest batch of the host; by default the largest of `sizes`. `mode` and `sizes` go before
        those of `options`. `pieces` is what cuts the forward; "auto" stands for pieces that a
        compiled part of it brings along, else for breakable capture.

        `bind(buffers, descriptor, phase)` is called before every warm-up, capture, replay and
        eager step. At warm-up and capture all rows of the inputs are padding: what decides which
        kernels run (query lengths, the longest context) must be written there at its worst case.
        `pool` shares memory with what never runs at the same time as this runner. `budget` limits
        what is captured, by what `cost` says of each graph (by default 1 of its graphs): `plan`.
        Raises the named errors of bad modes, sizes, inputs and platforms.
        """
        given = {"mode": mode, "sizes": sizes}
        self.options = (options or GraphOptions()).merged(
            {key: value for key, value in given.items() if value is not None}
        )
        pool = pool_of(compilables(forward), pool)
        if pool is not None and platform is not None:
            pool.check_platform(platform)
        self._owns_pool = pool is None
        self.pool = GraphPool(platform) if pool is None else pool
        self.platform = self.pool.platform
        planned = plan_graphs(
            self.options,
            forward,
            cap=self.platform.default_max_size(),
            max_num_tokens=max_num_tokens,
            max_num_reqs=max_num_reqs,
            query_lens=query_lens,
            attention=attention,
            pieces=pieces,
            loras=loras,
            bounds=bounds,
            variants=variants,
            budget=budget,
            cost=cost,
        )
        self.resolution, self.sizes = planned.resolution, planned.sizes
        self.keys, self.plan = planned.keys, planned.plan
        self.mode = self.resolution.mode
        self.inputs = StaticInputs(
            inputs,
            platform=self.platform,
            tokens=max(self.sizes.max_num_tokens, *(key[1].num_tokens for key in self.keys), 1),
            reqs=max(self.sizes.max_num_reqs, *(key[1].num_reqs or 1 for key in self.keys), 1),
            device=device or self.platform.device_type,
        )
        self.graphs = GraphSet(
            forward,
            self.keys,
            mode=self.mode,
            pieces=planned.pieces,
            options=self.options,
            pool=self.pool,
            inputs=self.inputs,
            outputs=outputs,
            bind=bind,
            state=state,
            parameters=parameters,
            capture_context=capture_context,
            segment_hooks=segment_hooks,
        )
        self.dispatcher = self.graphs.dispatcher
        self.last_dispatch: Dispatch | None = None
        self._bind = bind
        self._plans = self.graphs.plans
        self._eager_launch = self.graphs.eager_launch
        self._clones = self.options.outputs == "clone"
        self._last_updates: Any = UNCHANGED
        self._updated_slot = -1
        self._live_tokens = 0
        self._closed = False

    def __call__(
        self,
        batch: Batch | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        **values: Any,
    ) -> Any:
        """Run one step on its live rows; returns the live rows of the outputs.

        `batch` may be left out where the shapes of the inputs say everything. `updates` are the
        host arguments of updatable tasks, `metadata` is what eager parts read from the context.
        """
        return self.step(batch, values, updates=updates, metadata=metadata)

    def step(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        *,
        updates: Any = None,
        metadata: Any = None,
        at_least: int = 0,
        at_most_mode: GraphMode | None = None,
    ) -> Any:
        """Run one step like a call, with its inputs as a mapping.

        `at_least` tokens and `at_most_mode` are what ranks have agreed on.
        """
        if batch is None:
            batch = self.batch_of(values)
        found = self.dispatcher.dispatch(batch, at_least=at_least, at_most_mode=at_most_mode)
        if self.options.lazy and not self.graphs.sealed:
            wanted = self.graphs.wanted(batch, found, at_least, at_most_mode)
            if wanted is not None:
                # They may live in the buffers that a capture fills.
                values = tree.map_tensors(torch.Tensor.clone, dict(values))
                self.graphs.capture_wanted(wanted)
                found = self.dispatcher.dispatch(
                    batch, at_least=at_least, at_most_mode=at_most_mode
                )
        self.last_dispatch = found
        if updates is not None:
            updates = self._checked_updates(updates, found)
        if found.slot < 0:
            return self._run_unpadded(batch, found, values, updates, metadata)
        mode = GraphMode.NONE if self._eager_launch else found.mode
        context = ForwardContext(mode, found.descriptor, found.slot, updates, metadata)
        outputs = self._run_padded(batch, found, values, context, eager=False)
        self._live_tokens += batch[0]
        return outputs

    def run_padded_eagerly(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any = None,
        metadata: Any = None,
    ) -> Any:
        """The forward, run eagerly on exactly the inputs that the graph of `found` would read."""
        if found.slot < 0:
            raise InvalidBatchError(
                "there is no graph whose padding the step could have",
                got=found.reason.name,
                expected="a dispatch with Reason.HIT",
            )
        if updates is UNCHANGED:
            updates = self._last_updates
        if updates is not None:
            updates = self._checked_updates(updates, found)
        context = ForwardContext(GraphMode.NONE, found.descriptor, -1, updates, metadata)
        return self._run_padded(batch, found, values, context, eager=True)

    def verify(
        self,
        batch: Batch | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        **values: Any,
    ) -> Any:
        """Run one step and prove it: like a call, but `VerificationError` if the replay differs
        from the same padded step run eagerly. See `verify_step` for what happens twice."""
        return verify_step(self, batch, values, updates=updates, metadata=metadata)

    def capture(self, progress: Progress | None = None) -> None:
        """Capture every planned graph that is not captured yet, then seal.

        `progress(done, total, descriptor)` is called before each graph and at the end. A failed
        capture raises; the graphs before it serve, and a further call tries the rest again. Graphs
        that the device has no room for are dropped (`report().dropped`) with a
        `GraphsDroppedWarning`, or under `strict` a `ResourceExhaustedError` when the rest is done.
        """
        self._check_open()
        self.graphs.capture_missing(progress)

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper of this runner."""
        self.graphs.seal()

    def release(self) -> None:
        """Destroy all graphs, keeping the plan; batches run eagerly until `recapture()`."""
        self.graphs.release()

    def recapture(self, progress: Progress | None = None) -> None:
        """Destroy all graphs and capture them again, for weights that have moved."""
        self.graphs.release()
        self.capture(progress)

    def weights_changed(self) -> None:
        """Declare that weights were written; raises `StaleInputError` if they moved."""
        self.graphs.check_weights()

    def close(self) -> None:
        """Destroy the graphs, and the pool if it is this runner's own.

        Must come before the host tears down the communicators that graphs hold.
        """
        if not self._closed:
            self.graphs.release()
            self._closed = True
            if self._owns_pool:
                self.pool.close()

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def report(self) -> RunnerReport:
        """Figures of the graphs and of the steps so far."""
        return report_of(self, self._live_tokens)

    def _run_padded(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        context: ForwardContext,
        *,
        eager: bool,
    ) -> Any:
        plan = self._plans[found.slot]
        assert plan is not None
        context.num_reqs = plan.reqs
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = self._reqs_of(batch, values)
        if not 1 <= reqs <= plan.reqs:
            raise wrong_requests(reqs, plan.reqs)
        if found.mode is GraphMode.PIECEWISE:
            context.query_len = live_query_len(batch)
        if self.pool.closed:
            self.pool.check_open()
        # Held from here, so that nothing else fills the buffers between our fill and our replay.
        with self.pool.owned_by(context):
            stream = self.pool.follow_stream()
            self.inputs.fill(values, plan.layout, tokens, reqs, stream)
            if self._bind is not None:
                self._bind(
                    plan.views,
                    plan.descriptor,
                    "eager" if eager or self._eager_launch else "replay",
                )
            call = self.graphs.run_forward if eager else plan.call
            with context:
                outputs = call(**plan.arguments())
            if self._clones and call is self.graphs.run_forward:
                outputs = tree.map_tensors(torch.Tensor.clone, outputs)
        return plan.live(outputs, tokens, reqs)

    def _run_unpadded(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
    ) -> Any:
        self._check_open()
        if self.options.strict and self.graphs.sealed and self._should_have_a_graph(batch, found):
            raise CaptureSealedError(
                f"no graph serves the batch: {found.reason.value}",
                got=batch,
                expected=f"a batch that one of {len(self.keys)} graphs serves",
                advice="add the size to sizes=, or use strict=False to run it eagerly",
            )
        tokens, reqs = batch.num_tokens, self._reqs_of(batch, values)
        context = ForwardContext(
            GraphMode.NONE, found.descriptor, -1, updates, metadata, num_reqs=reqs
        )
        with self.pool.owned_by(context):
            stream = self.pool.follow_stream()
            if tokens <= self.inputs.tokens and reqs <= self.inputs.reqs:
                layout = self.inputs.layout(tokens, reqs)
                self.inputs.fill(values, layout, tokens, reqs, stream)
                views = layout.views
            else:
                # Larger than the buffers: the forward reads the host's own tensors.
                views = self.inputs.flat(values)
            if self._bind is not None:
                self._bind(views, found.descriptor, "eager")
            with context:
                outputs = self.graphs.run_forward(**(nest(views) if self.inputs.nested else views))
            return tree.map_tensors(torch.Tensor.clone, outputs) if self._clones else outputs

    def _should_have_a_graph(self, batch: Batch, found: Dispatch) -> bool:
        """Whether the plan has graphs for batches of this kind, so that a miss is a mistake."""
        decode = batch.query_len in self.sizes.decode
        wanted = self.mode.decode_mode if decode else self.mode.mixed_mode
        missing = found.reason in (Reason.TOO_LARGE, Reason.NO_GRAPH)
        return missing and wanted is not GraphMode.NONE

    def _checked_updates(self, updates: Any, found: Dispatch) -> Any:
        """`updates` of the tasks that this step has; UNCHANGED is the step before, of any graph."""
        graph = found.slot >= 0 and not self._eager_launch
        if updates is UNCHANGED:
            if graph and found.slot == self._updated_slot:
                return updates
            updates = self._last_updates
        else:
            self._last_updates = updates
        if graph and (type(updates) is dict or isinstance(updates, Mapping)):
            plan = self._plans[found.slot]
            assert plan is not None
            if not updates.keys() <= plan.task_names:
                # The host need not know which of its batches run by pieces, without tasks.
                others = [each.task_names for each in self._plans if each is not None]
                check_names(updates, frozenset().union(*others))
                updates = {name: updates[name] for name in plan.task_names & updates.keys()}
            self._updated_slot = found.slot
        return updates

    def batch_of(self, values: Mapping[str, Any]) -> Batch:
        """The batch that the shapes of a step's inputs describe."""
        tokens, reqs = self.inputs.infer(values)
        # Only this much is certain: with as many tokens as requests, each has exactly one.
        return Batch(tokens, reqs, 1 if reqs is not None and tokens == reqs else None)

    def _reqs_of(self, batch: Batch, values: Mapping[str, Any]) -> int:
        if batch.num_reqs is not None:
            return batch.num_reqs
        if batch.query_len:
            return batch.num_tokens // batch.query_len
        reqs = self.inputs.infer(values)[1]
        return min(batch.num_tokens, self.inputs.reqs) if reqs is None else reqs

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError("the runner is closed", advice="create a new GraphRunner")
