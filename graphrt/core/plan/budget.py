"""Which graphs a budget holds, what each costs, and what is left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import (
    check_takes,
    count_of,
    items_of,
    number_of,
    shown,
)
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.resolution import ModeResolution
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.plan.traffic import Traffic, best_sizes, by_worth

RESOURCES = ("streams", "graphs", "device_bytes", "capture_s")


@public("graphrt")
@dataclass(frozen=True)
class GraphCost:
    """What the graph of one descriptor takes; for PIECEWISE all its pieces together.

    `streams` of the device, `device_bytes` of its memory, `capture_s` seconds. Raises
    `InvalidOptionError` for what is no number, or negative.
    """

    streams: int = 0
    graphs: int = 1
    """Device graphs: 1, or the number of pieces."""
    device_bytes: int = 0
    capture_s: float = 0.0

    def __post_init__(self) -> None:
        _make_numbers(self)

    def __add__(self, other: GraphCost) -> GraphCost:
        return GraphCost(*(getattr(self, name) + getattr(other, name) for name in RESOURCES))


CostModel = Callable[[GraphMode, BatchDescriptor], GraphCost]
"""What the graph of a runtime mode and descriptor will take."""


@public("graphrt")
@dataclass(frozen=True)
class Budget:
    """What the graphs of one plan may take together, in the units of `GraphCost`; None is no limit.

    `cost` says what each graph takes: one cost for each runtime mode, or a function of mode and
    descriptor (of which no plan can be saved); what it leaves out takes one graph and nothing else.
    With fewer than `min_piecewise` piecewise sizes only decode is captured. `notes` are lines that
    a plan prints with the budget, such as where its limits come from.

    Raises `InvalidOptionError` for a limit that is no number, or negative, and for costs that are
    none.
    """

    streams: int | None = None
    graphs: int | None = None
    device_bytes: int | None = None
    capture_s: float | None = None
    cost: CostModel | Mapping[GraphMode, GraphCost] | None = None
    min_piecewise: int = 2
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_numbers(self)
        least = count_of("min_piecewise", self.min_piecewise, least=0)
        notes = items_of("notes", self.notes, '("a line",)')
        object.__setattr__(self, "min_piecewise", least)
        lines = tuple(note if isinstance(note, str) else shown(note) for note in notes)
        object.__setattr__(self, "notes", lines)
        cost = self.cost
        if isinstance(cost, Mapping):
            # Looked up by mode, whose name may be given.
            by_mode = {GraphMode.parse(mode): _checked_cost(each) for mode, each in cost.items()}
            object.__setattr__(self, "cost", by_mode)
        elif callable(cost):
            check_takes("cost", cost, "cost(mode, descriptor)")
        elif cost is not None:
            raise InvalidOptionError(
                "the cost of graphs has a wrong type",
                got=shown(cost),
                expected="a GraphCost for each runtime mode, or a function of mode and descriptor",
                advice="cost={GraphMode.FULL: GraphCost(streams=1)}",
            )

    def cost_of(self, mode: GraphMode, descriptor: BatchDescriptor) -> GraphCost:
        """What the graph of a key takes; raises `InvalidOptionError` if `cost` cannot say."""
        if callable(self.cost):
            return _checked_cost(self.cost(mode, descriptor))
        return (self.cost or {}).get(GraphMode.parse(mode), GraphCost())

    def lacks(self, used: GraphCost, more: GraphCost) -> str | None:
        """The first resource that `more` does not fit into beside `used`, or None."""
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and getattr(used, name) + getattr(more, name) > limit:
                return name
        return None


def _checked_cost(cost: object) -> GraphCost:
    if not isinstance(cost, GraphCost):
        raise InvalidOptionError(
            "what a graph takes is no GraphCost",
            got=shown(cost),
            expected="GraphCost(streams=, graphs=, device_bytes=, capture_s=)",
            advice="GraphCost(streams=1)",
        )
    return cost


def _make_numbers(owner: GraphCost | Budget) -> None:
    """Replace amounts by Python numbers: a plan is saved as JSON."""
    for name in RESOURCES:
        amount = getattr(owner, name)
        if amount is not None or isinstance(owner, GraphCost):
            what = f"a {type(owner).__name__.removeprefix('Graph').lower()} of {name}"
            object.__setattr__(owner, name, number_of(name, amount, what))


@public("graphrt.types")
class PlannedCapture(NamedTuple):
    """A graph that is captured, and what it will take."""

    mode: GraphMode
    descriptor: BatchDescriptor
    cost: GraphCost


@public("graphrt.types")
class LeftOut(NamedTuple):
    """A graph that is not captured, and why."""

    mode: GraphMode
    descriptor: BatchDescriptor
    cost: GraphCost
    why: str
    padded_to: int | None
    """Tokens of the graph of its mode and kind that serves its batches, or None."""


@dataclass(frozen=True)
class Fitted:
    """What is captured, in this order, what it takes and what was left out."""

    resolution: ModeResolution
    captured: tuple[PlannedCapture, ...]
    left_out: tuple[LeftOut, ...]
    budget: Budget

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """What to capture, in capture order."""
        return tuple((planned.mode, planned.descriptor) for planned in self.captured)

    @property
    def total(self) -> GraphCost:
        """What all captured graphs take together."""
        return _total(planned.cost for planned in self.captured)

    def lines(self) -> list[str]:
        """Every graph with its cost, the sum, and what was left out."""
        budget, total = self.budget, self.total
        limited = [name for name in RESOURCES if getattr(budget, name) is not None]
        taken = [name for name in RESOURCES if name != "graphs" and getattr(total, name)]
        shown = [name for name in RESOURCES if name in limited + taken] or ["graphs"]
        counted = f"{len(self.captured)} of {len(self.captured) + len(self.left_out)} sizes"
        limits = [of_limit(n, getattr(total, n), getattr(budget, n)) for n in limited]

        def figures(cost: GraphCost) -> str:
            return ", ".join(figure(name, getattr(cost, name)) for name in shown)

        return [
            *budget.notes,
            *(f"{p.mode.name} [{p.descriptor}]: {figures(p.cost)}" for p in self.captured),
            f"in all: {counted}, {', '.join(limits) or figures(total)}",
            *_left_out_lines(self.left_out),
        ]


BUDGET_RULE = "budget"
Costs = dict[CaptureKey, GraphCost]
Kept = dict[CaptureKey, None]
"""A set in the order in which the graphs were chosen."""


def fit(
    keys: Sequence[CaptureKey],
    budget: Budget,
    *,
    mode: ModeResolution,
    traffic: Traffic | None = None,
    landmarks: Collection[int] = (),
) -> Fitted:
    """Choose which of `keys` (in capture order) to capture within `budget`.

    FULL graphs come first, because pieces take many times as much: but for
    `budget.min_piecewise` pieces, which are kept where they take no more than half of the budget,
    there are pieces where all FULL graphs fit. Within a mode the largest size is kept before the
    smallest, then those of `landmarks` (a full decode batch), then the most valuable (see
    `by_worth`); what does not fit is left out, and smaller graphs after it may still fit. Where the
    graphs of a mode cost alike, a larger budget keeps what a smaller one held, and more, as long as
    both end in the same mode. With `traffic` as many sizes of each kind as fit are those that pad
    its batches least (`best_sizes`); a larger budget may then keep others.

    Fewer than `budget.min_piecewise` PIECEWISE sizes (or than were asked for) turn
    FULL_AND_PIECEWISE into FULL_DECODE_ONLY, no FULL graph turns it into PIECEWISE; where no graph
    fits at all, the mode becomes NONE.
    """
    costs = {key: budget.cost_of(*key) for key in keys}
    unlimited = all(getattr(budget, name) is None for name in RESOURCES)
    order = list(keys) if unlimited else by_priority(keys, traffic, landmarks)
    kept, mode = _within(order, costs, budget, mode)
    if traffic is not None:
        kept = _refitted(keys, kept, costs, budget, traffic)
    captured = tuple(PlannedCapture(*key, costs[key]) for key in keys if key in kept)
    left_out = tuple(_left_out(keys, kept, costs, budget, mode.mode))
    return Fitted(mode, captured, left_out, budget)


def by_priority(
    keys: Iterable[CaptureKey], traffic: Traffic | None, landmarks: Collection[int]
) -> list[CaptureKey]:
    """All keys, those first that are kept last when the budget shrinks."""
    by_mode: dict[GraphMode, list[list[CaptureKey]]] = {GraphMode.FULL: [], GraphMode.PIECEWISE: []}
    for (mode, _), alike in _by_kind(keys).items():
        worth = by_worth((descriptor.num_tokens for _, descriptor in alike), traffic, landmarks)
        rank = {size: at for at, size in enumerate(worth)}
        by_mode[mode].append(sorted(alike, key=lambda key: rank[key[1].num_tokens]))
    order: list[CaptureKey] = []
    for ranked in filter(None, by_mode.values()):
        # One size of each kind in turn, or one query length would starve the others.
        turns = [key for turn in zip_longest(*ranked) for key in turn if key is not None]
        ends = [max(turns, key=_tokens)]
        if traffic is None:
            ends.append(min(turns, key=_tokens))
        order += dict.fromkeys([*ends, *turns])
    return order


def _tokens(key: CaptureKey) -> int:
    return key[1].num_tokens


def _by_kind(keys: Iterable[CaptureKey]) -> dict[tuple[GraphMode, object], list[CaptureKey]]:
    """Graphs that can serve each other's batches."""
    kinds: dict[tuple[GraphMode, object], list[CaptureKey]] = {}
    for key in keys:
        kinds.setdefault((key[0], key[1].kind), []).append(key)
    return kinds


