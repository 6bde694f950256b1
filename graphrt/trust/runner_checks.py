"""The checks of a `GraphRunner`: `StepChecks` of core, by watched warm-ups and trials of steps."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from graphrt.core.base import errors, tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import set_for_capture
from graphrt.core.batch.descriptor import BatchDescriptor, example_of
from graphrt.core.capture.state import as_states
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import reqs_of
from graphrt.core.replay.recording import without_inner_graphs
from graphrt.core.runner.contract import Step
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.findings import Look, TrialRecord, TrustReport, UnknownMemory
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.host import Example, MakeExample
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.runner.weights import NamedWeights, refuse_moved
from graphrt.trust import padded_inputs
from graphrt.trust.checks import NO_INPUTS, Checks
from graphrt.trust.reads import ReadSet
from graphrt.trust.snapshot import StateSnapshot
from graphrt.trust.trial import Trial
from graphrt.trust.trials import EagerRuns, StepRuns, index_values_of
from graphrt.trust.verdict import TriedGraph, Verdict
from graphrt.trust.warm_up import MovedSlots, WarmedUp, WatchedState

_SEED = 0
"""The seed of the generator that examples are made with: the same on every rank."""


class RunnerChecks(Checks):
    """Checks the steps of one runner: its captures say what graphs read, its trials run steps."""

    __slots__ = ()

    def __init__(self, setup: RunnerSetup) -> None:
        # The operators of each kind's watched warm-up.
        self.warmed_up: dict[Hashable, WarmedUp] = {}
        self._moved = MovedSlots()
        reads = ReadSet(
            setup.forward,
            watched=setup.options.checks("capture"),
            has_full=setup.plan.mode.has_full,
        )
        declared = setup.inputs.declared
        super().__init__(
            setup.options,
            reads,
            setup.pool.platform.device_type,
            inputs=NO_INPUTS if setup.host.mixes_rows else padded_inputs.shown_by(declared),
            reqs=setup.inputs.reqs,
            pads=padded_inputs.address_pads(declared),
        )

    def reset(self) -> None:
        super().reset()
        self.warmed_up.clear()
        self._moved = MovedSlots()
        self.reads.forget()

    def forget_kind(self, kind: Hashable) -> None:
        # Else its next warm-up would not be watched, and nobody would know what it reads.
        self.warmed_up.pop(kind, None)
        super().forget_kind(kind)

    def runs(self, setup: RunnerSetup) -> WatchedState:
        platform, declared = setup.pool.platform, setup.inputs.declared
        limit = setup.options.state_limit(platform)
        return WatchedState(
            StateSnapshot(platform.device_type, limit, setup.host.state),
            self.reads,
            self.warmed_up,
            self._moved,
            pad_rows=[*padded_inputs.index_pads(declared).values()],
            with_rows=frozenset[str]().union(*declared.by_axis.values()),
            is_in_graphs=setup.pool._is_in_graphs,
            has_parts=setup.plan.mode.has_piecewise,
            padding=self.padding,
            capture_executes=platform.capture_executes,
        )

    # Trials ---------------------------------------------------------------------------------------

    def try_step(self, executor: StepExecutor, step: Step) -> tuple[Dispatch, Any] | Reason | None:
        dispatch = step.dispatch
        unlike = self._differing_inputs(executor, step)
        if not self.wants_trial(dispatch.slot, unlike):
            return None
        try:
            runs = StepRuns(executor, step, self.padding)
            verdict = self._try(runs)
        except (errors.StateTooLargeError, MemoryError, torch.OutOfMemoryError) as error:
            return self.cannot_try(dispatch.slot, error, agreed=step.agreed)
        if verdict.failure is not None:
            dispatcher = executor.graphs.dispatcher
            dispatch = dispatcher.without_graph(dispatch, step.batch, Reason.QUARANTINED)
        self._note(runs, verdict, unlike)
        return dispatch, verdict.outputs

    def may_repeat(self, executor: StepExecutor, step: Step, error: errors.BreakError) -> bool:
        # The segments before that part have run: what they wrote would be written twice, and inputs
        # in the pool may be overwritten. Other ranks do not run again.
        warm, pool = self.warmed_up.get(step.dispatch.descriptor.kind), executor.pool
        if warm is None or warm.writes or self.in_ranks(step.agreed):
            return False
        if self.strict or any(map(pool._owns, tree.tensors(step.values))):
            return False
        self.failed(step.dispatch.slot, error)
        return True

    def run_eagerly(self, executor: StepExecutor, step: Step) -> Any:
        # Before the run too, or the host's changes would be taken for those of the run.
        self.look_at_host()
        try:
            return self._run_beside_padding(executor, step)
        finally:
            # The run may have replaced a tensor that graphs read: a long prompt makes a new cache.
            self.look_at_host(by_forward=True)

    def _run_beside_padding(self, executor: StepExecutor, step: Step) -> Any:
        """Run an eager step on its live rows, and look whether these use rows that padding writes:
        by what they write, at the level `always` also by what they read."""
        setup, padding = executor.graphs.setup, self.padding
        if not padding.rows:
            return self._run_alone(executor, step)
        if self.tries_all and setup.host.ranks is None:
            graph = TriedGraph(TrialRecord(step.dispatch.mode, step.dispatch.descriptor))
            runs = EagerRuns(executor, step, padding)
            trial = Trial(runs, graph, None, setup.pool.platform, setup.options, self.reads)
            trial.look_at_padding()
            self.ran_forward()
        before = padding.read(padding.first_rows)
        outputs = self._run_alone(executor, step)
        after = padding.read(padding.first_rows)
        padding.note_used(padding.first_rows, before, after, index_values_of(executor, step))
        self.look_at_padding()
        return outputs

    def _run_alone(self, executor: StepExecutor, step: Step) -> Any:
        """Run an eager step on its live rows. Where our graph must not be replayed, those of
        runners and wrappers in the forward may be as wrong: they run eagerly too."""
        has_graph = step.dispatch.reason in (Reason.QUARANTINED, Reason.SETTINGS_CHANGED)
        return executor.run_unpadded(step, without_inner_graphs if has_graph else None)

    def lends(self) -> Collection[int] | None:
        reads = self.reads
        return reads.held if self.warmed_up and not reads.needs_copies else None

    def stop_lending(self, kept: Mapping[str, int]) -> None:
        self.reads.needs_copies = True
        if not kept:
            return
        paths = {key: place.path for place, _, key in self.reads.walk().keyed}
        error = errors.PythonStateError(
            "an eager step has stored an input in Python, which no replay does; eager steps have "
            "copies of their inputs from now on",
            got=", ".join(f"{n!r} at {paths.get(k, 'no known place')}" for n, k in kept.items()),
            expected="a forward that leaves its inputs to its caller",
            advice="leave a clone() in an @eager_break",
        )
        errors.warn_caller(str(error), errors.StaleTensorWarning)

    def verify(self, executor: StepExecutor, step: Step) -> tuple[Any, Exception | None]:
        # Note the host's changes now: after the trial all changes count as the forward's own.
        self.look_at_host()
        verdict = self._try(StepRuns(executor, step, self.padding))
        return verdict.outputs, verdict.failure

    @undoing
    def try_examples(self, undo: Undo, executor: StepExecutor, make: MakeExample) -> None:
        """Try the graphs of `to_try`, with padding where there is room for it. Raises the first
        failure, once all graphs are released."""
        generator = torch.Generator("cpu").manual_seed(_SEED)
        undo.after_error(executor.graphs.release)
        executor.set_updates_aside(undo)
        for dispatch in self.to_try():
            prepared = executor.graphs.steps[dispatch.slot]
            batch = example_of(dispatch.descriptor, 1 if prepared is None else prepared.reqs)
            example = make(batch, generator)
            if not isinstance(example, Example):
                raise errors.InvalidOptionError(
                    "Host(example=) made no step",
                    got=type(example).__name__,
                    expected="a graphrt.Example",
                    advice="return Example(values={...})",
                )
            updates = executor.updates_of(example.updates)
            values = executor.inputs.completed(batch, example.values)[1]
            step = Step(batch, dispatch, values, updates, example.metadata)
            runs = StepRuns(executor, step, self.padding, served=False)
            verdict = self._try(runs, undone=True)
            if verdict.failure is not None:
                raise verdict.failure
            self._note(runs, verdict, self._differing_inputs(executor, runs.step))

    def _differing_inputs(
        self, executor: StepExecutor, step: Step
    ) -> padded_inputs.Differing | None:
        """axis along which a step is padded -> its inputs that differ from their padding; None
        where no such axis is awaited."""
        if step.agreed:
            return None
        inputs, padded = executor.inputs, []
        prepared = executor.graphs.steps[step.dispatch.slot]
        awaited = self.awaited_padding(step.dispatch.slot)
        assert prepared is not None
        if "tokens" in awaited and step.batch.num_tokens < step.dispatch.descriptor.num_tokens:
            padded.append("tokens")
        if "reqs" in awaited and reqs_of(inputs, step.batch, step.values) < prepared.reqs:
            padded.append("reqs")
        if not padded:
            return None
        lengths = self.padding.lengths()
        return padded_inputs.differing(inputs.declared, step.values, padded, lengths)

    @undoing
    def _try(self, undo: Undo, runs: StepRuns, *, undone: bool = False) -> Verdict:
        """Make the runs of a trial and compare them; with `undone` the last run leaves nothing."""
        graphs, dispatch = runs.executor.graphs, runs.step.dispatch
        setup = graphs.setup
        warm, graph = self.warmed_up.get(dispatch.descriptor.kind), self.graph_to_try(dispatch)
        trial = Trial(runs, graph, warm, setup.pool.platform, setup.options, self.reads)
        for span in graphs.spans:
            undo.enter(span("trial", f"{dispatch.mode.name} [{dispatch.descriptor}]"))
        # Captures ran under these settings: under others eager runs would differ from the replay.
        set_for_capture(undo)
        verdict = trial.run(undone=undone)
        setup.run_forward.follows |= verdict.asks
        self.ran_forward()
        return verdict

    def _note(
        self, runs: StepRuns, verdict: Verdict, unlike: padded_inputs.Differing | None
    ) -> None:
        """Note the verdict of a trial; with `strict` raises the failure."""
        graphs, dispatch = runs.executor.graphs, runs.step.dispatch
        record = self.graph_to_try(dispatch).record
        is_first = verdict.failure is None and not record.steps
        # Memory that the graph's nodes point to, and that no operator has shown, is read too.
        if is_first and self.reads.keep_touched(self.unknown_memory(graphs, [record.descriptor])):
            self.glances.aim()
        self.tried(dispatch.slot, verdict, unlike)

    # What is known --------------------------------------------------------------------------------

    def check_named(self, named: NamedWeights) -> list[str]:
        # What compiled code reads no watched run shows. A wrapped layer's tensors have other names,
        # which `reads` compares.
        moved, knows = named.moved(), not named.compiled
        now = {name: tree.storage_key(tensor) for (_, name), tensor in named.now().items()}
        keys = {*now.values()} - {None}
        unread = [
            name
            for name, key in moved
            if knows and (self.reads.is_unread(key) or (name not in now and key in keys))
        ]
        refuse_moved([name for name, _ in moved if name not in unread])
        return unread

    def check_weights(self, graphs: GraphTable) -> None:
        unread = self.check_named(graphs.named)
        self.reads.check(graphs.named, graphs.entries(), _own_tensors(graphs))
        self.look_at_host()
        self.note_unread(unread)

    def look(self) -> Look:
        return super().look() if self.picture is None else self.picture.look()

    def report(self, graphs: GraphTable, *, quick: bool) -> TrustReport:
        published = {graph.slot for graph in graphs.dispatcher.published}
        checked = self.records.items()
        trials = tuple(replace(record) for slot, record in checked if slot in published)
        reads = self.reads
        if quick or not reads.watched:
            return TrustReport(trials=trials)
        tried = [record.descriptor for record in trials if record.steps]
        return TrustReport(
            reads=reads.table(),
            trials=trials,
            protected=tuple(reads.protected),
            unknown=self.unknown_memory(graphs, tried) if tried else None,
            watched=reads.host.watched,
            # A step glances at a few places only; after `rounds` steps each had its turn.
            glance_steps=reads.rounds,
            not_watched=reads.host.why_not,
            harmless=tuple(self.harmless),
        )

    def unknown_memory(
        self, graphs: GraphTable, only: Collection[BatchDescriptor] | None = None
    ) -> UnknownMemory | None:
        """Memory that nodes of the graphs, with `only` those of these descriptors, may touch and
        nobody has named: see `ReadSet`. None if there are no graphs."""
        if not graphs.records:
            return None
        entries, tensors = graphs.entries(only), _own_tensors(graphs)
        return self.reads.unknown_memory(entries, graphs.setup.pool, tensors)


def _own_tensors(graphs: GraphTable) -> Iterator[torch.Tensor]:
    """The inputs of a runner, the device memory of their transport, and declared state."""
    inputs = graphs.setup.inputs
    yield from inputs.buffers.values()
    yield from inputs.transport.device_memory
    for prepared in filter(None, graphs.steps):
        # On the CPU every view is a storage of its own, with another address at another size.
        yield from prepared.layout.views.values()
    states = as_states(graphs.setup.host.state)
    yield from (state.tensor for state in states if state.tensor is not None)
