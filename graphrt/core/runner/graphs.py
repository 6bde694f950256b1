"""`GraphSet`: the graphs of one runner, from capture to release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphrt.core.base.errors import (
    CaptureError,
    GraphsDroppedWarning,
    ResourceExhaustedError,
    StaleInputError,
)
from graphrt.core.base.log import logger
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.state import SavedState, State
from graphrt.core.capture.transaction import CaptureTransaction
from graphrt.core.capture.wrapper import GraphWrapper, WrapperOptions
from graphrt.core.device.lookup import wrapper_class
from graphrt.core.dispatch.dispatcher import Dispatch, GraphDispatcher
from graphrt.core.inputs.outputs import OutputAxes
from graphrt.core.inputs.static import StaticInputs
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import SegmentHooks
from graphrt.core.replay.tasks import WORST_CASE
from graphrt.core.runner.parts import Compilable, compilables
from graphrt.core.runner.session import (
    DroppedGraph,
    GraphRecord,
    Phase,
    PlannedGraph,
    Progress,
    WarmUps,
    capture_graphs,
)
from graphrt.core.runner.step import StepPlan
from graphrt.core.trust.weights import AddressBook, Parameters

Bind = Callable[[Mapping[str, torch.Tensor], BatchDescriptor, Phase], None]
CaptureContext = Callable[[], AbstractContextManager[object]]


class GraphSet:
    """Wraps a forward, captures it for each key, and publishes what is complete.

    `plans` holds what a step needs, by the dispatcher's slot; `records` what each capture took.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        keys: Iterable[CaptureKey],
        *,
        mode: GraphMode,
        pieces: PieceProvider | None,
        options: GraphOptions,
        pool: GraphPool,
        inputs: StaticInputs,
        outputs: OutputAxes,
        bind: Bind | None = None,
        state: Iterable[State | torch.Tensor] = (),
        parameters: Parameters = None,
        capture_context: CaptureContext = nullcontext,
        segment_hooks: SegmentHooks | None = None,
    ) -> None:
        self.keys = tuple(keys)
        self.plans: list[StepPlan | None] = []
        self.records: list[GraphRecord] = []
        self.dropped: list[DroppedGraph] = []
        self.sealed = False
        self.eager_launch = options.launch == "eager"
        self.dispatcher = GraphDispatcher(mode, max_padding=options.max_padding)
        for key in self.keys:
            self.dispatcher.reserve(*key)
        self.addresses = AddressBook(parameters)
        self._forward = forward
        self._options = options
        self._pool = pool
        self._inputs = inputs
        self._outputs = outputs
        self._bind = bind
        self.state = tuple(state)
        self._capture_context = capture_context
        self.run_forward = _without_gradients(forward)
        self._wrappers = self._wrap(mode, pieces, segment_hooks)
        self._captured: list[tuple[GraphWrapper, BatchDescriptor]] = []
        self._failed: set[int] = set()
        self._tell_sizes(compilables(forward))

    def capture_missing(self, progress: Progress | None = None) -> None:
        """Capture what is not captured yet, then seal."""
        self.dropped.clear()
        captured = {(found.mode, found.descriptor) for found in self.dispatcher.published}
        before = len(self.records)
        self.capture([key for key in self.keys if key not in captured], progress)
        self.seal()
        new = self.records[before:]
        logger.info("captured %d graphs in %.2f s", len(new), sum(each.capture_s for each in new))
        if self.dropped:
            self._tell_dropped()

    def capture(self, keys: Iterable[CaptureKey], progress: Progress | None = None) -> None:
        """Capture and publish the graphs of `keys` in their order."""
        if self.records:
            # Graphs that are captured already read the old addresses.
            self.check_weights()
        else:
            self.addresses.record()
        saved = SavedState(self.state, self._options.state_limit_bytes)
        planned = [
            PlannedGraph(*key, self.dispatcher.reserve(*key), self._plan(*key)) for key in keys
        ]
        self._pool.check_idle()
        self._compile(planned[0].plan if planned else None, saved)
        if self.eager_launch:
            for graph in planned:
                self._add(graph, GraphRecord(graph.mode, graph.descriptor, 0.0, 0))
            return
        try:
            capture_graphs(
                planned,
                pool=self._pool,
                warm_ups=WarmUps(
                    self._options.warmups,
                    each=self._options.warm_up_each,
                    # What `bind` does may depend on the descriptor; inputs depend on the size.
                    alike=self._bind is None,
                ),
                bind=self._prepare,
                state=saved,
                capture_context=self._capture_context,
                publish=self._publish,
                drop=self._drop,
                progress=progress,
            )
        finally:
            if planned:
                self._inputs.reset()

    def wanted(
        self,
        batch: Batch,
        found: Dispatch,
        at_least: int = 0,
        at_most_mode: GraphMode | None = None,
    ) -> Dispatch | None:
        """The planned graph that would serve `batch` better than what was found, or None."""
        planned = self.dispatcher.planned_for(batch, at_least=at_least, at_most_mode=at_most_mode)
        if planned is None or planned.slot in self._failed:
            return None
        better = found.slot < 0 or _preference(planned) < _preference(found)
        return planned if better else None

    def capture_wanted(self, wanted: Dispatch) -> None:
        """Capture one graph while serving; one that fails is not tried again at every step."""
        self._failed.add(wanted.slot)
        dropped = len(self.dropped)
        self.capture([(wanted.mode, wanted.descriptor)])
        if len(self.dropped) == dropped:
            self._failed.discard(wanted.slot)

    def check_weights(self) -> None:
        """Raise `StaleInputError` if weights are no longer where the graphs read them."""
        self.addresses.check()
        moved = [name for part in compilables(self._forward) for name in part.moved_weights()]
        if moved and self.records:
            raise StaleInputError(
                "weights are not where the graphs read them",
                got=", ".join(moved[:8]),
                expected="values written in place, as by copy_()",
                advice="call recapture()",
            )

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper."""
        self.sealed = True
        for wrapper in self.wrappers():
            wrapper.seal()
        for part in compilables(self._forward):
            part.seal()

    def release(self) -> None:
        """Destroy all graphs of this set; every key stays reserved."""
        self._pool.check_idle()
        self.dispatcher.withdraw_all()
        self.records.clear()
        self.dropped.clear()
        self.plans.clear()
        self._failed.clear()
        self.sealed = False
        for part in compilables(self._forward):
            part.unseal()
        captured, self._captured = self._captured, []
        for wrapper, descriptor in reversed(captured):
            wrapper.drop(descriptor)

    def wrappers(self) -> list[GraphWrapper]:
        """The own wrappers, and those inside the forward that captured a piece."""
        found = {id(wrapper): wrapper for wrapper in self._wrappers.values()}
        found.update((id(wrapper), wrapper) for wrapper, _ in self._captured)
        return list(found.values())

    def _tell_sizes(self, parts: Iterable[Compilable]) -> None:
        for part in parts:
            part.use_capture_sizes({descriptor.num_tokens for _, descriptor in self.keys})

    def _compile(self, plan: StepPlan | None, saved: SavedState) -> None:
        """Run one eager step if a part of the forward has yet to be compiled.

        Without a `plan`, as where no graph is planned, it is one of all rows.
        """
        parts = compilables(self._forward)
        self._tell_sizes(parts)
        for part in parts:
            part.rebind_weights()
        pending = [part for part in parts if not part.compiled]
        if not pending:
            return
        for part in pending:
            part.unseal()
        if plan is None:
            rows = BatchDescriptor(self._inputs.tokens, self._inputs.reqs)
            plan = self._plan(GraphMode.NONE, rows)
        context = ForwardContext(
            GraphMode.NONE, plan.descriptor, updates=WORST_CASE, num_reqs=plan.reqs
        )
        try:
            with self._capture_context(), self._pool.owned_by(context), context:
                self._prepare(plan, "warmup")
                self.run_forward(**plan.arguments())
        finally:
            saved.restore()
            self._inputs.reset()

    def _wrap(
        self, mode: GraphMode, pieces: PieceProvider | None, hooks: SegmentHooks | None
    ) -> dict[GraphMode, GraphWrapper]:
        """A FULL wrapper around a breakable PIECEWISE one, as far as the mode asks for them."""
        options = self._options
        wrap = wrapper_class(self._pool.platform)
        common: dict[str, Any] = {
            "outputs": options.outputs,
            "breaks": frozenset(options.breaks),
            "strict": options.strict,
            "check_addresses": options.check_addresses,
            "segment_hooks": hooks,
            "share_executables": options.share_executables,
            "eager_after_failed_update": options.eager_after_failed_update,
        }
        for part in compilables(self._forward):
            # The runner itself clones what comes out of several graphs.
            outputs = "static" if options.outputs == "static" else "pool"
            part.use_wrapper_options(
                WrapperOptions(**{**common, "outputs": outputs, "breaks": frozenset()})
            )
        wrappers: dict[GraphMode, GraphWrapper] = {}
        inner = self._forward
        if mode.has_piecewise and pieces is PieceProvider.BREAKABLE:
            inner = wrappers[GraphMode.PIECEWISE] = wrap(
                inner,
                GraphMode.PIECEWISE,
                pool=self._pool,
                options=WrapperOptions(breakable=True, **common),
            )
        if mode.has_full:
            wrappers[GraphMode.FULL] = wrap(
                inner, GraphMode.FULL, pool=self._pool, options=WrapperOptions(**common)
            )
        return wrappers

    def _plan(self, mode: GraphMode, descriptor: BatchDescriptor) -> StepPlan:
        # Pieces that the forward brings along itself are reached by running it.
        wrapper = None if self.eager_launch else self._wrappers.get(mode)
        call = self.run_forward if wrapper is None else wrapper
        return StepPlan(
            descriptor,
            self._inputs,
            call,
            self._outputs,
            same_outputs=wrapper is not None and self._options.outputs != "clone",
        )

    def _prepare(self, plan: StepPlan, phase: Phase) -> None:
        self._inputs.reset(plan.layout)
        if self._bind is not None:
            self._bind(plan.views, plan.descriptor, phase)

    def _publish(
        self, graph: PlannedGraph, record: GraphRecord, transaction: CaptureTransaction
    ) -> None:
        captured = transaction.commit()
        if not captured:
            raise CaptureError(
                "nothing captured anything in the forward",
                got=f"{graph.mode.name} [{graph.descriptor}] and no wrapper of that mode",
                expected="a GraphWrapper for every piece",
                advice='wrap the pieces, or use pieces="breakable"',
            )
        self._captured += captured
        graph.plan.task_names = frozenset(transaction.task_names)
        self._add(graph, record)

    def _add(self, graph: PlannedGraph, record: GraphRecord) -> None:
        self.plans.extend([None] * (graph.slot + 1 - len(self.plans)))
        self.plans[graph.slot] = graph.plan
        self.records.append(record)
        logger.debug("%s [%s] in %.3f s", graph.mode.name, graph.descriptor, record.capture_s)
        self.dispatcher.publish(graph.mode, graph.descriptor)

    def _drop(self, graph: PlannedGraph, error: ResourceExhaustedError) -> None:
        self.dropped.append(DroppedGraph(graph.mode, graph.descriptor, str(error)))

    def _tell_dropped(self) -> None:
        names = ", ".join(f"{each.mode.name} [{each.descriptor}]" for each in self.dropped)
        if self._options.strict:
            raise ResourceExhaustedError(
                f"{len(self.dropped)} of {len(self.keys)} graphs did not fit on the device",
                got=f"{names}\n  the first: {self.dropped[0].reason}",
                expected="every planned graph (strict=True)",
                advice="capture fewer sizes, or leave the KV cache less memory; what is captured "
                "serves",
            )
        warnings.warn(
            f"{len(self.dropped)} of {len(self.keys)} graphs did not fit on the device and run "
            f"eagerly: {names}; the first: {self.dropped[0].reason}",
            GraphsDroppedWarning,
            stacklevel=4,
        )


def _preference(found: Dispatch) -> tuple[bool, int]:
    return found.mode is not GraphMode.FULL, found.descriptor.num_tokens


def _without_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward itself, which runs eagerly unless the context says otherwise."""

    def run_forward(**arguments: Any) -> Any:
        with torch.no_grad():
            return forward(**arguments)

    return run_forward
