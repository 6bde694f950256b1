"""What a runner wraps its forward in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.core.base import without_gradients
from graphrt.core.batch import GraphMode, PieceProvider
from graphrt.core.capture import GraphOptions, GraphWrapper, wrapper_class
from graphrt.core.plan import Plan
from graphrt.core.replay import GraphPool, SegmentHooks
from graphrt.core.runner.compiled import CompiledModules


def wrappers_of(
    forward: Callable[..., Any],
    plan: Plan,
    options: GraphOptions,
    pool: GraphPool,
    hooks: SegmentHooks | None,
    compiled: CompiledModules,
) -> dict[GraphMode, GraphWrapper]:
    """A FULL wrapper around a breakable PIECEWISE one, as far as the mode asks for them."""
    mode = plan.mode
    wrap = wrapper_class(pool.platform)
    common: dict[str, Any] = {
        "pool": pool,
        # Only whole steps are captured lazily, by this set.
        "options": options.merged({"lazy": False}),
        "hooks": hooks,
    }
    outputs = "static" if options.outputs == "static" else "pool"
    for_pieces = options.merged({"lazy": False, "outputs": outputs, "breaks": ()})
    compiled.tell_options(for_pieces, hooks)
    wrappers: dict[GraphMode, GraphWrapper] = {}
    inner = forward
    if mode.has_piecewise and plan.pieces is PieceProvider.BREAKABLE:
        inner = wrappers[GraphMode.PIECEWISE] = wrap(
            inner, GraphMode.PIECEWISE, breakable=True, **common
        )
    if mode.has_full:
        wrappers[GraphMode.FULL] = wrap(inner, GraphMode.FULL, **common)
    for wrapper in wrappers.values():
        wrapper.serve_owner()
    return wrappers


def without_graph(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward itself, which runs eagerly unless the context says otherwise."""

    def run_forward(**arguments: Any) -> Any:
        return without_gradients(partial(forward, **arguments))

    return run_forward
