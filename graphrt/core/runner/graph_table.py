"""`GraphTable`: the graphs of one runner, from their capture to their release."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphrt.core.base._warnings import GraphsDroppedWarning, warn_caller
from graphrt.core.base.errors import (
    CaptureError,
    GraphRTError,
    ResourceExhaustedError,
    UntrackedWeightsError,
)
from graphrt.core.base.homes import public
from graphrt.core.base.log import logger
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.sealing import Sealing
from graphrt.core.capture.state import as_states
from graphrt.core.capture.transaction import Captured, CaptureTransaction, GraphOwner
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.plan.budget import alike
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay._turn import PoolOwner
from graphrt.core.replay.entry import Entry
from graphrt.core.runner.checks import Checks
from graphrt.core.runner.prepared import PreparedStep
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.warm_up import WarmedUp
from graphrt.core.trust.watching.pointers import UnknownMemory


@public("graphrt.types")
@dataclass(frozen=True)
class GraphRecord:
    """What capturing one graph took."""

    mode: GraphMode
    descriptor: BatchDescriptor
    capture_s: float
    pool_bytes: int | None
    """Bytes by which the pool grew; None where the platform cannot tell."""
    driver_bytes: int | None = None
    """Bytes that the device's driver took for the executable graphs, with what else it took
    meanwhile, for other processes too; None where the platform cannot tell."""
    streams: int | None = None
    """Streams of the device that its graphs hold; None where the platform does not tell."""


@public("graphrt.types")
@dataclass(frozen=True)
class DroppedGraph:
    """A graph that did not fit on the device; its sizes run eagerly."""

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: str


class PlannedGraph(NamedTuple):
    """A graph to capture: its key, its slot, and the step it will serve."""

    mode: GraphMode
    descriptor: BatchDescriptor
    slot: int
    step: PreparedStep

    def __str__(self) -> str:
        return f"{self.mode.name} [{self.descriptor}]"


class GraphTable:
    """Which graphs of a runner are captured, and which were left out.

    The dispatcher gives each planned graph a slot, and serves batches by those that are published.
    `steps` has by slot what a step needs, `records` what each capture took. `left_out` are the
    slots that no step and no `capture_next()` tries again, with the graph if it was dropped for
    want of room, and None if it failed. What changes the table does so in a turn of `owner`.

    Whether the graphs still stand for their forward is known by `reads`, what they read; `checks`,
    what steps look at; and `warmed_up`, what the warm-up of each kind did.
    """

    def __init__(self, setup: RunnerSetup) -> None:
        self.dispatcher = GraphDispatcher(setup.plan.mode, max_padding=setup.options.max_padding)
        for key in setup.plan.keys:
            self.dispatcher.reserve(*key)
        self.steps: list[PreparedStep | None] = []
        self.records: list[GraphRecord] = []
        self.left_out: dict[int, DroppedGraph | None] = {}
        self.sealing = Sealing(setup.options)
        # Of the pool, in every step and in whatever changes the graphs: see `Turn`.
        self.owner = PoolOwner("a step, or a capture, of a runner")
        options, host, compiled = setup.options, setup.host, setup.compiled.modules
        self.reads = ReadSet(
            setup.forward,
            host.parameters,
            [module.weights for module in compiled],
            watched=options.checks("capture") and not setup.eager_launch,
            has_full=setup.plan.mode.has_full,
        )
        self.warmed_up: dict[Hashable, WarmedUp] = {}
        self.checks = Checks(
            options,
            self.reads if self.reads.watched else None,
            setup.pool.platform.device_type,
            frozenset() if host.mixes_rows else setup.inputs.padding.with_rows,
            setup.run_forward.gradients,
        )
        self.checks.on &= not setup.eager_launch
        self.wrappers = setup.wrappers()
        self.setup = setup
        # By slot. What the dispatcher does not serve is left of a release that was interrupted.
        self._captured: dict[int, list[Captured]] = {}

    # What there is ------------------------------------------------------------------------------

    @property
    def dropped(self) -> tuple[DroppedGraph, ...]:
        """The graphs that did not fit on the device."""
        return tuple(graph for graph in self.left_out.values() if graph is not None)

    def missing(self, keys: Iterable[CaptureKey]) -> list[CaptureKey]:
        """Those of the keys that are not captured."""
        there = {(graph.mode, graph.descriptor) for graph in self.dispatcher.published}
        return [key for key in keys if key not in there]

    def better_for(
        self, batch: Batch, found: Dispatch, agreed: Agreed | None = None
    ) -> Dispatch | None:
        """The planned graph that would serve `batch` better than what was found, or None."""
        planned = self.dispatcher.planned_for(batch, agreed=agreed)
        if planned is None or (found.slot >= 0 and not preferred(planned, found)):
            return None
        return planned

    def owners(self) -> list[GraphOwner]:
        """The own wrappers, and whatever inside the forward captured a piece."""
        found: dict[int, GraphOwner] = {id(own): own for own in self.wrappers.values()}
        # A copy: a report may be asked for in another thread than captures.
        for captured in list(self._captured.values()):
            found.update((id(each.owner), each.owner) for each in captured)
        return list(found.values())

    def entries(self, only: Collection[BatchDescriptor] | None = None) -> list[Entry]:
        """The graphs of all wrappers, with `only` those of these descriptors."""
        wrappers = [each for each in self.owners() if isinstance(each, GraphWrapper)]
        entries = [entry for wrapper in wrappers for entry in wrapper.entries.values()]
        return [entry for entry in entries if only is None or entry.descriptor in only]

    def own_tensors(self) -> list[torch.Tensor]:
        """The inputs with what brings them, and declared state."""
        inputs = self.setup.inputs
        own = [*inputs.buffers.values(), *inputs.transport.device_memory]
        # On the CPU every view is a storage of its own, and starts elsewhere at another size.
        own += [view for step in self.steps if step for view in step.layout.views.values()]
        states = as_states(self.setup.host.state)
        return own + [state.tensor for state in states if state.tensor is not None]

    def unknown_memory(
        self, only: Collection[BatchDescriptor] | None = None
    ) -> UnknownMemory | None:
        """What nodes of the graphs may touch that nobody knows of: see `ReadSet`. None if there are
        no graphs."""
        if not self.records:
            return None
        return self.reads.unknown_memory(self.entries(only), self.setup.pool, self.own_tensors())

    def keep_touched(self, only: Collection[BatchDescriptor]) -> None:
        """Count as read what nodes of these graphs point to and the forward holds."""
        self.reads.keep_touched(self.entries(only), self.setup.pool, self.own_tensors())

    def check(self) -> None:
        """Raise what is wrong with weights and modules, as `GraphRunner.weights_changed` says. From
        then on steps that are checked run eagerly."""
        try:
            self.setup.compiled.check()
            if self.records and not self.setup.eager_launch:
                self.reads.check(self.entries(), self.setup.pool, self.own_tensors())
        except GraphRTError as error:
            if not isinstance(error, UntrackedWeightsError):
                self.checks.set_aside(error)
            raise

    # What becomes of it -------------------------------------------------------------------------

    def publish(
        self, graph: PlannedGraph, record: GraphRecord, transaction: CaptureTransaction
    ) -> None:
        """Serve batches with a graph from now on; raises `CaptureError` if no wrapper took part."""
        if not transaction.captured and not self.setup.eager_launch:
            raise CaptureError(
                "nothing captured anything in the forward",
                got=f"{graph} and no wrapper of that mode",
                expected="a GraphWrapper for every piece",
                advice='wrap the pieces, or use pieces="breakable"',
            )
        self._captured[graph.slot] = list(transaction.captured)
        graph.step.task_names = frozenset(transaction.task_names)
        self.steps += [None] * (graph.slot + 1 - len(self.steps))
        self.steps[graph.slot] = graph.step
        self.records.append(record)
        logger.debug("%s in %.3f s", graph, record.capture_s)
        self.dispatcher.publish(graph.mode, graph.descriptor)
        # Entries know what they were captured in: what it keeps would be a cycle.
        transaction.commit()

    def take_back(self, graph: PlannedGraph, transaction: CaptureTransaction) -> None:
        """Undo what a capture, and `publish`, came to, however far they got."""
        key = graph.mode, graph.descriptor
        self.dispatcher.withdraw(*key)
        self.records[:] = [each for each in self.records if (each.mode, each.descriptor) != key]
        transaction.rollback()
        self._destroy({graph.slot})

    def drop(self, graph: PlannedGraph, error: ResourceExhaustedError) -> None:
        """Note that the device has no room for a graph."""
        self.left_out[graph.slot] = DroppedGraph(graph.mode, graph.descriptor, str(error))

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper."""
        self.setup.compiled.check()
        self.sealing.close()
        for owner in self.owners():
            owner.seal()
        self.setup.compiled.seal()

    def release(self) -> None:
        """Destroy all graphs; every key stays reserved, and may be captured again."""
        self.dispatcher.withdraw_all()
        self.records.clear()
        self.left_out.clear()
        self.steps.clear()
        self.sealing.open()
        self.setup.outputs.forget()
        self.setup.compiled.unseal()
        self.warmed_up.clear()
        self.checks.reset()
        self._destroy(self._captured.keys())
        self.reads.forget()

    def destroy_leftovers(self) -> None:
        """Go on with a release that was interrupted."""
        published = {(graph.mode, graph.descriptor): graph for graph in self.dispatcher.published}
        self._destroy(self._captured.keys() - {graph.slot for graph in published.values()})
        self.records[:] = [own for own in self.records if (own.mode, own.descriptor) in published]

    def _destroy(self, slots: Collection[int]) -> None:
        """Destroy what was captured for these slots, the last first; called again it goes on."""
        for slot in [slot for slot in reversed(self._captured) if slot in slots]:
            for each in reversed(self._captured[slot]):
                each.undo()
            del self._captured[slot]