def _within(
    order: Sequence[CaptureKey], costs: Costs, budget: Budget, mode: ModeResolution
) -> tuple[Kept, ModeResolution]:
    """What the budget holds of keys in this order, and the mode that it leaves."""
    pieces = [key for key in order if key[0] is GraphMode.PIECEWISE]
    fewest = min(budget.min_piecewise, len(pieces))
    least = pieces[:fewest]
    taken = _total(costs[key] for key in least)
    if budget.lacks(taken, taken):
        # Twice their cost does not fit: they would take more than half of the budget.
        least = []
    kept = _fill(order, costs, budget, least)
    held = sum(key in kept for key in pieces)
    if mode.mode is GraphMode.FULL_AND_PIECEWISE:
        if held < fewest:
            why = f"the budget holds {held} of {len(pieces)} piecewise sizes, fewer than {fewest}"
            mode = mode.stepped(BUDGET_RULE, GraphMode.FULL_DECODE_ONLY, why)
            kept = _fill([key for key in order if key[0] is GraphMode.FULL], costs, budget)
        elif 0 < held == len(kept) and len(pieces) < len(order):
            mode = mode.stepped(BUDGET_RULE, GraphMode.PIECEWISE, "the budget holds no FULL graph")
    if order and not kept:
        mode = mode.stepped(BUDGET_RULE, GraphMode.NONE, "the budget holds no graph at all")
    return kept, mode


