"""Trials of a runner's steps: one step is run several times, by its graph and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.thread_mode import set_for_capture
from graphrt.core.batch.descriptor import example_of
from graphrt.core.batch.descriptor import unpadded as unpadded_of
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import (
    CaptureGuard,
    SideDoors,
    in_eager_part,
    refuse_transform,
    side_doors,
)
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import reqs_of
from graphrt.core.replay.recording import enter_under_way, warming_up
from graphrt.core.runner.checks import Differing
from graphrt.core.runner.executor import Step, StepExecutor
from graphrt.core.runner.host import Example, MakeExample
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.trial import Rows, Trial
from graphrt.core.trust.verdict import Verdict
from graphrt.core.trust.watching.watch import Watch

_SEED = 0
"""Of the generator that examples are made with: the same on every rank."""


def run_trial(
    executor: StepExecutor, step: Step, differing: Differing | None
) -> tuple[Dispatch, Any]:
    """Run the trial of a step; returns how the step ran, and its live outputs."""
    runs, dispatch = StepRuns(executor, step), step.dispatch
    verdict = _try(executor, runs)
    if verdict.failure is not None:
        dispatcher = executor.graphs.dispatcher
        dispatch = dispatcher.run_eagerly(dispatch, step.batch, Reason.QUARANTINED)
    _note(executor, runs, verdict, differing)
    return dispatch, verdict.outputs


def run_verified(executor: StepExecutor, step: Step) -> Verdict:
    """Try one step of a graph, whatever the level of checks is."""
    # What changes from here on is the forward's own doing.
    executor.graphs.checks.look_at_host()
    return _try(executor, StepRuns(executor, step))


@undoing
def try_examples(
    executor: StepExecutor, undo: Undo, make: MakeExample, release: Callable[[], None]
) -> None:
    """Try the graphs that have to be with steps of the host's own: with padding where there is room
    for it. Raises the first failure, after `release`."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    undo.after_error(release)
    executor.set_updates_aside(undo)
    for dispatch in executor.graphs.checks.to_try():
        prepared = executor.graphs.steps[dispatch.slot]
        batch = example_of(dispatch.descriptor, 1 if prepared is None else prepared.reqs)
        example = make(batch, generator)
        if not isinstance(example, Example):
            raise InvalidOptionError(
                "Host(example=) made no step",
                got=type(example).__name__,
                expected="a graphrt.Example",
                advice="return Example(values={...})",
            )
        step = Step(batch, dispatch, example.values, example.updates, example.metadata)
        runs = StepRuns(executor, step)
        verdict = _try(executor, runs, undone=True)
        if verdict.failure is not None:
            raise verdict.failure
        _note(executor, runs, verdict, differing_inputs(executor, runs.step))


def differing_inputs(executor: StepExecutor, step: Step) -> Differing | None:
    """By the axes along which a step is padded, its inputs that differ from their padding; None if
    nobody asks."""
    graphs, inputs, padded = executor.graphs, executor.inputs, []
    is_less = step.batch.num_tokens < step.dispatch.descriptor.num_tokens
    if step.agreed or not (is_less or "reqs" in inputs.declared.by_axis):
        return None
    prepared = graphs.steps[step.dispatch.slot]
    awaited = graphs.checks.awaited_padding(step.dispatch.slot)
    assert prepared is not None
    if "tokens" in awaited and is_less:
        padded.append("tokens")
    if "reqs" in awaited and reqs_of(inputs, step.batch, step.values) < prepared.reqs:
        padded.append("reqs")
    return inputs.declared.differing(step.values, padded) if padded else None


@undoing
def _try(executor: StepExecutor, undo: Undo, runs: StepRuns, *, undone: bool = False) -> Verdict:
    graphs, setup, dispatch = executor.graphs, executor.graphs.setup, runs.step.dispatch
    graph = graphs.checks.graph_to_try(dispatch, graphs.warmed_up.get(dispatch.descriptor.kind))
    graph = graph._replace(has_metadata=setup.host.metadata is not None)
    trial = Trial(
        runs,
        graph,
        places_of(setup.forward),
        executor.pool.platform,
        setup.options,
        inputs=runs.prepared.storages(),
        mixes_rows=setup.host.mixes_rows,
        pads=executor.inputs.declared.unused_addresses(runs.step.values),
    )
    for span in graphs.spans:
        undo.enter(span("trial", graph.name))
    # As captures run.
    set_for_capture(undo)
    verdict = trial.run(undone=undone)
    setup.run_forward.follows |= verdict.asks
    graphs.checks.ran_forward(at_every_run=True)
    return verdict


