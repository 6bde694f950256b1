"""Runs one step: on padded inputs, by a graph or as the graph would, or on its live rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from graphrt.core.base import tree
from graphrt.core.base.errors import IN_PIECES, FrozenMetadataError, NestedCaptureError
from graphrt.core.base.sharing import cloned, clones
from graphrt.core.base.thread_mode import unseen
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import Batch, live_query_len
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.inputs.buffers import reqs_of, wrong_requests
from graphrt.core.inputs.declared import nest
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.host import Phase
from graphrt.core.runner.prepared import PreparedStep

# Constants: CPython 3.11 takes 0.07 us to load the member of an enum.
_NONE, _PIECEWISE = GraphMode.NONE, GraphMode.PIECEWISE

Around = Callable[[Callable[[], Any]], Any]
"""Calls the forward, on inputs that are filled, in its own way."""


class StepExecutor:
    """Runs the steps of one runner, in a turn of its pool."""

    def __init__(self, graphs: GraphTable) -> None:
        setup = graphs.setup
        self.inputs = setup.inputs
        self.pool = setup.pool
        self.graphs = graphs
        self._bind = setup.host.bind
        self._clones = setup.options.outputs == "clone"

    def context(
        self,
        batch: Batch,
        found: Dispatch,
        updates: Any,
        metadata: Any,
        *,
        eager: bool = False,
    ) -> ForwardContext:
        """The context of a padded step: of its graph, or `eager` as the graph would run."""
        graphs = self.graphs
        step = graphs.steps[found.slot]
        assert step is not None
        return ForwardContext(
            _NONE if eager or graphs.setup.eager_launch else found.mode,
            found.descriptor,
            -1 if eager else found.slot,
            updates,
            metadata,
            num_reqs=step.reqs,
            query_len=live_query_len(batch) if found.mode is _PIECEWISE else None,
            dispatcher=graphs.dispatcher,
            live=batch,
        )

    def run(
        self,
        step: PreparedStep,
        batch: Batch,
        values: Mapping[str, Any],
        context: ForwardContext | None,
        *,
        eager: bool = False,
        around: Around | None = None,
    ) -> Any:
        """Fill the buffers of `step`, launch it and hand out the live rows of its outputs.

        Without a `context` the step is one graph, which is replayed as its wrapper would; nobody
        reads a context then. With one its wrapper is called, which replays its segments and eager
        parts; or `eager` the forward, `around` which something may be done. Raises
        `InvalidInputError` and `InvalidBatchError`.
        """
        inputs, pool = self.inputs, self.pool
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = reqs_of(inputs, batch, values)
        if not 1 <= reqs <= step.reqs:
            raise wrong_requests(reqs, step.reqs)
        if pool.closed:
            pool.check_open()
        if context is None and pool.step is not None:
            pool._leave_step(None)
        ring = None if eager else step.ring
        stream = None if pool.read_stream_id is None else pool.follow_stream()
        inputs.fill(values, step.layout, tokens, reqs, stream, ring is not None)
        # Not before: they may have been among the inputs.
        if pool.handed_out:
            pool._expire_outputs()
        if self._bind is not None:
            phase: Phase = "eager" if eager or self.graphs.setup.eager_launch else "replay"
            self._bind(step.readable, step.descriptor, phase)
        if context is None:
            entry: Any = step.entry
            pool.generation += 1
            entry.graph.replay()
            outputs = entry.outputs
        else:
            outputs = self._call(step, context, around, eager=eager)
        if ring is not None:
            ring.launched()
        return step.outputs.live(outputs, tokens, reqs, pool)

    def run_unpadded(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        around: Around | None = None,
    ) -> Any:
        """Run the forward on live rows; nothing that is done to what it returns reaches its next
        step. `around` it something may be done, as in a trial, which is none of the host's steps.
        Raises `InvalidInputError`."""
        inputs, pool, bind = self.inputs, self.pool, self._bind
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        context = ForwardContext(
            _NONE,
            found.descriptor,
            -1,
            updates,
            metadata,
            num_reqs=reqs,
            compared=around is not None,
            live=batch,
        )
        stream = pool.follow_stream()
        if tokens <= inputs.tokens and reqs <= inputs.reqs:
            layout = inputs.layout(tokens, reqs)
            # By the modes of the host only what the forward does is seen.
            unseen(partial(inputs.fill, values, layout, tokens, reqs, stream))
            views = {name: view.detach() for name, view in layout.views.items()}
        else:
            views = inputs.copies(values, tokens, reqs)
        pool._expire_outputs()
        if bind is not None:
            bind(MappingProxyType(views), found.descriptor, "eager")
        forward = partial(
            self.graphs.setup.run_forward, **(nest(views) if inputs.declared.nested else views)
        )
        run = forward if around is None else partial(around, forward)
        return self._handed_out(self._in_context(context, run))

    def run_as_part(
        self, batch: Batch, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        """The forward on copies of a step's live rows, inside the capture, or the warm-up, of
        something else: it becomes part of the outer graph.

        It runs in the outer context, whose updates and metadata every replay gives it. Raises
        `NestedCaptureError` for others, which the graph would keep for ever, and
        `InvalidInputError`.
        """
        context = current_context()
        for name, given in (("updates", updates), ("metadata", metadata)):
            if given is not None and given is not _of_outer_step(context, name):
                raise NestedCaptureError(
                    f"a runner inside the capture of another one was given {name} of its own",
                    got=f"{name}= of {type(given).__name__}",
                    expected=f"{name} of the outer step, which replays can change",
                    advice=f"pass {name} to the outer runner, or {IN_PIECES}",
                )
        if self._bind is not None:
            raise NestedCaptureError(
                "a runner with a bind of its own was called inside the capture of another one: "
                "replays would have what it bound then",
                got=f"Host(bind={self._bind!r})",
                expected="a runner without a bind, whose forward becomes part of the outer graph",
                advice=f"bind in the outer runner's Host, or {IN_PIECES}",
            )
        inputs = self.inputs
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        views = inputs.copies(values, tokens, reqs)
        return self.graphs.setup.run_forward(**(nest(views) if inputs.declared.nested else views))

    def _call(
        self, step: PreparedStep, context: ForwardContext, around: Around | None, *, eager: bool
    ) -> Any:
        """What the step's callable returns in a context, or `eager` the forward itself."""
        forward = self.graphs.setup.run_forward
        call = forward if eager else step.call
        runs = call is forward
        run = partial(call, **(step.fresh_arguments() if runs else step.arguments()))
        outputs = self._in_context(context, run if around is None else partial(around, run))
        return cloned(outputs) if runs and self._clones else outputs

    def _in_context(self, context: ForwardContext, run: Callable[[], Any]) -> Any:
        """Call `run` in a context that has the pool meanwhile: by that wrappers know that the step
        is theirs."""
        pool, owner = self.pool, self.graphs.owner
        try:
            pool._pass_to(context)
            with context:
                outputs = run()
            pool._pass_to(owner)
            return outputs
        except BaseException:  # `undoing`, written out: it costs 0.3 us a step
            pool._pass_to(owner)
            context.leave()
            raise

    def _handed_out(self, outputs: Any) -> Any:
        """The outputs of a forward, apart from what its next step reads."""
        if self._clones:
            return cloned(outputs)
        found = tree.tensors(outputs)
        handed = clones([tensor for tensor in found if self.inputs.hold(tensor)])
        for tensor in found:
            if id(tensor) not in handed:
                handed[id(tensor)] = tensor.detach()
        return tree.map_tensors(lambda tensor: handed[id(tensor)], outputs)


def _of_outer_step(context: ForwardContext | None, name: str) -> Any:
    try:
        return getattr(context, name, None)
    except FrozenMetadataError:
        return None  # a step's own, which is withheld from the capture
