"""From what a host may run to the graphs that are planned for it: mode, sizes, keys, budget."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from graphrt.core.budget import Budget, CapturePlan, CostModel, GraphCost
from graphrt.core.budget import plan as fit_budget
from graphrt.core.limits import largest_batch
from graphrt.core.modes import AttentionSupport, ModeResolution, PieceProvider, resolve_mode
from graphrt.core.options import GraphOptions
from graphrt.core.sizes import CaptureKey, SizePlan, descriptors_for, plan_sizes


class PlannedGraphs(NamedTuple):
    """What will be captured, and how it came to that; `plan` only where there is a budget."""

    resolution: ModeResolution
    sizes: SizePlan
    keys: tuple[CaptureKey, ...]
    plan: CapturePlan | None


def plan_graphs(
    options: GraphOptions,
    *,
    cap: int,
    max_num_tokens: int | None,
    max_num_reqs: int | None,
    query_lens: Sequence[int],
    attention: AttentionSupport | Mapping[str, AttentionSupport],
    pieces: PieceProvider | str | None,
    loras: Sequence[int | None],
    bounds: Sequence[tuple[int, ...]],
    variants: Sequence[Hashable],
    budget: Budget | None,
    cost: CostModel | None,
) -> PlannedGraphs:
    """Resolve the mode, plan the sizes and keep what `budget` holds; see `GraphRunner`.

    `cap` is the platform's largest default size. Raises the named errors of bad modes and sizes.
    """
    resolution = resolve_mode(
        options.mode,
        attention=attention,
        query_lens=query_lens,
        pieces=pieces,
        strict=options.strict,
    )
    sizes = plan_sizes(
        **largest_batch(max_num_tokens, max_num_reqs, options.sizes),
        query_lens=query_lens,
        sizes=options.sizes,
        max_size=options.max_size,
        cap=cap,
    )
    keys = descriptors_for(resolution.mode, sizes, loras=loras, bounds=bounds, variants=variants)
    if budget is None:
        return PlannedGraphs(resolution, sizes, keys, None)
    plan = fit_budget(
        keys,
        budget,
        cost or (lambda mode, descriptor: GraphCost()),
        mode=resolution,
        strict=options.strict,
    )
    return PlannedGraphs(plan.resolution, sizes, plan.keys, plan)
