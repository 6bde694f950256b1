"""What runs the steps of a runner, of each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from graphrt.core.capture.options import GraphOptions
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.plan.plan import Plan
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.host import Host
from graphrt.core.runner.steps.checked import CheckedSteps
from graphrt.core.runner.steps.padded import PaddedSteps
from graphrt.core.runner.steps.slots import Slots
from graphrt.core.runner.steps.unpadded import UnpaddedSteps
from graphrt.core.runner.steps.updates import LastUpdates


class Steps(NamedTuple):
    """What runs steps: without a graph, with one, those that are checked, those in place."""

    unpadded: UnpaddedSteps
    padded: PaddedSteps
    checked: CheckedSteps
    slots: Slots


def steps_of(
    forward: Callable[..., Any],
    graphs: GraphSet,
    plan: Plan,
    host: Host,
    options: GraphOptions,
    inputs: StaticInputs,
    pool: GraphPool,
    updates: LastUpdates,
) -> Steps:
    """What runs the steps of `forward`, whose graphs are `graphs`."""
    clones = options.outputs == "clone"
    unpadded = UnpaddedSteps(
        graphs.run_forward,
        graphs.sealing,
        plan,
        host.bind,
        inputs,
        pool,
        graphs.owner,
        clones=clones,
        after=graphs.checks.look_after_eager_step,
    )
    padded = PaddedSteps(
        graphs.steps,
        graphs.run_forward,
        host.bind,
        inputs,
        pool,
        graphs.dispatcher,
        graphs.owner,
        clones=clones,
        eager_launch=graphs.eager_launch,
    )
    checked = CheckedSteps(
        forward,
        graphs.checks,
        graphs.steps,
        graphs.warmed_up,
        padded,
        unpadded,
        updates,
        graphs.run_forward,
        limit_bytes=partial(options.state_limit, pool.platform),
        mixes_rows=host.mixes_rows,
        at_bound=host.metadata,
        keep_touched=graphs.keep_touched,
    )
    slots = Slots(graphs.dispatcher, graphs.steps, graphs.sealing, inputs, pool, graphs.owner)
    return Steps(unpadded, padded, checked, slots)
