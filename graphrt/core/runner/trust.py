"""Whether a runner's graphs still stand for their forward."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture import SavedState, as_states
from graphrt.core.device import DeviceGraph, GraphRead
from graphrt.core.replay import Entry, graphs_of
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.runner.steps import Checks, TrialRecord
from graphrt.core.trust import (
    AddressBook,
    Reads,
    TensorUse,
    UnknownMemory,
    Use,
    WarmedUp,
    WatchedState,
    address_of,
    places_of,
    unknown_memory,
)


@dataclass(frozen=True)
class TrustReport:
    """What is known of whether the graphs stand for their forward.

    `reads` is what watched warm-ups read and wrote beside the inputs, kept alive until `release()`;
    `trials` what came of trying each graph, "untried" until a step or `Host(example=)` has.
    `protected` is memory too large to be saved, and which rows of it warm-ups wrote. `unknown` is
    what nodes of tried graphs point to and nobody has named, None where a device cannot tell. With
    `mixes_rows` live rows depend on padding by design.
    """

    reads: tuple[TensorUse, ...] = ()
    trials: tuple[TrialRecord, ...] = ()
    protected: tuple[str, ...] = ()
    unknown: UnknownMemory | None = None
    mixes_rows: bool = False

    @property
    def only_graphs_bytes(self) -> int:
        """Bytes that only graphs hold: the forward has let go of them."""
        return sum(use.bytes for use in self.reads if use.moved)


class GraphTrust:
    """What the graphs of a runner read, and what its steps check before they replay one.

    `reads` is None where nothing is watched. `warmed_up` has what the warm-up of each kind did.
    """

    def __init__(self, setup: RunnerSetup) -> None:
        options, host, forward = setup.options, setup.host, setup.forward
        self._setup = setup
        self.weights = AddressBook(
            host.parameters, forward, [module.weights for module in setup.compiled.modules]
        )
        watches = options.checks("capture") and not setup.eager_launch
        self.reads = Reads(forward, has_full=setup.plan.mode.has_full) if watches else None
        self.warmed_up: dict[Hashable, WarmedUp] = {}
        shown_by = frozenset() if host.mixes_rows else setup.inputs.padding.with_rows
        gradients, platform = setup.run_forward.gradients, setup.pool.platform
        self.checks = Checks(options, self.reads, platform.device_type, shown_by, gradients)
        self.checks.on &= not setup.eager_launch

    def watched_state(self) -> WatchedState:
        """The state of the forward as it is now, for the time of one capture session."""
        setup, platform = self._setup, self._setup.pool.platform
        limit = setup.options.state_limit(platform)
        return WatchedState(
            SavedState(setup.host.state, limit),
            limit_bytes=limit,
            forward=setup.forward,
            reads=self.reads,
            warmed_up=self.warmed_up,
            pads=setup.inputs.padding.addresses,
            device_type=platform.device_type,
            is_in_graphs=partial(platform.owns, setup.pool.memory),
            each_warmed_up=setup.options.warm_up_each,
            has_parts=setup.plan.mode.has_piecewise,
        )

    def check(self, entries: Iterable[Entry], views: Iterable[torch.Tensor]) -> None:
        """Raise `StaleInputError` if a tensor that these graphs read is another one by now, and
        `UntrackedWeightsError` if they read what nobody knows the owner of. `views` are the inputs
        in the buffers: on the CPU each is a storage of its own, and starts elsewhere at another
        size."""
        self.weights.check()
        reads, known = self.reads, [*self._own_tensors(), *views]
        if reads is not None:
            moved = reads.moved()
            if moved:
                raise reads.stale(moved)
            known += reads.reachable()
        found: list[GraphRead] | None = []
        for entry in entries:
            read, results = entry.reads(self._setup.pool)
            found = None if found is None or read is None else found + read
            known += results
        if found is None and reads is not None and not reads.saw_compiled_code:
            found = reads.as_graph_reads()
        self.weights.check_known(found, known)

    def unknown_memory(self, entries: Iterable[Entry]) -> UnknownMemory | None:
        """The memory outside of graph pools that nodes of these graphs point to and that is neither
        an input, a result, declared state, nor what a watched warm-up used: what is read by kernels
        outside of torch's operators, and by compiled code. Each graph takes milliseconds.

        Blocks are named by where the forward has them. None if there are no graphs, nothing was
        watched, or the platform cannot tell.
        """
        entries = list(entries)
        if self.reads is None or not entries:
            return None
        graphs: list[DeviceGraph] = []
        own = self._own_tensors()
        for entry in entries:
            graphs += graphs_of(entry.parts)
            own += entry.reads(self._setup.pool)[1]
        known = self.reads.addresses() | set(map(address_of, own))
        unknown = unknown_memory(self._setup.pool.platform, graphs, known)
        return unknown if unknown is None or not unknown.blocks else self._named(unknown)

    def keep_touched(self, entries: Iterable[Entry]) -> None:
        """Count as read what nodes of these graphs point to and the forward holds."""
        unknown = self.unknown_memory(entries)
        if self.reads is None or unknown is None or not unknown.blocks:
            return
        touched = {block.address for block in unknown.blocks}
        for tensor in self.reads.reachable():
            if address_of(tensor) in touched:
                self.reads.add(tensor, Use.of(tensor, "a kernel that is no operator of torch's"))
        self.reads.settle()

    def _own_tensors(self) -> list[torch.Tensor]:
        """The buffers of the runner and the declared state."""
        states = as_states(self._setup.host.state)
        own = [*self._setup.inputs.buffers.values()]
        return own + [state.tensor for state in states if state.tensor is not None]

    def _named(self, unknown: UnknownMemory) -> UnknownMemory:
        paths: dict[int, str] = {}
        for place, tensor in places_of(self._setup.forward).tensors:
            address = address_of(tensor)
            if address not in paths or len(place.path) < len(paths[address]):
                paths[address] = place.path
        named = (block._replace(name=paths.get(block.address, "")) for block in unknown.blocks)
        return unknown._replace(blocks=tuple(named))

    def report(self, entries: Iterable[Entry]) -> TrustReport:
        """What is known now of the graphs of `entries`."""
        trials = tuple(replace(record) for record in self.checks.records.values())
        reads, mixes_rows = self.reads, self._setup.host.mixes_rows
        if reads is None:
            return TrustReport(trials=trials, mixes_rows=mixes_rows)
        tried: Collection[BatchDescriptor] = [trial.descriptor for trial in trials if trial.steps]
        unknown = None
        if tried:
            unknown = self.unknown_memory(each for each in entries if each.descriptor in tried)
        return TrustReport(reads.table(), trials, tuple(reads.protected), unknown, mixes_rows)

    def forget(self) -> None:
        """Forget everything: there are no graphs any more."""
        self.warmed_up.clear()
        self.checks.reset()
        if self.reads is not None:
            self.reads.forget()
