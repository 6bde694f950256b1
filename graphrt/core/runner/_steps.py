"""What runs the steps of a runner, of each kind."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.runner.steps import (
    CheckedSteps,
    LastUpdates,
    PaddedSteps,
    Slots,
    UnpaddedSteps,
)


class Steps(NamedTuple):
    """What runs steps: without a graph, with one, those that are checked, those in place."""

    unpadded: UnpaddedSteps
    padded: PaddedSteps
    checked: CheckedSteps
    slots: Slots


def steps_of(setup: RunnerSetup, graphs: GraphTable, updates: LastUpdates) -> Steps:
    """What runs the steps of a runner, whose graphs are `graphs`."""
    options, host, inputs, pool = setup.options, setup.host, setup.inputs, setup.pool
    clones = options.outputs == "clone"
    unpadded = UnpaddedSteps(
        setup.run_forward,
        graphs.sealing,
        setup.plan,
        host.bind,
        inputs,
        pool,
        graphs.owner,
        clones=clones,
        after=graphs.checks.look_after_eager_step,
    )
    padded = PaddedSteps(
        graphs.steps,
        setup.run_forward,
        host.bind,
        inputs,
        pool,
        graphs.dispatcher,
        graphs.owner,
        clones=clones,
        eager_launch=setup.eager_launch,
    )
    checked = CheckedSteps(
        setup.forward,
        graphs.checks,
        graphs.steps,
        graphs.warmed_up,
        padded,
        unpadded,
        updates,
        setup.run_forward,
        limit_bytes=partial(options.state_limit, pool.platform),
        mixes_rows=host.mixes_rows,
        at_bound=host.metadata,
        keep_touched=graphs.keep_touched,
    )
    slots = Slots(graphs.dispatcher, graphs.steps, graphs.sealing, inputs, pool, graphs.owner)
    return Steps(unpadded, padded, checked, slots)
