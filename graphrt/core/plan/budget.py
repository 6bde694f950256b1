"""Before anything is captured: which graphs fit, what each costs, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import NamedTuple

from graphrt.core.base.errors import InvalidOptionError, ModeNotSupportedError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.resolution import ModeResolution, ResolutionStep
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.plan.traffic import Traffic, by_worth


@dataclass(frozen=True)
class GraphCost:
    """What the graph of one descriptor takes; for PIECEWISE all its pieces together."""

    streams: int = 0
    graphs: int = 1
    """Device graphs: 1, or the number of pieces."""
    device_bytes: int = 0
    capture_s: float = 0.0

    def __add__(self, other: GraphCost) -> GraphCost:
        return GraphCost(*(getattr(self, name) + getattr(other, name) for name in RESOURCES))


@dataclass(frozen=True)
class Budget:
    """What the graphs of one plan may take together; None is no limit.

    Raises `InvalidOptionError` for a negative limit.
    """

    streams: int | None = None
    graphs: int | None = None
    device_bytes: int | None = None
    capture_s: float | None = None

    def __post_init__(self) -> None:
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:
                raise InvalidOptionError(
                    f"a budget of {name} cannot be negative",
                    got=limit,
                    expected=">= 0, or None for no limit",
                    advice=f"{name}=None",
                )

    def lacks(self, used: GraphCost, more: GraphCost) -> str | None:
        """The first resource that `more` does not fit into beside `used`, or None."""
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and getattr(used, name) + getattr(more, name) > limit:
                return name
        return None


RESOURCES = tuple(field.name for field in fields(GraphCost))

CostModel = Callable[[GraphMode, BatchDescriptor], GraphCost]
"""What the graph of a runtime mode and descriptor will take."""


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
    padded_to: int | None
    """Tokens of the graph of its mode and kind that serves its batches, or None."""


@dataclass(frozen=True)
class CapturePlan:
    """What is captured, in this order, what it takes and what was left out."""

    resolution: ModeResolution
    captured: tuple[PlannedCapture, ...]
    left_out: tuple[LeftOut, ...]
    budget: Budget

    @property
    def mode(self) -> GraphMode:
        """The mode that runs, after the budget's own steps."""
        return self.resolution.mode

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """What to capture, in capture order."""
        return tuple((planned.mode, planned.descriptor) for planned in self.captured)

    @property
    def total(self) -> GraphCost:
        """What all captured graphs take together."""
        return _total(planned.cost for planned in self.captured)

    def lines(self) -> tuple[str, ...]:
        """The plan for people: every graph with its cost, the sum, and what was left out."""
        shown = self._shown()
        lines = [
            f"{p.mode.name} [{p.descriptor}]: {_figures(p.cost, shown)}" for p in self.captured
        ]
        counted = f"{len(self.captured)} of {len(self.captured) + len(self.left_out)} sizes"
        limits = [
            _of(name, getattr(self.total, name), limit)
            for name in shown
            if (limit := getattr(self.budget, name)) is not None
        ]
        lines.append(f"in all: {counted}, {', '.join(limits) or _figures(self.total, shown)}")
        lines += [_left_out_line(each) for each in self.left_out]
        lines += [
            f"mode {step.before.name} becomes {step.after.name}: {step.why}"
            for step in self.resolution.steps
            if step.rule == _RULE
        ]
        return tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _shown(self) -> list[str]:
        return [
            name
            for name in RESOURCES
            if getattr(self.budget, name) is not None
            or (name != "graphs" and getattr(self.total, name))
        ] or ["graphs"]


_RULE = "budget"


def plan(
    keys: Sequence[CaptureKey],
    budget: Budget,
    cost: CostModel,
    *,
    mode: ModeResolution | GraphMode | str,
    traffic: Traffic | None = None,
    landmarks: Collection[int] = (),
    min_piecewise: int = 2,
    strict: bool = False,
) -> CapturePlan:
    """Choose which of `keys` (in capture order) to capture within `budget`.

    FULL graphs come first, because pieces take many times as much. Within a mode the largest size
    is kept before the smallest, then those of `landmarks` (a full decode batch), then the most
    valuable by `traffic` (see `by_worth`); what does not fit is left out, and smaller graphs after
    it may still fit. Where the graphs of a mode cost alike, a smaller budget or a higher cost
    keeps a part of what it kept before, never another size.

    Fewer than `min_piecewise` PIECEWISE sizes (or than were asked for) turn FULL_AND_PIECEWISE
    into FULL_DECODE_ONLY; where no graph fits at all, the mode becomes NONE. With `strict` such a
    step raises `ModeNotSupportedError`. Raises `InvalidOptionError` for bad traffic.
    """
    if not isinstance(mode, ModeResolution):
        parsed = GraphMode.parse(mode)
        mode = ModeResolution(parsed, parsed)
    costs = {key: cost(*key) for key in keys}
    order = _by_priority(keys, traffic, landmarks)
    kept = _fill(order, costs, budget)
    pieces = [key for key in keys if key[0] is GraphMode.PIECEWISE]
    fit = sum(key in kept for key in pieces)
    if mode.mode is GraphMode.FULL_AND_PIECEWISE and fit < min(min_piecewise, len(pieces)):
        why = (
            f"the budget holds {fit} of {len(pieces)} piecewise sizes, "
            f"fewer than {min(min_piecewise, len(pieces))}"
        )
        mode = _step(mode, GraphMode.FULL_DECODE_ONLY, why, strict)
        kept = _fill([key for key in order if key[0] is GraphMode.FULL], costs, budget)
    if keys and not kept:
        mode = _step(mode, GraphMode.NONE, "the budget holds no graph at all", strict)
    captured = tuple(PlannedCapture(*key, costs[key]) for key in keys if key in kept)
    used = _total(each.cost for each in captured)
    left_out = tuple(
        LeftOut(*key, costs[key], _why(key, costs[key], used, budget, mode), _padded_to(key, kept))
        for key in keys
        if key not in kept
    )
    return CapturePlan(mode, captured, left_out, budget)


