"""What a runner wraps its forward in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graphrt.core.base.thread_mode import where_asked, without_gradients
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.inputs.transport import InputRing
from graphrt.core.plan.plan import Plan
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture
from graphrt.core.replay.segments import SegmentHooks
from graphrt.core.runner.compiled import CompiledModules
from graphrt.core.trust.gradients import Gradients


def wrappers_of(
    forward: Callable[..., Any],
    plan: Plan,
    options: GraphOptions,
    pool: GraphPool,
    hooks: SegmentHooks | None,
    compiled: CompiledModules,
    ring: InputRing | None = None,
) -> dict[GraphMode, GraphWrapper]:
    """A FULL wrapper around a breakable PIECEWISE one, as far as the mode asks for them; graphs
    fetch their inputs from `ring`, if there is one."""
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
    inner = forward if ring is None else Fetching(forward, ring)
    if mode.has_piecewise and plan.pieces is PieceProvider.BREAKABLE:
        inner = wrappers[GraphMode.PIECEWISE] = wrap(
            inner, GraphMode.PIECEWISE, breakable=True, **common
        )
    if mode.has_full:
        wrappers[GraphMode.FULL] = wrap(inner, GraphMode.FULL, **common)
    for wrapper in wrappers.values():
        wrapper.serve_owner()
    return wrappers


class Fetching:
    """The forward behind the fetch of its inputs, where no graph has done that.

    Called in a capture the fetch is the first that is captured. A replay does not come here; a step
    that a wrapper runs eagerly after all does, and fetches by itself.
    """

    def __init__(self, forward: Callable[..., Any], ring: InputRing) -> None:
        self.forward = forward
        self._ring = ring

    def __call__(self, **arguments: Any) -> Any:
        if self._ring.pending is not None:
            self._ring.fetch_pending()
        return self.forward(**arguments)

    def __getattr__(self, name: str) -> Any:
        if name == "forward":
            raise AttributeError(name)
        return getattr(self.forward, name)


class EagerForward:
    """The forward itself, which runs eagerly unless the context says otherwise, and without
    gradients, as graphs do.

    Where a trial has shown that it asks for gradients or inference mode, and does something else
    then, it `follows` its caller: it finds what the caller set. The first run whose caller has
    gradients finds out which `gradients` it ends.
    """

    def __init__(self, forward: Callable[..., Any], gradients: Gradients) -> None:
        self.follows = False
        self.gradients = gradients
        self._finds = False
        self._forward = forward
        self._asked: tuple[bool, bool] | None = None

    def __call__(self, **arguments: Any) -> Any:
        call = partial(self._forward, **arguments)
        if self._finds or (self.gradients.wanted and not is_inside_capture()):
            return self.gradients.find(call, arguments)
        if self._asked is not None:
            return where_asked(call, *self._asked)
        if self.follows:
            return where_asked(call, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return without_gradients(call)

    def finding(self, run: Callable[[], Any]) -> Any:
        """Call `run`, in which the forward finds out which gradients it ends."""
        try:
            self._finds = True
            return run()
        finally:
            self._finds = False

    def where(self, gradients: bool, inference: bool, run: Callable[[], Any]) -> Any:
        """Call `run`, in which the forward finds these on or off; graphrt around it does not."""
        try:
            self._asked = gradients, inference
            return run()
        finally:
            self._asked = None
