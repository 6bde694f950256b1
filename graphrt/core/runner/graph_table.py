"""`GraphTable`: the graphs of one runner, from their capture to their release; `PreparedStep`: one
of them, with what its capture and each of its steps need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from graphrt.core.base import errors
from graphrt.core.base._native_door import NativeReplay
from graphrt.core.base.log import logger
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.batch.descriptor import BatchDescriptor, room_for_reqs
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.constants import Lifting
from graphrt.core.capture.limit import GraphLimit
from graphrt.core.capture.options import Sealing
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.inputs.layout import StepMoves
from graphrt.core.plan.memory import MeasuredBudget
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.sizes import CaptureKey, graph_name
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.handout import LiveOutputs
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.contract import StepChecks
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.runner.weights import NamedWeights


@dataclass(frozen=True)
class GraphRecord:
    """What capturing one graph took."""

    mode: GraphMode
    descriptor: BatchDescriptor
    capture_s: float
    pool_bytes: int | None
    """Bytes by which the pool grew; None where the platform cannot tell. After a release the first
    graph's are all that the runner's own pool holds."""
    driver_bytes: int | None = None
    """Bytes that the device's driver took for the executable graphs, and for anything else at that
    time, other processes included; None where the platform cannot tell."""
    streams: int | None = None
    """Streams of the device that its graphs hold; None where the platform does not tell."""
    warm_up_s: float = 0.0
    """The seconds of `capture_s` that its warm-ups took."""
    began_s: float = 0.0
    """When its capture began, by `time.perf_counter()`."""
    replay_s: float | None = None
    """Seconds of a step by this graph; None until `GraphRunner.measure` has timed it."""
    eager_s: float | None = None
    """Seconds of its forward, run eagerly on the same padded inputs."""
    attempts: int = 1
    """How often it was captured: 2 if that failed, or disagreed with what was known of its kind."""


@dataclass(frozen=True)
class DroppedGraph:
    """A graph that did not fit on the device; its sizes run eagerly."""

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: str


class PreparedStep:
    """What the capture of one graph and its steps need: its key and slot, the `transaction` that
    can undo the capture, the `layout` with padded views of the inputs, what to `call`, and the
    `outputs` to hand out. It is made before the capture; `hold`, after it, adds what a replay
    needs. With mode NONE it is for an eager run of this size."""

    # A slot, because C reads `native` at a fixed offset.
    __slots__ = ("__dict__", "native")

    def __init__(self, graphs: GraphTable, mode: GraphMode, descriptor: BatchDescriptor) -> None:
        setup = self._setup = graphs.setup
        inputs, pool = setup.inputs, setup.pool
        self.mode, self.descriptor = mode, descriptor
        # The requests that there are rows for.
        self.reqs = room_for_reqs(descriptor, inputs.reqs)
        layout = self.layout = inputs.layout(descriptor.num_tokens, self.reqs)
        # No wrapper here where the forward has pieces of its own: running it calls theirs.
        self.wrapper = setup.wrappers.get(mode)
        self.call: Any = setup.run_forward if self.wrapper is None else self.wrapper
        # None too where inputs of this size are too large to be fetched.
        self.ring = None if self.wrapper is None or layout.fetch is None else setup.ring
        self.transaction: CaptureTransaction = CaptureTransaction(
            # -1 is no slot: an eager run has no graph.
            -1 if mode is GraphMode.NONE else graphs.dispatcher.reserve(mode, descriptor),
            # The storages that hold the inputs at every step.
            frozenset(view.untyped_storage().data_ptr() for view in layout.views.values()),
            metadata_is_declared=setup.host.metadata is not None,
            lifting=graphs.lifting,
            dispatcher=graphs.dispatcher,
        )
        self.outputs = LiveOutputs(
            descriptor,
            self.reqs,
            setup.outputs,
            pool.handed_out,
            raw_storages=pool.platform.raw_storages and setup.options.outputs != "clone",
        )
        # Where the first piece of a forward that has its own is captured; None for other graphs.
        self.pool_of_pieces: GraphPool | None = None
        # If a step is one replay of a single graph: its wrapper's entry, and the step in C.
        self.entry: Entry | None = None
        self.native: Any = None

    def __str__(self) -> str:
        return f"{self.mode.name} [{self.descriptor}]"

    @property
    def slot(self) -> int:
        """The slot that the dispatcher has reserved for this graph."""
        return self.transaction.slot

    def arguments(self, *, fresh: bool) -> dict[str, Any]:
        """The arguments of the forward, in new dicts, as the forward may change these. For an eager
        run they are `fresh`, new tensors over the same memory: the forward may give a tensor
        another shape, or other memory by `set_()`."""
        views = self.layout.views
        if fresh:
            views = {name: view.detach() for name, view in views.items()}
        return self._setup.inputs.nest(views)

    def hold(self) -> None:
        """Prepare for steps that return exactly the outputs that the wrapper has captured."""
        wrapper, setup = self.wrapper, self._setup
        if wrapper is None:
            self.pool_of_pieces = self.transaction.captured[0][0].pool
        entry = None if wrapper is None else wrapper.entries.get(self.descriptor)
        # Pieces of compiled modules have no wrapper here. A pool that was cleared has no entry:
        # until `recapture()` its steps are without a graph. The same outputs are held already.
        if wrapper is None or entry is None or entry.outputs is self.outputs.graph_outputs:
            return
        self.outputs.hold(entry.outputs)
        # A step of several pieces is run by its wrappers, which count it as one step.
        if entry.graph is None or wrapper.runtime_mode is not GraphMode.FULL:
            return
        self.entry = entry
        pool, outputs = setup.pool, self.outputs.single()
        # The step in C calls no `bind` (with one there is no ring) and no method of a pool. It
        # needs a graph that fetches its inputs and returns one tensor, over memory that torch can
        # make unreadable.
        if NativeReplay is None or outputs is None or self.ring is None:
            return
        if type(pool) is GraphPool and not setup.inputs.declared.nested:
            self.native = NativeReplay(
                entry=entry,
                pool=pool,
                pieces=pool.pieces,
                streams=pool.streams,
                ring=self.ring,
                fetch=self.layout.fetch,
                graph=entry.graph,
                stream=pool.streams.read_id,
                count=len(self.layout.fields),
                known=self.layout.known,
                shapes=self.outputs.shapes,
                moves=StepMoves,
                outputs=outputs,
            )


Span = Callable[[str, str], AbstractContextManager[object]]
"""Called with "capture" or "trial" and the graph's name; its context is entered around that work,
such as for a timeline. Leaving it a second time must do nothing."""


class GraphTable:
    """Which graphs of a runner are captured, and which were left out.

    The dispatcher gives each planned graph a slot, and serves batches by those that are published.
    Whoever destroys one withdraws it there, so `records` and the report have no graph that is gone.
    `steps` are prepared steps by slot, `records` say what each capture took. `left_out` are the
    slots that no step and no `capture_next()` tries again, with the graph if it was dropped for
    want of room, and None if it failed. The table is changed only in a turn of the pool.

    Whether the graphs still equal their forward is told by `named`, its weights, and by `checks`.
    """

    def __init__(self, setup: RunnerSetup, checks: StepChecks) -> None:
        self.dispatcher = GraphDispatcher(
            setup.plan.mode,
            max_padding=setup.options.max_padding,
            max_num_reqs=setup.inputs.reqs,
        )
        for key in setup.plan.keys:
            self.dispatcher.reserve(*key)
        # Of `max_graphs` and `graph_bytes`.
        self.limit = _limit_of(setup)
        self.steps: list[PreparedStep | None] = []
        # Of graphs that are gone too, until the next capture.
        self._records: list[GraphRecord] = []
        # The graphs that were captured, without those that a limit or a budget has ended.
        self._were: set[CaptureKey] = set()
        self.left_out: dict[int, DroppedGraph | None] = {}
        # Of bytes whose costs are measured.
        self.budget = MeasuredBudget(setup.plan) if setup.plan.is_measured else None
        if self.budget is not None and setup.pool.bytes() is None:
            raise errors.InvalidOptionError(
                "Budget(device_bytes=) needs a platform that tells the bytes of a pool",
                got=f"{setup.pool.platform.name!r}, and no costs",
                expected="bytes that can be measured, or cost=",
                advice="Budget(graphs=) limits their number",
            )
        self.sealing = Sealing(setup.options)
        self.lifting = Lifting()
        # (mode, kind) -> the most tokens that were warmed up; how many further graphs had to be;
        # and the fewest blocks that a capture has left allocated.
        self.warmed: dict[Hashable, tuple[int, int, int]] = {}
        self.named = NamedWeights(setup.forward, [module.weights for module in setup.compiled])
        self.checks = checks
        self.setup = setup
        # Whether the runner is closed: see `check_open`.
        self.closed = False
        # Entered around each capture and each trial: see `Span`.
        self.spans: list[Span] = []
        # slot -> every graph whose capture has begun: see `destroy_leftovers`.
        self.begun: dict[int, PreparedStep] = {}

    def check_open(self) -> None:
        """Raise `PoolClosedError` after `close()`, and while the interpreter shuts down: torch then
        ends the process when a tensor that has a view is freed, as in trials and eager steps."""
        if self.closed or sys.is_finalizing():
            what = "runner is closed" if self.closed else "interpreter is shutting down"
            raise errors.PoolClosedError(
                f"the {what}", advice="step before it, or in a new GraphRunner"
            )

    # The graphs -----------------------------------------------------------------------------------

    @property
    def dropped(self) -> tuple[DroppedGraph, ...]:
        """The graphs that did not fit on the device."""
        return tuple(graph for graph in self.left_out.values() if graph is not None)

    def plan(self) -> Plan:
        """The plan, with costs as far as they have been measured."""
        plan, budget = self.setup.plan, self.budget
        left_out = [key for key in plan.keys if self.dispatcher.reserve(*key) in self.left_out]
        return plan if budget is None else budget.plan(self.held, left_out)

    @property
    def held(self) -> list[CaptureKey]:
        """The graphs that are captured, in the order of captures."""
        return [(each.mode, each.descriptor) for each in self.records]

    def take_last_back(self, budget: MeasuredBudget) -> bool:
        """Destroy the graph that was captured last, for a budget; says whether that has freed
        memory. Raises `InvalidOptionError` with the last one of all."""
        platform, key = self.setup.pool.platform, self.held[-1]
        before, took = platform.driver_bytes() or 0, budget.took[key].bytes
        self.evict(key)
        self.leave_out([key])
        logger.info("took %s back: the budget has no room for it", graph_name(key))
        has_freed = budget.lose(key, before - (platform.driver_bytes() or 0))
        if not self.held:
            self.release()
            raise errors.InvalidOptionError(
                "the budget holds not one graph of the largest size",
                got=f"Budget(device_bytes={budget.most_bytes}), and {graph_name(key)} takes {took}",
                expected="room for the largest graph, whose memory the others use",
                advice=f"Budget(device_bytes={2 * took}), or a smaller max_size",
            )
        return has_freed

    def note_times(self, dispatch: Dispatch, eager_s: float, replay_s: float) -> None:
        """Note how long a step takes by this graph, and its forward eagerly."""
        for at, each in enumerate(self._records):
            if (each.mode, each.descriptor) == (dispatch.mode, dispatch.descriptor):
                self._records[at] = replace(each, eager_s=eager_s, replay_s=replay_s)

    @property
    def records(self) -> list[GraphRecord]:
        """What each graph's capture took, in the order of captures."""
        serving = {(graph.mode, graph.descriptor) for graph in self.dispatcher.published}
        return [each for each in self._records if (each.mode, each.descriptor) in serving]

    def missing(self, *, left: bool = False) -> list[CaptureKey]:
        """The planned keys that are not captured, in the order of captures; with `left` those
        without the ones in `left_out`."""
        captured = {(graph.mode, graph.descriptor) for graph in self.dispatcher.published}
        order = self.setup.plan.capture_order(limited=self.limit is not None)
        keys = [key for key in order if key not in captured]
        return [
            key for key in keys if not left or self.dispatcher.reserve(*key) not in self.left_out
        ]

    def lost(self) -> list[CaptureKey]:
        """The graphs that were there and went, by a release too, in the order of captures."""
        return [key for key in self.missing(left=True) if key in self._were]

    def leave_out(self, keys: Iterable[CaptureKey]) -> None:
        """Note that those of these graphs that are not captured have failed."""
        captured = self.dispatcher.published
        slots = {self.dispatcher.reserve(*key) for key in keys} - {graph.slot for graph in captured}
        self.left_out.update(dict.fromkeys(slots - self.left_out.keys()))

    def owners(self) -> list[GraphWrapper]:
        """The runner's wrappers, and those inside the forward that captured a piece."""
        owners: list[GraphWrapper] = [*self.setup.wrappers.values()]
        # A copy: a report may be asked for in another thread than captures.
        for graph in list(self.begun.values()):
            owners += [owner for owner, _ in graph.transaction.captured]
        return list({id(owner): owner for owner in owners}.values())

    def entries(self, only: Collection[BatchDescriptor] | None = None) -> list[Entry]:
        """The graphs of all wrappers, with `only` those of these descriptors."""
        entries = [entry for wrapper in self.owners() for entry in wrapper.entries.values()]
        return [entry for entry in entries if only is None or entry.descriptor in only]

    def check(self) -> None:
        """Raise the errors of `GraphRunner.weights_changed`, for weights and modules. From then on
        steps that are checked run eagerly."""
        try:
            for module in self.setup.compiled:
                module.weights_changed()
            if self.records:
                self.checks.check_weights(self)
        except errors.GraphRTError as error:
            if not isinstance(error, errors.UntrackedWeightsError):
                self.checks.set_aside(error)
            raise

    # Their capture and release --------------------------------------------------------------------

    def publish(self, graph: PreparedStep, record: GraphRecord) -> None:
        """Serve batches with a graph from now on; raises `CaptureError` if no wrapper took part."""
        if not graph.transaction.captured:
            raise errors.CaptureError(
                "no wrapper in the forward captured a graph",
                got=f"{graph} and no wrapper of that mode",
                expected="a GraphWrapper for every piece",
                advice='wrap the pieces, or use pieces="breakable"',
            )
        pools = {owner.pool for owner, _ in graph.transaction.captured}
        if (self.limit or self.budget) is not None and pools != {self.setup.pool}:
            raise errors.CaptureError(
                "under a limit, or a budget in bytes, all graphs must be in the runner's own pool",
                got=f"{graph} in another one",
                advice="give the wrappers of its pieces and the runner one pool=",
            )
        self.steps += [None] * (graph.slot + 1 - len(self.steps))
        self.steps[graph.slot] = graph
        self._records.append(record)
        self._were.add((graph.mode, graph.descriptor))
        if self.budget is not None:
            key = graph.mode, graph.descriptor
            self.budget.note(key, record.pool_bytes, record.driver_bytes)
        logger.info("captured %s in %.3f s", graph, record.capture_s)
        # Last: from this store on steps are dispatched to the graph.
        self.dispatcher.publish(graph.mode, graph.descriptor)

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper."""
        for module in self.setup.compiled:
            # Raises where one has changed since.
            module.weights_changed()
        self.sealing.close()
        for owner in self.owners():
            owner.seal()
        for module in self.setup.compiled:
            module.seal()

    def release(self) -> None:
        """Destroy all graphs; every key stays reserved, and may be captured again."""
        self.dispatcher.withdraw_all()
        self.left_out.clear()
        self.warmed.clear()
        if self.budget is not None:
            self.budget.clear()
        self.sealing.open()
        for module in self.setup.compiled:
            module.unseal()
        self.steps.clear()
        self.setup.outputs.forget()
        self.destroy_leftovers()
        # Last: until then graphs may read what the checks keep alive.
        self.checks.reset()

    def release_outdated(self) -> None:
        """Destroy the graphs that may be wrong by now, and no others. What was never captured stays
        in `left_out`."""
        left_out = dict(self.left_out)
        self._release_outdated()
        self.left_out.update(left_out)
        for key in self._were:  # one whose last capture failed is tried again
            self.left_out.pop(self.dispatcher.reserve(*key), None)

    def _release_outdated(self) -> None:
        try:
            for module in self.setup.compiled:
                module.weights_changed()
        except errors.GraphRTError as error:
            # The capture that follows says so too, where it is for good.
            logger.info("all graphs are captured again: %s", error)
            return self.release()
        count = len(self.dispatcher.published)
        while self.dispatcher.published and (slots := self.checks.outdated(self)):
            for each in self.dispatcher.published:
                if each.slot in slots:
                    self.dispatcher.withdraw(each.mode, each.descriptor)
                    self.steps[each.slot] = None
            self.destroy_leftovers()
        if not self.dispatcher.published:
            return self.release()
        self.named.record()
        logger.info("%d of %d graphs stay", len(self.dispatcher.published), count)

    def destroy_leftovers(self) -> None:
        """Destroy the graphs that the dispatcher does not serve, the last first: of a capture that
        failed, or a release. Called again it goes on."""
        self._records[:] = self.records
        serving = {graph.slot for graph in self.dispatcher.published}
        for slot in [slot for slot in reversed(self.begun) if slot not in serving]:
            self.begun[slot].transaction.rollback()
            self.checks.dropped(slot)
            del self.begun[slot]

    def evict(self, key: CaptureKey) -> None:
        """Destroy a graph, for `limit` or `budget`."""
        self._were.discard(key)
        self.dispatcher.withdraw(*key)
        self.steps[self.dispatcher.reserve(*key)] = None
        self.destroy_leftovers()


def _limit_of(setup: RunnerSetup) -> GraphLimit | None:
    options, modes = setup.options, {mode.name for mode, _ in setup.plan.keys}
    if options.max_graphs is not None and options.max_graphs < len(modes):
        raise errors.InvalidOptionError(
            "max_graphs is too small: the largest graph of each mode always stays",
            got=f"max_graphs={options.max_graphs}",
            expected=f"one each for {', '.join(sorted(modes))}",
            advice=f"max_graphs={len(modes)} at least, or another mode=",
        )
    return GraphLimit.of(options, setup.pool, ranked=setup.host.ranks is not None)
