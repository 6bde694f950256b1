"""Which graphs a budget holds, what each costs, and what is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import count_of, items_of, number_of, refused, shown
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.resolution import ModeResolution
from graphrt.core.plan.sizes import CaptureKey, graph_name
from graphrt.core.plan.traffic import by_worth

RESOURCES = ("streams", "graphs", "device_bytes", "capture_s")
"""The fields of `GraphCost` and, as limits, of `Budget`."""


@dataclass(frozen=True)
class GraphCost:
    """What the graph of one descriptor takes; for PIECEWISE all its pieces together.

    `streams` of the device, `device_bytes` of its memory, `capture_s` seconds. `pool_bytes` are
    bytes beside these of memory that graphs share: all together need those of the largest. Raises
    `InvalidOptionError` for what is no number, or negative.
    """

    streams: int = 0
    graphs: int = 1
    """Device graphs: 1, or the number of pieces."""
    device_bytes: int = 0
    capture_s: float = 0.0
    pool_bytes: int = 0

    def __post_init__(self) -> None:
        _make_numbers(self)

    def __add__(self, other: GraphCost) -> GraphCost:
        sums = {name: getattr(self, name) + getattr(other, name) for name in RESOURCES}
        return GraphCost(**sums, pool_bytes=max(self.pool_bytes, other.pool_bytes))

    def amount(self, resource: str) -> float:
        """So much of a resource in all, for `device_bytes` with the pool."""
        own: float = getattr(self, resource)
        return own + self.pool_bytes if resource == "device_bytes" else own


@dataclass(frozen=True)
class Budget:
    """What the graphs of one plan may take together, in the units of `GraphCost`; None is no limit.

    `cost` says what each graph of a runtime mode takes, or one graph by its name in a report; one
    that it leaves out takes one graph and nothing else. A plan needs the cost of what is limited
    for each graph. `device_bytes` alone need none: a runner measures two graphs of each mode and
    predicts the others, and `runner.plan` says what is captured.
    With fewer than `min_piecewise` piecewise sizes only decode is captured. `notes` are lines that
    a plan prints with the budget, such as where its limits come from.

    Raises `InvalidOptionError` for a limit that is no number, or negative, and for costs that are
    none.
    """

    streams: int | None = None
    graphs: int | None = None
    device_bytes: int | None = None
    capture_s: float | None = None
    cost: Mapping[GraphMode, GraphCost] | Mapping[str, GraphCost] | None = None
    min_piecewise: int = 2
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_numbers(self)
        least = count_of("min_piecewise", self.min_piecewise, least=0)
        notes = items_of("notes", self.notes, '("a line",)')
        notes = tuple(note if isinstance(note, str) else shown(note) for note in notes)
        object.__setattr__(self, "min_piecewise", least)
        object.__setattr__(self, "notes", notes)
        cost = {} if self.cost is None else self.cost
        of_graphs = cost.values() if isinstance(cost, Mapping) else [None]
        if not all(isinstance(each, GraphCost) for each in of_graphs):
            expected = "a GraphCost for each runtime mode"
            advice = "cost={GraphMode.FULL: GraphCost(streams=1)}"
            raise refused("the cost of graphs has a wrong type", cost, expected, advice)
        # Looked up by mode, whose name may be given, or by the name of one graph.
        named = {
            mode if "[" in str(mode) else GraphMode.parse(mode): each for mode, each in cost.items()
        }
        object.__setattr__(self, "cost", named or None)

    def cost_of(self, mode: GraphMode, descriptor: BatchDescriptor | None = None) -> GraphCost:
        """What a graph of a runtime mode takes, or the one of a descriptor."""
        costs: Mapping[Any, GraphCost] = self.cost or {}
        of_mode = costs.get(GraphMode.parse(mode), GraphCost())
        # A name takes the repr() of a host's own variant.
        if descriptor is None or not any(isinstance(each, str) for each in costs):
            return of_mode
        return costs.get(graph_name((GraphMode.parse(mode), descriptor)), of_mode)

    @property
    def is_measured(self) -> bool:
        """Whether it limits bytes, and a runner has to find out what graphs take."""
        costs = (self.cost or {}).values()
        return self.device_bytes is not None and not any(c.amount("device_bytes") for c in costs)

    def check_costs(self, keys: Collection[tuple[GraphMode, BatchDescriptor]]) -> None:
        """Raise `InvalidOptionError` for a limit that limits nothing, as no cost says how much of
        it each of these graphs takes. A cost of 0 beside others is believed."""
        costs = self.cost or {}
        limited = {name for name in RESOURCES if getattr(self, name) is not None} - {"graphs"}
        limited -= {"device_bytes"} if self.is_measured else set()
        told = {name for name in limited if any(each.amount(name) for each in costs.values())}
        for name, key in itertools.product(sorted(limited), keys):
            limit, mode = getattr(self, name), key[0]
            if name not in told or (mode not in costs and graph_name(key) not in costs):
                raise InvalidOptionError(
                    f"a budget of {name} needs the cost of a {mode.name} graph",
                    got=f"Budget({name}={limit}) without {name} in cost= for {mode.name}",
                    expected=f"cost={{GraphMode.{mode.name}: GraphCost({name}=...)}}, or by the "
                    f'name of each graph, of which "{graph_name(key)}" has none',
                    advice="capture once without this limit, and take each graph's figures from "
                    "print(runner.report()); MemoryWatch(limit_bytes=) warns while capturing",
                )

    def lacks(self, used: GraphCost, more: GraphCost) -> str | None:
        """The first resource that `more` does not fit into beside `used`, or None."""
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and (used + more).amount(name) > limit:
                return name
        return None


def _make_numbers(owner: GraphCost | Budget) -> None:
    """Replace amounts by Python numbers: a plan is saved as JSON."""
    for name in (*RESOURCES, "pool_bytes") if isinstance(owner, GraphCost) else RESOURCES:
        amount = getattr(owner, name)
        if amount is not None or isinstance(owner, GraphCost):
            what = f"a {type(owner).__name__.removeprefix('Graph').lower()} of {name}"
            example = 1 << 30 if name.endswith("bytes") else 1
            object.__setattr__(owner, name, number_of(name, amount, what, example=example))


class PlannedCapture(NamedTuple):
    """A graph that is captured, and what it will take."""

    mode: GraphMode
    descriptor: BatchDescriptor
    cost: GraphCost


class LeftOut(NamedTuple):
    """A graph that is not captured, and why."""

    mode: GraphMode
    descriptor: BatchDescriptor
    cost: GraphCost
    why: str


Captured = tuple[PlannedCapture, ...]
"""The graphs that are captured, in capture order."""


def budget_lines(budget: Budget, captured: Captured, left_out: Sequence[LeftOut]) -> list[str]:
    """Every graph with its cost, the sum, and what was left out."""
    total = total_of(planned.cost for planned in captured)
    limited = [name for name in RESOURCES if getattr(budget, name) is not None]
    # Nothing is measured yet.
    unknown = budget.is_measured and not total.amount("device_bytes")
    if unknown:
        limited.remove("device_bytes")
    taken = [name for name in RESOURCES if name != "graphs" and total.amount(name)]
    shown = [name for name in RESOURCES if name in limited + taken] or ["graphs"]
    counted = f"{len(captured)} of {len(captured) + len(left_out)} sizes"
    limits = [of_limit(n, total.amount(n), getattr(budget, n)) for n in limited]
    sums = limits or [figure(name, total.amount(name)) for name in shown]
    if total.pool_bytes:
        sums.append(f"{figure('device_bytes', total.pool_bytes)} of it are the pool")

    def figures(cost: GraphCost) -> str:
        return ", ".join(figure(name, getattr(cost, name)) for name in shown)

    return [
        *budget.notes,
        *(f"{p.mode.name} [{p.descriptor}]: {figures(p.cost)}" for p in captured),
        f"in all: {counted}, {', '.join(sums)}",
        *([_MEASURED.format(figure("device_bytes", budget.device_bytes or 0))] * unknown),
        *_left_out_lines(left_out),
    ]


_MEASURED = (
    "at most {}: a runner captures two graphs of each mode and predicts the others; "
    "print(runner.plan) has what is captured"
)

BUDGET_RULE = "budget"
"""The rule of the steps that a budget adds to the resolution of the mode."""
Worth = Callable[[Iterable[int]], Iterable[int]]
"""Sizes of one kind, the most valuable first: see `by_worth`."""
Costs = dict[CaptureKey, GraphCost]
"""What each planned graph takes."""


def fit(
    keys: Sequence[CaptureKey], budget: Budget, mode: ModeResolution, worth: Worth = by_worth
) -> tuple[ModeResolution, Captured, tuple[LeftOut, ...]]:
    """Choose which of `keys` (in capture order) to capture within `budget`; returns the mode that
    this leaves, what is captured, and what is not.

    FULL graphs come first, because pieces take many times as much, but for `budget.min_piecewise`
    pieces, where they take no more than half of the budget. Within a mode the largest size of each
    kind is kept before the others, which follow by their `worth`; what does not fit is left out,
    and smaller graphs after it may still fit.

    Fewer than `budget.min_piecewise` PIECEWISE sizes (or than were asked for) turn
    FULL_AND_PIECEWISE into FULL_DECODE_ONLY, no FULL graph turns it into PIECEWISE; where no graph
    fits at all, the mode becomes NONE.
    """
    costs = {key: budget.cost_of(*key) for key in keys}
    order = by_priority(keys, worth)
    full = [key for key in order if key[0] is GraphMode.FULL]
    pieces = [key for key in order if key[0] is GraphMode.PIECEWISE]
    fewest = min(budget.min_piecewise, len(pieces))
    taken = total_of(costs[key] for key in pieces[:fewest])
    # If twice their cost does not fit, they would take more than half of the budget.
    early = 0 if budget.lacks(taken, taken) else fewest
    kept = _fill([*full[:1], *pieces[:early], *full[1:], *pieces[early:]], costs, budget)
    if mode.mode is GraphMode.FULL_AND_PIECEWISE:
        fit_in = sum(key in kept for key in pieces)
        if fit_in < fewest:
            why = f"the budget holds {fit_in} of {len(pieces)} piecewise sizes, fewer than {fewest}"
            mode = mode.stepped(BUDGET_RULE, GraphMode.FULL_DECODE_ONLY, why)
            kept = _fill(full, costs, budget)
        elif full and 0 < fit_in == len(kept):
            mode = mode.stepped(BUDGET_RULE, GraphMode.PIECEWISE, "the budget holds no FULL graph")
    if keys and not kept:
        mode = mode.stepped(BUDGET_RULE, GraphMode.NONE, "the budget holds no graph at all")
    captured = tuple(PlannedCapture(*key, costs[key]) for key in keys if key in kept)
    return mode, captured, tuple(_left_out(keys, kept, costs, budget, mode.mode))


def by_priority(keys: Iterable[CaptureKey], worth: Worth) -> list[CaptureKey]:
    """The keys in the order in which a budget takes them: FULL before PIECEWISE, the best size of
    each kind, then the second best of each. Else one query length could take all the room."""
    # Graphs of one kind can serve each other's batches.
    kinds: dict[object, list[CaptureKey]] = {}
    for mode, descriptor in keys:
        kinds.setdefault((mode, descriptor.kind), []).append((mode, descriptor))
    order: list[tuple[bool, int, int, CaptureKey]] = []
    for of_kind in kinds.values():
        rank = {size: at for at, size in enumerate(worth(each.num_tokens for _, each in of_kind))}
        for key in of_kind:
            tokens = key[1].num_tokens
            order.append((key[0] is GraphMode.PIECEWISE, rank[tokens], -tokens, key))
    return [key for *_, key in sorted(order, key=lambda each: each[:3])]


def _fill(order: Iterable[CaptureKey], costs: Costs, budget: Budget) -> set[CaptureKey]:
    """The keys that fit into the budget, where they take their share in this order."""
    kept: set[CaptureKey] = set()
    used = total_of(())
    for key in order:
        if budget.lacks(used, costs[key]) is None:
            kept.add(key)
            used += costs[key]
    return kept


def _left_out(
    keys: Iterable[CaptureKey], kept: set[CaptureKey], costs: Costs, budget: Budget, mode: GraphMode
) -> Iterator[LeftOut]:
    """Why each of the other keys is left out."""
    used = total_of(costs[key] for key in kept)
    for key in keys:
        if key in kept:
            continue
        cost = costs[key]
        why = f"mode {mode.name} captures no {key[0].name} graphs"
        if mode is GraphMode.NONE or key[0] in mode.runtime_modes:
            name = budget.lacks(used, cost)
            assert name is not None
            why = lacking(name, used, cost, getattr(budget, name))
        yield LeftOut(*key, cost, why)


def lacking(name: str, used: GraphCost, cost: GraphCost, limit: float) -> str:
    """Why a graph of this cost does not fit beside those `used`."""
    needed = (used + cost).amount(name) - used.amount(name)
    free = of_limit(name, limit - used.amount(name), limit)
    return f"needs {figure(name, needed)}; free: {free}"


def total_of(costs: Iterable[GraphCost]) -> GraphCost:
    """The sum of costs."""
    return sum(costs, GraphCost(graphs=0))


def _left_out_lines(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """A line for each reason: the largest of its graphs, and how many more there are."""
    by_reason: dict[tuple[GraphMode, str], list[LeftOut]] = {}
    for each in left_out:
        by_reason.setdefault((each.mode, each.why), []).append(each)
    for first, *others in by_reason.values():
        sizes = [each.descriptor.num_tokens for each in others]
        more = f" and {len(sizes)} more of {min(sizes)} to {max(sizes)} tokens" if sizes else ""
        yield f"left out: {first.mode.name} [{first.descriptor}]{more}: {first.why}"


def figure(name: str, value: float) -> str:
    """An amount of a resource with its unit, for people."""
    if name == "device_bytes":
        return f"{value / (1 << 20):.1f} MiB"
    if name == "capture_s":
        return f"{value:.2f} s"
    return f"{value} {name if value != 1 else name.removesuffix('s')}"


def of_limit(name: str, value: float, limit: float) -> str:
    """An amount and its limit, with the unit once."""
    return f"{figure(name, value).partition(' ')[0]} of {figure(name, limit)}"
