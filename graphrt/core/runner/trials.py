"""Trials of a runner's steps: one step is run several times, by its graph and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.sharing import cloned
from graphrt.core.base.thread_mode import set_for_capture
from graphrt.core.batch.descriptor import Batch, example_of
from graphrt.core.batch.descriptor import unpadded as unpadded_of
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import side_doors
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import reqs_of
from graphrt.core.replay.recording import enter_under_way, warming_up
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.host import Example, MakeExample
from graphrt.core.runner.updates import LastUpdates
from graphrt.core.trust.parts import PartResults, TriedParts
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.trial import Trial, TriedGraph
from graphrt.core.trust.verdict import Verdict
from graphrt.core.trust.watching.watch import Watch

_SEED = 0
"""Of the generator that examples are made with: the same on every rank."""


class StepTrials:
    """Tries the steps of one runner that its checks do not let through."""

    def __init__(self, executor: StepExecutor, graphs: GraphTable, updates: LastUpdates) -> None:
        self._executor = executor
        self._graphs = graphs
        self._host = graphs.setup.host
        self._updates = updates

    def run(
        self,
        batch: Batch,
        found: Dispatch,
        given: StepValues,
        differing: frozenset[str] | None,
        *,
        agreed: bool,
    ) -> tuple[Dispatch, Any]:
        """Run the trial of a step; returns how the step ran, and its live outputs."""
        step = self._tried(batch, found, given, agreed=agreed)
        verdict, slot = self._try(step), found.slot
        if verdict.failure is not None:
            found = self._graphs.dispatcher.run_eagerly(found, batch, Reason.QUARANTINED)
        if step.padded and differing is None:
            differing = self._differing(slot, given.values)
        self._note(slot, verdict, differing)
        return found, verdict.outputs

    def verify(self, batch: Batch, found: Dispatch, given: StepValues) -> Verdict:
        """Try one step of a graph, whatever the level of checks is."""
        return self._try(self._tried(batch, found, given))

    @undoing
    def try_examples(self, undo: Undo, make: MakeExample, release: Callable[[], None]) -> None:
        """Try the graphs that have to be with steps of the host's own: with padding where there is
        room for it. Raises the first failure, after `release`."""
        generator = torch.Generator("cpu").manual_seed(_SEED)
        undo.after_error(release)
        with self._updates.set_aside():
            for found in self._graphs.checks.to_try():
                self._try_example(found, make, generator)

    def _try_example(self, found: Dispatch, make: MakeExample, generator: torch.Generator) -> None:
        prepared = self._graphs.steps[found.slot]
        batch = example_of(found.descriptor, 1 if prepared is None else prepared.reqs)
        example = make(batch, generator)
        if not isinstance(example, Example):
            raise InvalidOptionError(
                "Host(example=) made no step",
                got=type(example).__name__,
                expected="a graphrt.Example",
                advice="return Example(values={...})",
            )
        given = StepValues(example.values, example.updates, example.metadata)
        step = self._tried(batch, found, given)
        verdict = self._try(step, undone=True)
        if verdict.failure is not None:
            raise verdict.failure
        differing = self._differing(found.slot, example.values) if step.padded else None
        self._note(found.slot, verdict, differing)

    def differing(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], agreed: bool
    ) -> frozenset[str] | None:
        """The inputs of a padded step that differ from their padding; None if nobody asks."""
        if agreed or batch.num_tokens >= found.descriptor.num_tokens:
            return None
        return self._differing(found.slot, values)

    def _differing(self, slot: int, values: Mapping[str, Any]) -> frozenset[str] | None:
        if not self._graphs.checks.awaits_padding(slot):
            return None
        return self._executor.inputs.padding.differing(values)

    def _tried(
        self, batch: Batch, found: Dispatch, given: StepValues, *, agreed: bool = False
    ) -> PaddedTrial:
        executor, inputs = self._executor, self._executor.inputs
        inputs.declared.check(given.values, None, None)
        # They may be outputs of the last step, or lie in the buffers.
        executor.pool.follow_stream()
        values: Mapping[str, Any] = cloned(dict(given.values))
        resolve = partial(self._updates.resolve, given.updates, batch)
        # The last of them is what the graph is given.
        updates = resolve(), resolve(found.slot, replayed=False), resolve(found.slot)
        # Graphs have it at its bound, if they have it.
        bound = self._host.metadata
        at_bound = given.metadata if bound is None else bound(found.descriptor)
        runs = Runs(values, *updates, given.metadata, at_bound)
        reqs = reqs_of(inputs, batch, values)
        return PaddedTrial(executor, batch, reqs, found, runs, agreed=agreed)

    @undoing
    def _try(self, undo: Undo, step: PaddedTrial, *, undone: bool = False) -> Verdict:
        graphs, platform = self._graphs, self._executor.pool.platform
        found, padded = step.found, step.step
        warm = graphs.warmed_up.get(found.descriptor.kind)
        graph = TriedGraph(
            f"{found.mode.name} [{found.descriptor}]",
            captured=None if warm is None else warm.trace,
            issued=None if warm is None else warm.captured.get(found.mode),
            same_size=warm is not None and warm.tokens == padded.tokens,
            has_parts=found.mode is GraphMode.PIECEWISE,
            moved=graphs.checks.moved(found.slot),
        )
        trial = Trial(
            step,
            graph,
            own=padded.storages(),
            device_type=platform.device_type,
            limit_bytes=graphs.setup.options.state_limit(platform),
            places=places_of(graphs.setup.forward),
            precision=platform.float32_precision,
            mixes_rows=self._host.mixes_rows,
            pads=self._executor.inputs.padding.unused_addresses(step.runs.values),
            strict=graphs.checks.strict,
        )
        self._executor.pool._will_put_back("a trial", undo.later)
        # As captures run.
        set_for_capture(undo)
        verdict = trial.run(undone=undone)
        graphs.setup.run_forward.follows |= verdict.asks
        return verdict

    def _note(self, slot: int, verdict: Verdict, differing: frozenset[str] | None) -> None:
        """Note what came of a trial; strictly, raises the failure."""
        checks = self._graphs.checks
        record = checks.records[slot]
        if verdict.failure is None and not record.steps:
            # What their nodes point to, and no operator has shown, is read too.
            self._graphs.keep_touched([record.descriptor])
            checks.glances.go_round()
        checks.tried(slot, verdict, differing)


class StepValues(NamedTuple):
    """What the host gave a step."""

    values: Mapping[str, Any]
    updates: Any = None
    metadata: Any = None


class Runs(NamedTuple):
    """What the runs of a trial are given: `values` that outlive other steps, and the updates and
    metadata of the forward on live rows, of the forward on padded inputs, and of the graph."""

    values: Mapping[str, Any]
    updates_unpadded: Any
    updates_eager: Any
    updates: Any
    metadata: Any
    metadata_at_bound: Any


class PaddedTrial:
    """A step of `batch` that the graph of `found` would serve, with what it is run with."""

    def __init__(
        self,
        executor: StepExecutor,
        batch: Batch,
        reqs: int,
        found: Dispatch,
        runs: Runs,
        *,
        agreed: bool,
    ) -> None:
        graphs = executor.graphs
        step = graphs.steps[found.slot]
        assert step is not None
        self.found = found
        self.step = step
        self.rows, self.live_rows = step.tokens, batch.num_tokens
        self.sizes: Sequence[tuple[int, int]] = (self.rows, self.live_rows), (step.reqs, reqs)
        self.padded = not agreed and any(live < rows for rows, live in self.sizes)
        self.has_gradients = torch.is_grad_enabled()
        self.finds_gradients = graphs.setup.run_forward.gradients.wanted
        self._executor = executor
        self._batch = batch
        self.runs = runs
        self._kept = executor.inputs.padding.kept()

    def eager(self, watch: Watch, parts: PartResults | None = None) -> Any:
        return self._eager(watch, parts=parts)

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        return self._executor.graphs.setup.run_forward.where(
            gradients, inference, partial(self.eager, watch)
        )

    def find_gradients(self, watch: Watch) -> None:
        self._executor.graphs.setup.run_forward.finding(partial(self.eager, watch))

    def of_padding(self, watch: Watch) -> Any:
        return self._eager(watch, partial(self._executor.inputs.reset, self.step.layout))

    def replay(self) -> Any:
        executor, runs = self._executor, self.runs
        executor.inputs.padding.put_back(self._kept)
        context = executor.context(self._batch, self.found, runs.updates, runs.metadata)
        return cloned(executor.run(self.step, self._batch, runs.values, context))

    def other_padding(self, watch: Watch) -> Any:
        padding = self._executor.inputs.padding
        if not self.padded or not padding.are_kept:
            return None
        return self._eager(watch, partial(padding.disturb, *self._rows(), only_kept=True))

    def disturbed(self, watch: Watch) -> Any:
        padding = self._executor.inputs.padding
        return self._eager(watch, partial(padding.disturb, *self._rows()))

    def unpadded(self, watch: Watch) -> Any:
        if not self.padded:
            return None
        alone = Dispatch(GraphMode.NONE, unpadded_of(self._batch), Reason.HIT)
        runs, around = self.runs, partial(_watched, watch)
        outputs = self._executor.run_unpadded(
            self._batch, alone, runs.values, runs.updates_unpadded, runs.metadata, around
        )
        return cloned(outputs)

    def _rows(self) -> tuple[Any, int, int]:
        """The layout of the graph, and the live tokens and requests in it."""
        return self.step.layout, self.sizes[0][1], self.sizes[1][1]

    def _eager(
        self,
        watch: Watch,
        disturb: Callable[[], None] | None = None,
        parts: PartResults | None = None,
    ) -> Any:
        """An eager run that is watched; `disturb` writes other values into padding rows."""
        executor, runs = self._executor, self.runs
        executor.inputs.padding.put_back(self._kept)
        context = executor.context(
            self._batch, self.found, runs.updates_eager, runs.metadata_at_bound, eager=True
        )

        def around(forward: Callable[[], Any]) -> Any:
            if disturb is not None:
                disturb()
            return _watched(watch, forward, parts)

        outputs = executor.run(
            self.step, self._batch, runs.values, context, eager=True, around=around
        )
        return cloned(outputs)


@undoing
def _watched(
    watch: Watch, undo: Undo, forward: Callable[[], Any], parts: PartResults | None = None
) -> Any:
    """The forward, on inputs that are filled, in which runners and wrappers run what they wrap, as
    they do in a warm-up: their own graphs and buffers would look like state that it writes."""
    undo.set(warming_up, True)
    # So that eager parts are known as such.
    undo.set(side_doors, TriedParts() if parts is None else parts)
    enter_under_way(undo, watch)
    return watch.around(forward)