def _by_priority(
    keys: Sequence[CaptureKey], traffic: Traffic | None, landmarks: Collection[int]
) -> list[CaptureKey]:
    """All keys, those first that are kept last when the budget shrinks."""
    order: list[CaptureKey] = []
    for runtime_mode in (GraphMode.FULL, GraphMode.PIECEWISE):
        families: dict[object, dict[int, list[CaptureKey]]] = {}
        for key in keys:
            if key[0] is runtime_mode:
                sizes = families.setdefault(_family(key), {})
                sizes.setdefault(key[1].num_tokens, []).append(key)
        if not families:
            continue
        # One size of each kind in turn, or one query length would starve the others.
        ranked = [
            [key for size in by_worth(sizes, traffic, landmarks) for key in sizes[size]]
            for sizes in families.values()
        ]
        turns = [key for turn in zip_longest(*ranked) for key in turn if key is not None]
        ends = [
            max(turns, key=lambda key: key[1].num_tokens),
            min(turns, key=lambda key: key[1].num_tokens),
        ]
        order += dict.fromkeys([*ends, *turns])
    return order


def _family(key: CaptureKey) -> object:
    """What two graphs must share to serve each other's batches."""
    mode, own = key
    lora = own.has_lora, own.num_active_loras
    return mode, own.uniform, own.query_len, lora, own.bounds, own.variant


def _fill(
    order: Iterable[CaptureKey], costs: dict[CaptureKey, GraphCost], budget: Budget
) -> set[CaptureKey]:
    kept: set[CaptureKey] = set()
    used = _total(())
    for key in order:
        if budget.lacks(used, costs[key]) is None:
            kept.add(key)
            used += costs[key]
    return kept


def _step(resolution: ModeResolution, after: GraphMode, why: str, strict: bool) -> ModeResolution:
    if strict:
        raise ModeNotSupportedError(
            f"mode {resolution.mode.name} does not fit: {why}",
            got=resolution.mode.name,
            expected=f"{after.name} or lower",
            advice=f"mode={after.name!r}, fewer sizes, or strict=False to step down",
        )
    step = ResolutionStep(_RULE, resolution.mode, after, why)
    return replace(resolution, mode=after, steps=(*resolution.steps, step))


def _why(
    key: CaptureKey, cost: GraphCost, used: GraphCost, budget: Budget, mode: ModeResolution
) -> str:
    name = budget.lacks(used, cost)
    wanted = mode.mode is GraphMode.NONE or key[0] in mode.mode.runtime_modes
    if name is None or not wanted:
        return f"mode {mode.mode.name} captures no {key[0].name} graphs"
    limit = getattr(budget, name)
    free = _of(name, limit - getattr(used, name), limit)
    return f"needs {_figure(name, getattr(cost, name))}; free: {free}"


def _padded_to(key: CaptureKey, kept: Collection[CaptureKey]) -> int | None:
    family = _family(key)
    serving = [each[1].num_tokens for each in kept if _family(each) == family]
    return min((size for size in serving if size >= key[1].num_tokens), default=None)


def _total(costs: Iterable[GraphCost]) -> GraphCost:
    return sum(costs, GraphCost(graphs=0))


def _figures(cost: GraphCost, names: Iterable[str]) -> str:
    return ", ".join(_figure(name, getattr(cost, name)) for name in names)


def _figure(name: str, value: float) -> str:
    if name == "device_bytes":
        return f"{value / (1 << 20):.1f} MiB"
    if name == "capture_s":
        return f"{value:.2f} s"
    return f"{value} {name if value != 1 else name.removesuffix('s')}"


def _of(name: str, value: float, limit: float) -> str:
    return f"{_figure(name, value).partition(' ')[0]} of {_figure(name, limit)}"


def _left_out_line(left_out: LeftOut) -> str:
    size = left_out.padded_to
    served = "no graph of its kind serves its batches" if size is None else f"padded to {size}"
    return f"left out: {left_out.mode.name} [{left_out.descriptor}]: {left_out.why}; {served}"
