"""From what a host may run to the graphs that are planned for it: mode, sizes, keys, budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from graphrt.core.batch.modes import AttentionSupport, PieceProvider
from graphrt.core.capture.options import GraphOptions
from graphrt.core.plan.budget import Budget, CapturePlan, CostModel, GraphCost
from graphrt.core.plan.budget import plan as fit_budget
from graphrt.core.plan.limits import largest_batch
from graphrt.core.plan.resolution import ModeResolution, resolve_mode
from graphrt.core.plan.sizes import CaptureKey, SizePlan, descriptors_for, plan_sizes
from graphrt.core.runner.parts import compilables, provider_of, without_graphs


class PlannedGraphs(NamedTuple):
    """What will be captured, and how it came to that; `plan` only where there is a budget.

    `pieces` is what cuts the forward, None where nothing does or may.
    """

    resolution: ModeResolution
    sizes: SizePlan
    keys: tuple[CaptureKey, ...]
    plan: CapturePlan | None
    pieces: PieceProvider | None


def plan_graphs(
    options: GraphOptions,
    forward: Callable[..., Any],
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
    """Say what cuts the forward, resolve the mode, plan the sizes and keep what `budget` holds.

    See `GraphRunner` for the arguments. `cap` is the platform's largest default size. Raises the
    named errors of bad modes and sizes.
    """
    parts = compilables(forward)
    provider, whole_graph = provider_of(parts, pieces)
    resolution = resolve_mode(
        options.mode,
        attention=attention,
        query_lens=query_lens,
        pieces=provider,
        whole_graph_pass=whole_graph,
        strict=options.strict,
    )
    resolution = without_graphs(parts, resolution, strict=options.strict)
    sizes = plan_sizes(
        **largest_batch(max_num_tokens, max_num_reqs, options.sizes),
        query_lens=query_lens,
        sizes=options.sizes,
        max_size=options.max_size,
        cap=cap,
    )
    keys = descriptors_for(resolution.mode, sizes, loras=loras, bounds=bounds, variants=variants)
    if budget is None:
        return PlannedGraphs(resolution, sizes, keys, None, provider)
    plan = fit_budget(
        keys,
        budget,
        cost or (lambda mode, descriptor: GraphCost()),
        mode=resolution,
        strict=options.strict,
    )
    return PlannedGraphs(plan.resolution, sizes, plan.keys, plan, provider)
