"""What graphs take of a device's memory: measured, and predicted from the first ones.

1. Graphs are captured from the largest to the smallest, into one pool. The first takes what a step
   needs at its peak, and the next ones use it again.
2. Each further one adds its executable, about the same for all of one mode, whose graphs have
   about the same nodes; and a share of the pool by its tokens, where outputs are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrt.core.plan.budget import GraphCost, LeftOut, PlannedCapture, lacking, total_of
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.sizes import CaptureKey, captured_sizes, graph_name

_SEGMENT_BYTES = 20 << 20
"""The least that an allocator takes from the device. A pool that grew by less may have room for the
graphs that follow, so these need not take as much."""

_CHUNK_BYTES = 2 << 20
"""The least that CUDA's driver takes for graphs."""


@dataclass(frozen=True)
class GraphMemory:
    """Memory of one graph: bytes by which the pool and the driver grew, None if unknown."""

    mode: str
    tokens: int
    pool_bytes: int | None = None
    driver_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Both together."""
        return (self.pool_bytes or 0) + (self.driver_bytes or 0)


def next_bytes(captured: Sequence[GraphMemory], mode: str, tokens: int) -> float:
    """Predict what one more graph takes, after at least one `captured` larger one."""
    graphs = [each for each in captured if each.mode == mode]
    graphs = graphs if len(graphs) > 1 else [*captured]
    # That of the first graph of all includes the kernels loaded with it.
    first = max(0, captured[0].driver_bytes or 0)
    taken = [graph.driver_bytes or 0 for graph in graphs]
    # A graph that took nothing fitted into a chunk of an earlier one.
    least = min(sum(taken) / len(taken), _CHUNK_BYTES)
    if len(graphs) == 1:
        return max(0.0, least)
    grown = max(0, sum(graph.pool_bytes or 0 for graph in graphs[1:]) - _SEGMENT_BYTES)
    share = grown * tokens / sum(graph.tokens for graph in graphs[1:])
    return share + max(0.0, min(sum(taken[1:]) / len(taken[1:]), first), least)


def peak_cost(took: Mapping[CaptureKey, GraphMemory], mode: str, cost: GraphCost) -> GraphCost:
    """The cost of a further graph of a mode, if it begins a chunk of the driver's memory as others
    have."""
    later = [each.driver_bytes or 0 for each in [*took.values()][1:] if each.mode == mode]
    return replace(cost, device_bytes=max([cost.device_bytes, *later]))


def measured_costs(
    took: Mapping[CaptureKey, GraphMemory],
    keys: Iterable[CaptureKey],
    gone: Collection[CaptureKey] = (),
) -> dict[CaptureKey, GraphCost]:
    """The cost of each of `keys`: what it `took`, in the order of captures, else as predicted from
    that. Those `gone` found no room: further ones of their mode take as much at least."""
    held = [each for key, each in took.items() if key not in gone] or [*took.values()][:1]
    # It has brought the pool along, which the others use again.
    first, costs = held[0], {}
    brought = first.pool_bytes or 0
    for key in keys:
        mode, tokens, own = key[0].name, key[1].num_tokens, took.get(key)
        if own is None:
            lost = [took[each].driver_bytes or 0 for each in gone if each[0] is key[0]]
            size = max([next_bytes(held, mode, tokens), *lost])
        else:
            size = own.bytes - (brought if own is first else 0)
        pool = round(brought * tokens / first.tokens)
        costs[key] = GraphCost(device_bytes=max(0, round(size)), pool_bytes=pool)
    return costs


def measured_plan(
    plan: Plan,
    took: Mapping[CaptureKey, GraphMemory],
    held: Collection[CaptureKey],
    left_out: Collection[CaptureKey],
    lost_bytes: int = 0,
) -> Plan:
    """The plan with costs, by what graphs `took`: those that are `held`, and others that are
    predicted to fit. `left_out` are not tried again; `lost_bytes` belong to no graph."""
    budget = plan.arguments["budget"]
    assert budget is not None and budget.device_bytes is not None
    limit = budget.device_bytes
    bytes_of = measured_costs(took, plan.keys, [key for key in took if key not in held])
    costs = {
        key: replace(
            budget.cost_of(*key), device_bytes=each.device_bytes, pool_bytes=each.pool_bytes
        )
        for key, each in bytes_of.items()
    }
    # The last one that fits may take more than the average.
    peaks = {key: peak_cost(took, key[0].name, costs[key]) for key in plan.keys}
    kept, used = {*held}, total_of(costs[key] for key in held)
    used += GraphCost(graphs=0, device_bytes=lost_bytes)
    for key in plan.capture_order():
        if key not in kept and key not in left_out and budget.lacks(used, peaks[key]) is None:
            kept.add(key)
            used += costs[key]
    whole, plan = plan, copy.copy(plan)
    named: Any = {**(budget.cost or {})}
    named |= {graph_name(key): cost for key, cost in costs.items()}
    plan.arguments = {**whole.arguments, "budget": replace(budget, cost=named)}
    plan.keys = tuple(key for key in whole.keys if key in kept)
    plan.captured = tuple(PlannedCapture(*key, costs[key]) for key in plan.keys)
    left = [
        LeftOut(*key, costs[key], lacking("device_bytes", used, peaks[key], limit))
        for key in whole.keys
        if key not in kept
    ]
    plan.left_out = (*whole.left_out, *left)
    plan.sizes = captured_sizes(whole._possible, plan.keys, whole.arguments["sizes"])
    return plan
