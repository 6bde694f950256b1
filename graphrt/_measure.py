"""What graphs bring: seconds of a step by its graph, and of its forward run eagerly.

`GraphRunner.measure` times a step of each graph: filling the inputs, the replay, the outputs;
against the forward alone, on the same padded inputs. The device is idle before and after each run.
The first eager run saves the state that it writes, which is put back after every run.

Without `Host(example=)` a step is rows of padding, and its tasks have `at_capture` arguments.

Limits: the smallest of a few runs counts, on a device that nobody else uses meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import count_of, items_of
from graphrt.core.batch.descriptor import example_of
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.replay.recording import without_inner_graphs
from graphrt.core.replay.tasks import WORST_CASE
from graphrt.core.runner.contract import RunWatch, Step
from graphrt.core.runner.executor import StepExecutor

_SEED = 0
_MOST_RUNS = 20
_SECONDS = 0.05
"""A graph is run and timed until this time has passed, at least three times each way."""
_MOST_SECONDS = 1.0
"""While the two fastest runs of a way differ by more than a fifth, it goes on for so long: beside
other processes most runs of a CPU's threads wait."""


def measure(executor: StepExecutor, sizes: Collection[int] | None) -> None:
    """Time the graphs of these sizes, by default the smallest and the largest of each mode, and
    note it in their records. Raises `InvalidOptionError` for sizes without a graph."""
    graphs = executor.graphs
    published = graphs.dispatcher.published
    if sizes is not None:
        wanted = items_of("sizes", sizes, "[1, 8]")
        sizes = {count_of("each of sizes", each, least=1) for each in wanted}
    if sizes is None:
        chosen = _ends_of(published)
    else:
        chosen = [each for each in published if each.descriptor.num_tokens in sizes]
        missing = {*sizes} - {each.descriptor.num_tokens for each in chosen}
        if missing:
            raise InvalidOptionError(
                "measure(sizes=) names a size without a graph",
                got=min(missing),
                expected=sorted({each.descriptor.num_tokens for each in published}),
                advice="sizes that were captured, or None for the smallest and the largest",
            )
    for dispatch in chosen:
        eager_s, replay_s = _times_of(executor, dispatch)
        graphs.note_times(dispatch, eager_s, replay_s)


def _ends_of(published: Collection[Dispatch]) -> list[Dispatch]:
    """The smallest and the largest graph of each mode."""
    ends: dict[tuple[GraphMode, bool], Dispatch] = {}
    for each in sorted(published, key=lambda each: each.descriptor.num_tokens):
        ends.setdefault((each.mode, False), each)
        ends[each.mode, True] = each
    return list({each.slot: each for each in ends.values()}.values())


@undoing
def _times_of(executor: StepExecutor, undo: Undo, dispatch: Dispatch) -> tuple[float, float]:
    """The seconds of an eager run and of a step by the graph, state and numbers put back."""
    graphs = executor.graphs
    step, prepared = step_of(executor, dispatch), graphs.steps[dispatch.slot]
    assert prepared is not None
    synchronize = graphs.setup.pool.platform.synchronize
    watch = graphs.checks.runs(graphs.setup)
    undo.later(watch.state.generators.restore)
    undo.later(partial(watch.settle, lambda: None))
    executor.set_updates_aside(undo)
    times: dict[str, list[float]] = {"eager": [], "replay": []}

    @contextmanager
    def timed(way: str) -> Iterator[None]:
        synchronize()
        began = time.perf_counter()
        yield
        synchronize()
        times[way].append(time.perf_counter() - began)

    def eagerly(forward: Callable[[], Any]) -> Any:
        with timed("eager"):
            return without_inner_graphs(forward)

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            watch.restore()

    run(partial(run_watched, executor, step, watch))
    began = time.perf_counter()
    for count in range(_MOST_RUNS):
        passed = time.perf_counter() - began
        if count >= 3 and passed > (_SECONDS if _are_settled(times) else _MOST_SECONDS):
            break
        run(partial(executor.run_padded, step, eager=True, around=eagerly))
        with timed("replay"):
            run_by_graph(executor, step)
        watch.restore()
    return min(times["eager"]), min(times["replay"])


def _are_settled(times: Mapping[str, list[float]]) -> bool:
    """Whether the two fastest runs of each way take about as long."""
    fastest = (sorted(each)[:2] for each in times.values())
    return all(second <= 1.2 * first for first, second in fastest)


def run_watched(executor: StepExecutor, step: Step, watch: RunWatch) -> None:
    """Run a step of a graph eagerly, and save the state that it writes."""
    prepared = executor.graphs.steps[step.dispatch.slot]
    assert prepared is not None
    views, tokens = prepared.layout.views, step.dispatch.descriptor.num_tokens

    def watched(forward: Callable[[], Any]) -> Any:
        alone = partial(without_inner_graphs, forward)
        return watch.run(None, tokens, views, lambda: alone)

    executor.run_padded(step, eager=True, around=watched)


def run_by_graph(executor: StepExecutor, step: Step) -> None:
    """Replay a step's graph as the engine does: a single graph needs no forward context."""
    prepared = executor.graphs.steps[step.dispatch.slot]
    if step.dispatch.mode is GraphMode.FULL and step.updates is None and prepared is not None:
        executor.run(prepared, step.batch, step.values)
    else:
        executor.run_padded(step)


def step_of(executor: StepExecutor, dispatch: Dispatch) -> Step:
    """A step of this graph: the host's example, else rows of padding."""
    graphs = executor.graphs
    prepared, setup = graphs.steps[dispatch.slot], graphs.setup
    assert prepared is not None
    batch = example_of(dispatch.descriptor, prepared.reqs)
    if setup.host.example is not None:
        example = setup.host.example(batch, torch.Generator("cpu").manual_seed(_SEED))
        updates = executor.updates_of(example.updates)
        inputs = executor.inputs
        values = inputs.declared.check(inputs.completed(batch, example.values)[1], None, None)
        return Step(batch, dispatch, tree.cloned({**values}), updates, example.metadata)
    reqs = batch.num_reqs or 1
    executor.pool._expire_outputs()
    executor.inputs.reset(prepared.layout)
    moves = prepared.layout.moves(batch.num_tokens, reqs).fields
    values = {move.field.name: move.live.clone() for move in moves}
    metadata = None if setup.host.metadata is None else setup.host.metadata(dispatch.descriptor)
    updates = WORST_CASE if prepared.transaction.task_names else None
    return Step(batch, dispatch, executor.inputs.nest(values), updates, metadata)