def tell_dropped(dropped: Sequence[DroppedGraph], planned: int, *, strict: bool) -> None:
    """Warn of graphs that did not fit on the device, or raise `ResourceExhaustedError`."""
    lines = "".join(f"\n  {line}" for line in dropped_lines(dropped))
    what = f"{len(dropped)} of {planned} graphs did not fit on the device"
    if strict:
        raise ResourceExhaustedError(
            what,
            got=lines,
            expected="every planned graph (strict=True)",
            advice="capture fewer sizes, or leave the KV cache less memory; what is captured "
            "serves",
        )
    warn_caller(
        f"{what}, and batches that no other serves run eagerly:{lines}", GraphsDroppedWarning
    )


def dropped_lines(dropped: Iterable[DroppedGraph]) -> list[str]:
    """A line for each reason: the first of its graphs, and how many more there are."""
    by_reason: dict[tuple[GraphMode, str], list[BatchDescriptor]] = {}
    for each in dropped:
        by_reason.setdefault((each.mode, each.reason), []).append(each.descriptor)
    lines = []
    for (mode, reason), (first, *others) in by_reason.items():
        more = f"; {alike(others)}" if others else ""
        text = "; ".join(part.strip() for part in reason.splitlines())
        lines.append(f"{mode.name} [{first}]: {text}{more}")
    return lines