def _note(
    executor: StepExecutor, runs: StepRuns, verdict: Verdict, differing: Differing | None
) -> None:
    """Note the verdict of a trial; strictly, raises the failure."""
    checks, slot = executor.graphs.checks, runs.step.dispatch.slot
    record = checks.records[slot]
    is_first = verdict.failure is None and not record.steps
    # What their nodes point to, and no operator has shown, is read too.
    if is_first and executor.graphs.keep_touched([record.descriptor]):
        checks.glances.aim()
    checks.tried(slot, verdict, differing)


class StepRuns:
    """The runs of a trial: one step that a graph serves, run again and again. See `TriedStep`."""

    def __init__(self, executor: StepExecutor, step: Step) -> None:
        graphs, inputs = executor.graphs, executor.inputs
        flat = inputs.declared.check(step.values, None, None)
        # They may be outputs of the last step, or views of the buffers.
        executor.pool.streams.follow()
        step = step._replace(values=tree.cloned(flat))
        resolve = executor.updates_of
        self._unpadded_step = step._replace(updates=resolve(step, padded=False))
        self.step = self._eager_step = step._replace(updates=resolve(step))
        at_bound = graphs.setup.host.metadata
        if at_bound is not None:
            # Graphs have it at its bound, if they have it.
            metadata = at_bound(step.dispatch.descriptor)
            self._eager_step = self._eager_step._replace(metadata=metadata)
        prepared = graphs.steps[step.dispatch.slot]
        assert prepared is not None
        self.prepared = prepared
        reqs = reqs_of(inputs, step.batch, step.values)
        all_rows, live = (prepared.tokens, prepared.reqs), (step.batch.num_tokens, reqs)
        # Ranks that have agreed on a graph have other live rows each.
        is_padded = live != all_rows and not step.agreed
        self.sizes: Sequence[tuple[int, int]] = (
            [*zip(all_rows, live, strict=True)] if is_padded else []
        )
        self.together = step.agreed or graphs.setup.host.ranks is not None
        self.has_gradients = torch.is_grad_enabled()
        self._executor = executor

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        executor, step, layout = self._executor, self._eager_step, self.prepared.layout
        inputs, fill = executor.inputs, None
        if rows == "alone":
            alone = Dispatch(GraphMode.NONE, unpadded_of(step.batch), Reason.HIT)
            step = self._unpadded_step._replace(dispatch=alone)
            around = partial(watched, watch, None)
            return tree.cloned(executor.run_unpadded(step, step.updates, around))
        if rows == "padding":
            fill = partial(inputs.reset, layout)
        elif rows == "disturbed":
            fill = partial(inputs.declared.disturb, layout, *(live for _, live in self.sizes))
        around = partial(watched, watch, fill)
        return tree.cloned(executor.run_padded(step, step.updates, eager=True, around=around))

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        forward = self._executor.graphs.setup.run_forward
        return forward.where(gradients, inference, partial(self.eager, watch))

    def replay(self) -> Any:
        return tree.cloned(self._executor.run_padded(self.step, self.step.updates))


@undoing
def watched(
    watch: Watch,
    undo: Undo,
    fill: Callable[[], None] | None,
    forward: Callable[[], Any],
) -> Any:
    """Run the forward on filled inputs, watched; `fill` fills them otherwise. Runners and wrappers
    in it run their forwards eagerly, as in a warm-up: their graphs and buffers would look like
    state that it writes."""
    if fill is not None:
        fill()
    undo.set(warming_up, True)
    # So that eager parts are known as such.
    undo.set(side_doors, _TriedParts(watch))
    enter_under_way(undo, watch)
    return watch.around(forward)


class _TriedParts(SideDoors):
    """The eager parts of a run of a trial: nothing is captured there, so nobody looks at what they
    make. The watch of a run that is compared with others notes what they are given."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch if watch.is_compared else None

    def watched(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: CaptureGuard | None = None,
    ) -> Any:
        if in_eager_part.get() is not None:
            # A part within a part is part of it.
            return function(*args, **kwargs)
        refuse_transform(function)
        try:
            watch = self._watch
            in_eager_part.set(frozenset() if watch is None else watch.begin_part(args, kwargs))
            # As in a capture: graph and part each make their own casts.
            torch.clear_autocast_cache()
            result = function(*args, **kwargs)
            torch.clear_autocast_cache()
            return result
        finally:
            in_eager_part.set(None)
