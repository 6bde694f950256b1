"""Steps that no graph serves: the forward itself, on the live rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.batch import Batch, ForwardContext, GraphMode
from graphrt.core.dispatch import Dispatch, Reason
from graphrt.core.inputs import StaticInputs, nest, reqs_of
from graphrt.core.plan import Plan
from graphrt.core.replay import GraphPool
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.host import Bind


class UnpaddedSteps:
    """Runs the eager steps of one runner."""

    def __init__(
        self,
        graphs: GraphSet,
        plan: Plan,
        bind: Bind | None,
        inputs: StaticInputs,
        pool: GraphPool,
        *,
        clones: bool,
    ) -> None:
        self._graphs = graphs
        self._plan = plan
        self._bind = bind
        self._inputs = inputs
        self._pool = pool
        self._clones = clones

    def run(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        """Run a step; nothing that is done to what it returns reaches the forward's next one.

        Raises what `strict` says, `InvalidInputError` and `PoolBusyError`.
        """
        graphs, inputs, pool = self._graphs, self._inputs, self._pool
        if graphs.sealing.refuses and self._should_have_a_graph(batch, found):
            graphs.sealing.refuse(
                f"no graph serves the batch: {found.reason.value}",
                got=batch,
                expected=f"a batch that one of {len(self._plan.keys)} graphs serves",
            )
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        context = ForwardContext(
            GraphMode.NONE, found.descriptor, -1, updates, metadata, num_reqs=reqs
        )
        with pool.owned_by(context):
            stream = pool.follow_stream()
            if tokens <= inputs.tokens and reqs <= inputs.reqs:
                layout = inputs.layout(tokens, reqs)
                inputs.fill(values, layout, tokens, reqs, stream)
                views = layout.views
            else:
                views = inputs.copies(values, tokens, reqs)
            pool.expire_outputs()
            if self._bind is not None:
                self._bind(views, found.descriptor, "eager")
            with context:
                outputs = graphs.run_forward(**(nest(views) if inputs.nested else views))
            return tree.map_tensors(self._handed_out, outputs)

    def _handed_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._clones or self._inputs.hold(tensor):
            return tensor.clone()
        return tensor.detach()

    def _should_have_a_graph(self, batch: Batch, found: Dispatch) -> bool:
        """Whether the plan has graphs for batches of this kind, so that a miss is a mistake."""
        mode = self._plan.mode
        decode = batch.query_len in self._plan.sizes.decode
        wanted = mode.decode_mode if decode else mode.mixed_mode
        missing = found.reason in (Reason.TOO_LARGE, Reason.NO_GRAPH)
        return missing and wanted is not GraphMode.NONE