def _fill(
    order: Sequence[CaptureKey], costs: Costs, budget: Budget, least: Sequence[CaptureKey] = ()
) -> Kept:
    """What fits, in order; the `least` pieces come right after the first graph of `order`."""
    kept: Kept = {}
    used = nothing = _total(())
    waiting = False
    for key in dict.fromkeys([*order[:1], *least, *order]):
        if waiting and key[0] is GraphMode.PIECEWISE and key not in least:
            # A FULL graph that could fit is still waiting for room. Pieces that take that room now
            # would go again under a larger budget, which is to keep all that this one holds.
            continue
        if budget.lacks(used, costs[key]) is None:
            kept[key] = None
            used += costs[key]
        elif key[0] is GraphMode.FULL and budget.lacks(nothing, costs[key]) is None:
            waiting = True
    return kept


def _refitted(
    keys: Iterable[CaptureKey], kept: Kept, costs: Costs, budget: Budget, traffic: Traffic
) -> Kept:
    """`kept`, with the sizes of each kind that pad least, where these fit as well."""
    for alike in _by_kind(keys).values():
        held = [key for key in alike if key in kept]
        if 0 < len(held) < len(alike):
            largest = max(map(_tokens, held))
            by_size = {_tokens(key): key for key in alike if _tokens(key) <= largest}
            best = [by_size[size] for size in best_sizes(by_size, traffic, len(held))]
            best += [key for key in held if key not in best][: len(held) - len(best)]
            swapped = dict.fromkeys([*(key for key in kept if key not in held), *best])
            if not budget.lacks(_total(()), _total(costs[key] for key in swapped)):
                kept = swapped
    return kept


def _left_out(
    keys: Iterable[CaptureKey], kept: Kept, costs: Costs, budget: Budget, mode: GraphMode
) -> Iterator[LeftOut]:
    """Why each of the other keys is left out, and what its batches are padded to."""
    used = _total(costs[key] for key in kept)
    serving = {kind: sorted(map(_tokens, alike)) for kind, alike in _by_kind(kept).items()}
    for key in keys:
        if key in kept:
            continue
        cost = costs[key]
        name = budget.lacks(used, cost)
        if mode is not GraphMode.NONE and key[0] not in mode.runtime_modes:
            why = f"mode {mode.name} captures no {key[0].name} graphs"
        elif name is None:
            why = "FULL graphs come first, and not all of them fit"
        else:
            limit = getattr(budget, name)
            free = of_limit(name, limit - getattr(used, name), limit)
            why = f"needs {figure(name, getattr(cost, name))}; free: {free}"
        sizes = serving.get((key[0], key[1].kind), [])
        at = bisect_left(sizes, key[1].num_tokens)
        yield LeftOut(*key, cost, why, sizes[at] if at < len(sizes) else None)


def _total(costs: Iterable[GraphCost]) -> GraphCost:
    return sum(costs, GraphCost(graphs=0))


def _left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line for each reason: the largest of its graphs, and how many more there are."""
    by_reason: dict[tuple[str, str, bool], list[LeftOut]] = {}
    for each in left_out:
        reason = each.mode.name, each.why, each.padded_to is None
        by_reason.setdefault(reason, []).append(each)
    lines = []
    for first, *others in by_reason.values():
        size = first.padded_to
        served = "no graph of its kind serves its batches" if size is None else f"padded to {size}"
        more = f"; {alike(each.descriptor for each in others)}" if others else ""
        lines.append(
            f"left out: {first.mode.name} [{first.descriptor}]: {first.why}; {served}{more}"
        )
    return lines


def alike(descriptors: Iterable[BatchDescriptor]) -> str:
    """How many graphs share a reason with one that was named, and of which sizes."""
    sizes = [descriptor.num_tokens for descriptor in descriptors]
    least, most = min(sizes), max(sizes)
    tokens = f"{most} tokens" if least == most else f"{least} to {most} tokens"
    return f"so {'is' if len(sizes) == 1 else 'are'} {len(sizes)} more of {tokens}"


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
