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

from graphrt.core.plan.budget import Budget, GraphCost, LeftOut, PlannedCapture, lacking, total_of
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


def _brought(
    took: Mapping[CaptureKey, GraphMemory], gone: Collection[CaptureKey]
) -> tuple[list[CaptureKey], int]:
    """The graphs up to the largest, and the pool that they have brought, which others use again."""
    held = [key for key in took if key not in gone] or [*took][:1]
    largest = max(held, key=lambda key: took[key].tokens)
    first = held[: held.index(largest) + 1]
    return first, sum(took[key].pool_bytes or 0 for key in first)


def measured_costs(
    took: Mapping[CaptureKey, GraphMemory],
    keys: Iterable[CaptureKey],
    gone: Collection[CaptureKey] = (),
) -> dict[CaptureKey, GraphCost]:
    """The cost of each of `keys`: what it `took`, in the order of captures, else as predicted from
    that. Those `gone` found no room: further ones of their mode take as much at least."""
    first, brought = _brought(took, gone)
    held = [took[key] for key in took if key in first or key not in gone]
    costs: dict[CaptureKey, GraphCost] = {}
    for key in keys:
        mode, tokens, own = key[0].name, key[1].num_tokens, took.get(key)
        if own is None:
            lost = [took[each].driver_bytes or 0 for each in gone if each[0] is key[0]]
            size = max([next_bytes(held, mode, tokens), *lost])
        else:
            size = own.bytes - ((own.pool_bytes or 0) if key in first else 0)
        pool = round(brought * tokens / took[first[-1]].tokens)
        costs[key] = GraphCost(device_bytes=max(0, round(size)), pool_bytes=pool)
    return costs


class MeasuredBudget:
    """A budget of bytes whose costs a runner measures: what graphs took, what did not come back
    when they were destroyed, and what still fits. `held` are the graphs that are captured now."""

    def __init__(self, plan: Plan) -> None:
        """Of a plan that is measured."""
        self._plan, self._budget = plan, plan.arguments["budget"] or Budget()
        self.most_bytes = self._budget.device_bytes or 0
        # In the order of captures, with those that are gone.
        self.took: dict[CaptureKey, GraphMemory] = {}
        self._lost_bytes = 0

    def note(self, key: CaptureKey, pool_bytes: int | None, driver_bytes: int | None) -> None:
        """Note what a graph took."""
        # Captured again, it uses what it has brought into the pool.
        before = (self.took[key].pool_bytes or 0) if key in self.took else 0
        # Other processes may have given memory back meanwhile.
        driver = max(0, driver_bytes or 0)
        tokens, pool = key[1].num_tokens, before + (pool_bytes or 0)
        self.took[key] = GraphMemory(key[0].name, tokens, pool, driver)

    def lose(self, key: CaptureKey, freed: int) -> bool:
        """Note that a graph is gone, and the bytes that came back; says whether that are some."""
        came_back = min(self.took[key].driver_bytes or 0, freed)
        self._lost_bytes += self.took[key].bytes - came_back
        return came_back > 0

    def clear(self) -> None:
        """Forget all graphs, whose memory has come back."""
        self.took.clear()
        self._lost_bytes = 0

    def is_over(self, held: Iterable[CaptureKey]) -> bool:
        """Whether the graphs take more than the budget has."""
        return self._taken(held) > self.most_bytes

    def has_room(self, key: CaptureKey, held: Sequence[CaptureKey]) -> bool:
        """Whether a further graph is predicted to fit."""
        if not held:
            return True
        gone = self._gone(held)
        peak = self._peak(key, measured_costs(self.took, [key], gone)[key])
        pool = max(0, peak.pool_bytes - _brought(self.took, gone)[1])
        return self._taken(held) + peak.device_bytes + pool <= self.most_bytes

    def plan(self, held: Collection[CaptureKey], left_out: Collection[CaptureKey]) -> Plan:
        """The plan with costs: the graphs that are held, and what is predicted to fit of the others
        but for those `left_out`."""
        whole, budget, costs = self._plan, self._budget, {}
        if not self.took:
            return whole
        for key, told in measured_costs(self.took, whole.keys, self._gone(held)).items():
            device, pool = told.device_bytes, told.pool_bytes
            costs[key] = replace(budget.cost_of(*key), device_bytes=device, pool_bytes=pool)
        used = total_of(costs[key] for key in held)
        used += GraphCost(graphs=0, device_bytes=self._lost_bytes)
        kept = {*held}
        for key in whole.capture_order():
            is_asked = key not in kept and key not in left_out
            if is_asked and budget.lacks(used, self._peak(key, costs[key])) is None:
                kept.add(key)
                used += costs[key]
        plan = copy.copy(whole)
        named: Any = {graph_name(key): cost for key, cost in costs.items()}
        budget = replace(budget, cost={**(budget.cost or {}), **named})
        plan.arguments = {**whole.arguments, "budget": budget}
        plan.captured = tuple(PlannedCapture(*key, costs[key]) for key in whole.keys if key in kept)
        plan.keys = tuple(key for key in whole.keys if key in kept)
        for key in whole.keys:
            if key not in kept:
                peak = self._peak(key, costs[key])
                why = "left out as it was captured, or under max_graphs or graph_bytes"
                if budget.lacks(used, peak) is not None:
                    why = lacking("device_bytes", used, peak, self.most_bytes)
                plan.left_out += (LeftOut(*key, costs[key], why),)
        plan.sizes = captured_sizes(whole._possible, plan.keys, whole.arguments["sizes"])
        return plan

    def _taken(self, held: Iterable[CaptureKey]) -> int:
        return sum(self.took[key].bytes for key in held) + self._lost_bytes

    def _gone(self, held: Collection[CaptureKey]) -> list[CaptureKey]:
        return [key for key in self.took if key not in held]

    def _peak(self, key: CaptureKey, cost: GraphCost) -> GraphCost:
        """The cost of a graph, if it begins a chunk of the driver's memory as others of its mode
        have. By the average alone the last one that fits is often one too many."""
        took = [*self.took.values()]
        of_mode = [each for each in took if each.mode == key[0].name] or took
        grown = [each.driver_bytes or 0 for each in of_mode[1:] or of_mode]
        return replace(cost, device_bytes=max(cost.device_bytes, *grown))
