"""`GraphSet`: the graphs of one runner, from capture to release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import (
    CaptureError,
    GraphRTError,
    ResourceExhaustedError,
    StaleInputError,
)
from graphrt.core.base.log import logger
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.sealing import Sealing
from graphrt.core.capture.state import SavedState, as_states
from graphrt.core.capture.transaction import Captured, CaptureTransaction, GraphOwner
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.output_axes import OutputAxes
from graphrt.core.inputs.outputs import OutputLayout
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay._turn import Doing
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.host_args import WORST_CASE
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner._dropped import DroppedGraph
from graphrt.core.runner._lazy import LazyCaptures
from graphrt.core.runner._wrappers import EagerForward, wrappers_of
from graphrt.core.runner.compiled import CompiledModules
from graphrt.core.runner.host import Host, Phase
from graphrt.core.runner.session import (
    Enough,
    GraphRecord,
    PlannedGraph,
    Progress,
    WarmUps,
    capture_graphs,
)
from graphrt.core.runner.steps.checks import Checks
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.trust.gradients import Gradients
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.warm_up import WarmedUp, WatchedState
from graphrt.core.trust.watching.pointers import UnknownMemory


class GraphSet:
    """Wraps a forward, captures it for each key, and publishes what is complete.

    `steps` holds what a step needs, by the dispatcher's slot; `records` what each capture took.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        plan: Plan,
        host: Host,
        *,
        options: GraphOptions,
        pool: GraphPool,
        inputs: StaticInputs,
        outputs: OutputAxes,
    ) -> None:
        self.steps: list[PaddedStep | None] = []
        self.records: list[GraphRecord] = []
        self.dropped: list[DroppedGraph] = []
        self.sealing = Sealing(options)
        self.eager_launch = options.launch == "eager"
        self.dispatcher = GraphDispatcher(plan.mode, max_padding=options.max_padding)
        for key in plan.keys:
            self.dispatcher.reserve(*key)
        self.state = tuple(host.state)
        # Of the pool, in every step and in whatever changes the graphs: see `Turn`.
        self.owner = Doing("a step, or a capture, of a runner")
        self._plan = plan
        self._host = host
        self._options = options
        self._pool = pool
        self._inputs = inputs
        self._outputs = OutputLayout(outputs)
        self._compiled = CompiledModules(plan.compiled)
        self._sizes = {descriptor.num_tokens for _, descriptor in plan.keys}
        lengths = {descriptor.query_len for _, descriptor in plan.keys}
        self._query_len = lengths.pop() if len(lengths) == 1 else None
        self._compiled.tell_sizes(self._sizes)
        self.gradients = Gradients(
            inputs.graded,
            # Compiled code has none in any case.
            on=options.checks("capture") and not self._compiled.modules,
            # A plain hit looks at no weights.
            of_weights=options.checks("sample"),
        )
        self.run_forward = EagerForward(forward, self.gradients)
        watches = options.checks("capture") and not self.eager_launch
        self.reads = ReadSet(
            forward,
            host.parameters,
            [module.weights for module in self._compiled.modules],
            watched=watches,
            has_full=plan.mode.has_full,
        )
        self.warmed_up: dict[Hashable, WarmedUp] = {}
        shown_by = frozenset() if host.mixes_rows else inputs.padding.with_rows
        self.checks = Checks(
            options,
            self.reads if watches else None,
            pool.platform.device_type,
            shown_by,
            self.gradients,
        )
        self.checks.on &= not self.eager_launch
        self.forward = forward
        self.mixes_rows = host.mixes_rows
        # What graphs fetch is not there yet when `bind` is called, which may read or write it.
        self._ring = None if self.eager_launch or host.bind is not None else inputs.ring
        self._wrappers = wrappers_of(
            forward, plan, options, pool, host.around_graph, self._compiled, self._ring
        )
        # By slot. What the dispatcher does not serve is left of a release that was interrupted.
        self._kept: dict[int, list[Captured]] = {}
        self._warm_ups = WarmUps.of(options, host)
        self.lazy = LazyCaptures(self.dispatcher, pool, self.dropped, self.checks)

    def capture(
        self,
        keys: Iterable[CaptureKey],
        progress: Progress | None = None,
        enough: Enough | None = None,
    ) -> None:
        """Capture and publish the graphs of `keys` in their order, until there are `enough`.

        This and whatever else changes the graphs is called in a turn of `owner`.
        """
        undo = Undo()
        try:
            self._pool._will_put_back("a capture", undo.later)
            self._capture(keys, progress, enough)
            undo.now()
        except BaseException:
            undo.now()
            raise

    def _capture(
        self, keys: Iterable[CaptureKey], progress: Progress | None, enough: Enough | None
    ) -> None:
        # What is saved, and what is padded, may be in use by steps on another stream.
        self._pool.follow_stream()
        # What an interrupted release has left.
        published = self.dispatcher.published
        self._let_go(self._kept.keys() - {found.slot for found in published})
        standing = {(found.mode, found.descriptor) for found in published}
        self.records[:] = [own for own in self.records if (own.mode, own.descriptor) in standing]
        if self.records:
            # Graphs that are captured already read the old addresses.
            self.reads.check_named()
            self.checks.check_settings()
        saved, more = self._saved_state(), enough is not None
        planned = [
            PlannedGraph(*key, self.dispatcher.reserve(*key), self._step(*key)) for key in keys
        ]
        self._compile(planned[0].step if planned else None, saved)
        if not self.records:
            self.reads.record()
        # State that is found has to be found, and streams to be counted, in every session.
        counts = self._pool.platform.stream_room() is not None
        self._warm_ups.begin(keep=not self.reads.watched and not counts)
        try:
            if self.eager_launch:
                self._see_all(planned, saved, enough)
                return
            capture_graphs(
                planned,
                pool=self._pool,
                warm_ups=self._warm_ups,
                bind=self._prepare,
                enlist=self._compiled.enlist,
                state=saved,
                host=self._host,
                publish=self._publish,
                take_back=self._take_back,
                drop=self._drop,
                settle=partial(self._settle, saved, more),
                owner=self.owner,
                progress=progress,
                enough=enough,
            )
        except BaseException as error:
            self._settle_or_release(saved if isinstance(error, Exception) else None, more)
            raise
        finally:
            if planned:
                self._pool.follow_stream()
                self._inputs.reset()

    def check_weights(self) -> None:
        """Raise `StaleInputError` if weights are no longer where the graphs read them, and
        `UntrackedWeightsError` if nobody can say."""
        if not self.records or self.eager_launch:
            return
        try:
            self.reads.check(self.entries(), self._pool, self.own_tensors())
        except StaleInputError as error:
            self.checks.set_aside(error)
            raise

    def check_modules(self) -> None:
        """Raise the error of a compiled module that has changed, and `StaleInputError` if graphs
        read what was replaced."""
        try:
            self._compiled.check()
            if self.records and not self.eager_launch:
                self.reads.check_replaced()
        except GraphRTError as error:
            self.checks.set_aside(error)
            raise

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper."""
        self._compiled.check()
        self.sealing.close()
        for owner in self.owners():
            owner.seal()
        self._compiled.seal()

    def release(self) -> None:
        """Destroy all graphs of this set; every key stays reserved."""
        self.dispatcher.withdraw_all()
        self.records.clear()
        self.dropped.clear()
        self.steps.clear()
        self.lazy.failed.clear()
        self._warm_ups.begin(keep=False)
        self.sealing.open()
        self._outputs.forget()
        self._compiled.unseal()
        self.warmed_up.clear()
        self.checks.reset()
        self._let_go(self._kept.keys())
        self.reads.forget()

    def owners(self) -> list[GraphOwner]:
        """The own wrappers, and whatever inside the forward captured a piece."""
        found: dict[int, GraphOwner] = {id(own): own for own in self._wrappers.values()}
        # A copy: a report may be asked for in another thread than captures.
        for kept in list(self._kept.values()):
            found.update((id(each.owner), each.owner) for each in kept)
        return list(found.values())

    def entries(self, only: Collection[BatchDescriptor] | None = None) -> list[Entry]:
        """The graphs of all wrappers, with `only` those of these descriptors."""
        wrappers = [each for each in self.owners() if isinstance(each, GraphWrapper)]
        entries = [entry for wrapper in wrappers for entry in wrapper.entries.values()]
        return [entry for entry in entries if only is None or entry.descriptor in only]

    def own_tensors(self) -> list[torch.Tensor]:
        """The inputs, and declared state."""
        own = [*self._inputs.buffers.values()]
        # On the CPU every view is a storage of its own, and starts elsewhere at another size.
        own += [view for step in self.steps if step for view in step.layout.views.values()]
        return own + [s.tensor for s in as_states(self.state) if s.tensor is not None]

    def unknown_memory(
        self, only: Collection[BatchDescriptor] | None = None
    ) -> UnknownMemory | None:
        """What nodes of the graphs may touch that nobody knows of: see `ReadSet`. None if there are
        no graphs."""
        if not self.records:
            return None
        return self.reads.unknown_memory(self.entries(only), self._pool, self.own_tensors())

    def keep_touched(self, only: Collection[BatchDescriptor]) -> None:
        """Count as read what nodes of these graphs point to and the forward holds."""
        self.reads.keep_touched(self.entries(only), self._pool, self.own_tensors())

    def unbroken(self) -> int:
        """How many PIECEWISE graphs of the own wrapper have no eager part."""
        wrapper = self._wrappers.get(GraphMode.PIECEWISE)
        return 0 if wrapper is None else sum(not e.breaks for e in wrapper.entries.values())

    def _saved_state(self) -> WatchedState:
        limit = self._options.state_limit(self._pool.platform)
        return WatchedState(
            SavedState(self.state, limit),
            limit_bytes=limit,
            forward=self.forward,
            reads=self.reads if self.reads.watched else None,
            warmed_up=self.warmed_up,
            pads=self._inputs.padding.addresses,
            device_type=self._pool.platform.device_type,
            is_in_graphs=partial(self._pool.platform.owns, self._pool.memory),
            each_warmed_up=self._options.warm_up_each,
            has_parts=self._plan.mode.has_piecewise,
        )

    def _compile(self, step: PaddedStep | None, saved: WatchedState) -> None:
        """Run one eager step if a module of the forward has yet to be compiled.

        Without a `step`, as where no graph is planned, it is one of all rows.
        """
        if not self._compiled.prepare(self._sizes):
            return
        if step is None:
            rows = BatchDescriptor(self._inputs.tokens, self._inputs.reqs)
            step = self._step(GraphMode.NONE, rows)
        with self._host.around():
            self._see(step, saved)

    def _see_all(
        self, planned: Iterable[PlannedGraph], saved: WatchedState, enough: Enough | None
    ) -> None:
        for graph in planned:
            if enough is not None and enough(graph):
                break
            self._see(graph.step, saved)
            self._add(graph, GraphRecord(graph.mode, graph.descriptor, 0.0, 0))
        self._settle(saved, enough is not None)

    def _see(self, step: PaddedStep, saved: WatchedState) -> None:
        """Run one eager step, as a warm-up, and note what it returns."""
        named = step.descriptor
        context = ForwardContext(GraphMode.NONE, named, updates=WORST_CASE, num_reqs=step.reqs)
        context.enlist = self._compiled.enlist
        context.metadata = self._host.at_bound(named)
        undo = Undo()
        try:
            undo.later(self._inputs.reset)
            undo.later(saved.restore)
            undo.later(partial(self._pool._pass_to, self.owner))
            self._pool._pass_to(context)
            undo.later(context.leave)
            with context:
                self._prepare(step, "warmup")
                call = partial(self.run_forward, **step.fresh_arguments())
                step.see(saved.run(None, step.tokens, step.storages(), call))
            undo.now()
        except BaseException:
            undo.now()
            # That may be what had failed; and who looks for axes goes on after errors.
            saved.restore()
            raise

    def _settle(self, saved: WatchedState | None, more: bool) -> None:
        """Find the batch axes of the outputs, if need be and `saved` is there with eager steps, and
        prepare what hands them out; then what the forward reads, and what steps are to check."""

        def probe(tokens: int, reqs: int) -> None:
            assert saved is not None
            rows = BatchDescriptor(tokens, reqs, query_len is not None, query_len=query_len)
            self._see(self._step(GraphMode.NONE, rows), saved)

        query_len = self._query_len
        if saved is not None:
            saved.settle(partial(self._outputs.resolve, probe, query_len=query_len))
        else:
            self._outputs.resolve(None, query_len=query_len)
            if self.reads.watched:
                self.reads.settle()
        self.checks.captured(self.dispatcher.published, more=more)
        if self.eager_launch or self._options.outputs == "clone":
            return
        for record in self.records:
            wrapper = self._wrappers.get(record.mode)
            step = self.steps[self.dispatcher.reserve(record.mode, record.descriptor)]
            if wrapper is not None and step is not None:
                step.hold(
                    wrapper, self._inputs, self._pool, self._host.bind, self.gradients.of_inputs
                )

    def _settle_or_release(self, saved: WatchedState | None, more: bool) -> None:
        """After a capture that failed, serve the graphs before it if it is known how."""
        try:
            with self._host.around():
                self._settle(saved, more)
        except GraphRTError:
            self.release()

    def _step(self, mode: GraphMode, descriptor: BatchDescriptor) -> PaddedStep:
        # Pieces that the forward brings along itself are reached by running it.
        wrapper = None if self.eager_launch else self._wrappers.get(mode)
        call = self.run_forward if wrapper is None else wrapper
        owned, ring = self._options.outputs == "clone", None if wrapper is None else self._ring
        return PaddedStep(descriptor, self._inputs, call, self._outputs, ring, owned=owned)

    def _prepare(self, step: PaddedStep, phase: Phase) -> None:
        # Outputs of the step before may lie in the buffers.
        self._pool._expire_outputs()
        self._inputs.reset(step.layout)
        if step.ring is not None and phase == "capture":
            self._inputs.expect_capture(step.layout)
        if self._host.bind is not None:
            self._host.bind(step.readable, step.descriptor, phase)

    def _publish(
        self, graph: PlannedGraph, record: GraphRecord, transaction: CaptureTransaction
    ) -> None:
        if not transaction.captured:
            raise CaptureError(
                "nothing captured anything in the forward",
                got=f"{graph.mode.name} [{graph.descriptor}] and no wrapper of that mode",
                expected="a GraphWrapper for every piece",
                advice='wrap the pieces, or use pieces="breakable"',
            )
        self._kept[graph.slot] = list(transaction.captured)
        graph.step.task_names = frozenset(transaction.task_names)
        self._add(graph, record)
        transaction.commit()

    def _take_back(self, graph: PlannedGraph, transaction: CaptureTransaction) -> None:
        self.dispatcher.withdraw(graph.mode, graph.descriptor)
        key = graph.mode, graph.descriptor
        self.records[:] = [each for each in self.records if (each.mode, each.descriptor) != key]
        transaction.rollback()
        self._let_go({graph.slot})

    def _let_go(self, slots: Collection[int]) -> None:
        """Destroy what was captured for these slots, the last first; called again it goes on."""
        for slot in [slot for slot in reversed(self._kept) if slot in slots]:
            for each in reversed(self._kept[slot]):
                each.undo()
            del self._kept[slot]

    def _add(self, graph: PlannedGraph, record: GraphRecord) -> None:
        self.steps += [None] * (graph.slot + 1 - len(self.steps))
        self.steps[graph.slot] = graph.step
        self.records.append(record)
        logger.debug("%s [%s] in %.3f s", graph.mode.name, graph.descriptor, record.capture_s)
        self.dispatcher.publish(graph.mode, graph.descriptor)

    def _drop(self, graph: PlannedGraph, error: ResourceExhaustedError) -> None:
        self.dropped.append(DroppedGraph(graph.mode, graph.descriptor, str(error)))
