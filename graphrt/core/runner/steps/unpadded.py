"""Steps that no graph of the runner serves: the forward itself, on the live rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from graphrt.core.base import tree
from graphrt.core.base.errors import (
    IN_PIECES,
    FrozenMetadataError,
    InvalidBatchError,
    NestedCaptureError,
    VerificationError,
)
from graphrt.core.base.sharing import cloned, clones
from graphrt.core.base.thread_mode import unseen
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.sealing import Sealing
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import StaticInputs, reqs_of
from graphrt.core.inputs.declared import nest
from graphrt.core.plan.plan import Plan
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture
from graphrt.core.runner.host import Bind


class UnpaddedSteps:
    """Runs the eager steps of one runner."""

    def __init__(
        self,
        run_forward: Callable[..., Any],
        sealing: Sealing,
        plan: Plan,
        bind: Bind | None,
        inputs: StaticInputs,
        pool: GraphPool,
        owner: object,
        *,
        clones: bool,
        after: Callable[[], None],
    ) -> None:
        """`owner` has the pool's turn in every step; `after` is called after every step but those
        of trials."""
        self._owner = owner
        self._run_forward = run_forward
        self._sealing = sealing
        self._plan = plan
        self._bind = bind
        self._inputs = inputs
        self._pool = pool
        self._clones = clones
        self._after = after

    def run(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        around: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> Any:
        """Run a step; nothing that is done to what it returns reaches the forward's next one.

        `around` calls the forward. Raises what `strict` says, and `InvalidInputError`.
        """
        sealing, inputs, pool = self._sealing, self._inputs, self._pool
        if sealing.refuses and self._should_have_a_graph(batch, found):
            sealing.refuse(
                f"no graph serves the batch: {found.reason.value}",
                got=batch,
                expected=f"a batch that one of {len(self._plan.keys)} graphs serves",
            )
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        context = ForwardContext(
            GraphMode.NONE,
            found.descriptor,
            -1,
            updates,
            metadata,
            num_reqs=reqs,
            compared=around is not None,
            live=batch,
        )
        try:
            pool._pass_to(context)
            stream = pool.follow_stream()
            if tokens <= inputs.tokens and reqs <= inputs.reqs:
                layout = inputs.layout(tokens, reqs)
                # By the modes of the host only what the forward does is seen.
                unseen(partial(inputs.fill, values, layout, tokens, reqs, stream))
                views = {name: view.detach() for name, view in layout.views.items()}
            else:
                views = inputs.copies(values, tokens, reqs)
            pool._expire_outputs()
            if self._bind is not None:
                self._bind(MappingProxyType(views), found.descriptor, "eager")
            forward = partial(self._run_forward, **(nest(views) if inputs.nested else views))
            with context:
                outputs = forward() if around is None else around(forward)
            if around is None:
                self._after()
            outputs = self._handed_out(outputs)
            pool._pass_to(self._owner)
            return outputs
        except BaseException:
            pool._pass_to(self._owner)
            context.leave()
            if around is None:
                self._after()
            raise

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
        inputs = self._inputs
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        views = inputs.copies(values, tokens, reqs)
        return self._run_forward(**(nest(views) if inputs.nested else views))

    def _handed_out(self, outputs: Any) -> Any:
        if self._clones:
            return cloned(outputs)
        found = tree.tensors(outputs)
        handed = clones([tensor for tensor in found if self._inputs.hold(tensor)])
        for tensor in found:
            if id(tensor) not in handed:
                handed[id(tensor)] = tensor.detach()
        return tree.map_tensors(lambda tensor: handed[id(tensor)], outputs)

    def _should_have_a_graph(self, batch: Batch, found: Dispatch) -> bool:
        """Whether the plan has graphs for batches of this kind, so that a miss is a mistake."""
        mode = self._plan.mode
        decode = batch.query_len in self._plan.sizes.decode
        wanted = mode.decode_mode if decode else mode.mixed_mode
        missing = found.reason in (Reason.TOO_LARGE, Reason.NO_GRAPH)
        return missing and wanted is not GraphMode.NONE


def _of_outer_step(context: ForwardContext | None, name: str) -> Any:
    try:
        return getattr(context, name, None)
    except FrozenMetadataError:
        return None  # a step's own, which is withheld from the capture


def refuse_inside_capture(what: str) -> None:
    """Raise `NestedCaptureError` where `what` would run as part of something else's capture."""
    if is_inside_capture():
        raise NestedCaptureError(
            f"{what} was called inside the capture, or the warm-up, of something else",
            expected="a call outside of captures, or in an eager part",
            advice="call the runner itself: it becomes part of the outer graph",
        )


def no_graph_to_verify(batch: Batch, reason: Reason) -> VerificationError:
    """That no graph was captured, which a step could be tried against."""
    return VerificationError(
        "there is no graph yet that could be verified",
        got=f"{batch}: {reason.value}",
        expected="a captured graph",
        advice="capture() first",
    )


def no_graph_to_pad_to(reason: Reason) -> InvalidBatchError:
    """That no graph serves a batch, which its padding could be that of."""
    return InvalidBatchError(
        "there is no graph whose padding the step could have",
        got=reason.name,
        expected="a dispatch with Reason.HIT",
        advice="capture() before; found = runner.dispatcher.dispatch(batch), and go on where "
        "found.reason is Reason.HIT",
    )
