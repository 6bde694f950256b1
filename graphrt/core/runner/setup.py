"""What a runner is made of, and what it wraps its forward in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from graphrt.core.base.option_values import check_kind
from graphrt.core.base.thread_mode import where_asked, without_gradients
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import check_forward
from graphrt.core.inputs.output_axes import OutputAxes
from graphrt.core.inputs.outputs import OutputLayout
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.inputs.transport import InputRing
from graphrt.core.plan.arguments import PlanArguments, check_plan_arguments
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.resolution import all_compiled
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import is_inside_capture
from graphrt.core.runner.compiled import CompiledModules, pool_for, with_forward
from graphrt.core.runner.host import Host
from graphrt.core.trust.gradients import Gradients


@dataclass(frozen=True)
class RunnerSetup:
    """What one runner was made with, every default resolved. It never changes."""

    forward: Callable[..., Any]
    plan: Plan
    host: Host
    options: GraphOptions
    pool: GraphPool
    inputs: StaticInputs
    outputs: OutputLayout
    owns_pool: bool
    """Whether the pool goes with the runner."""

    @cached_property
    def compiled(self) -> CompiledModules:
        """The compiled modules of the forward."""
        return CompiledModules(self.plan.compiled)

    @cached_property
    def run_forward(self) -> EagerForward:
        """What calls the forward eagerly."""
        gradients = Gradients(
            self.inputs.graded,
            # Compiled code has none in any case.
            on=self.options.checks("capture") and not self.compiled.modules,
            # A plain hit looks at no weights.
            of_weights=self.options.checks("sample"),
        )
        return EagerForward(self.forward, gradients)

    @property
    def eager_launch(self) -> bool:
        """Whether graphs are planned and dispatched, and every step runs eagerly after all."""
        return self.options.launch == "eager"

    @property
    def ring(self) -> InputRing | None:
        """Where graphs fetch their inputs from. They are not there yet when `bind` is called, which
        may read or write them: with it there is none."""
        return None if self.eager_launch or self.host.bind is not None else self.inputs.ring

    @property
    def sizes(self) -> set[int]:
        """The sizes of the planned graphs, in tokens."""
        return {descriptor.num_tokens for _, descriptor in self.plan.keys}

    @property
    def query_len(self) -> int | None:
        """The tokens of every request, where no graph is for other batches."""
        lengths = {descriptor.query_len for _, descriptor in self.plan.keys}
        return lengths.pop() if len(lengths) == 1 else None

    def wrappers(self) -> dict[GraphMode, GraphWrapper]:
        """A FULL wrapper around a breakable PIECEWISE one, as far as the mode asks for them. Pieces
        of compiled modules are captured with the same options."""
        mode, options, hooks = self.plan.mode, self.options, self.host.around_graph
        outputs = "static" if options.outputs == "static" else "pool"
        for_pieces = options.merged({"lazy": False, "outputs": outputs, "breaks": ()})
        self.compiled.announce(self.sizes, for_pieces, hooks)
        # Only whole steps are captured lazily, by the runner.
        own = options.merged({"lazy": False})
        wrap = partial(wrapper_class(self.pool.platform), pool=self.pool, options=own, hooks=hooks)
        inner = self.forward if self.ring is None else Fetching(self.forward, self.ring)
        wrappers: dict[GraphMode, GraphWrapper] = {}
        if mode.has_piecewise and self.plan.pieces is PieceProvider.BREAKABLE:
            inner = wrappers[GraphMode.PIECEWISE] = wrap(inner, GraphMode.PIECEWISE, breakable=True)
        if mode.has_full:
            wrappers[GraphMode.FULL] = wrap(inner, GraphMode.FULL)
        for wrapper in wrappers.values():
            wrapper.serve_owner()
        return wrappers


def set_up(
    forward: Callable[..., Any],
    plan: Plan | None,
    inputs: Mapping[str, InputSpec | Mapping[str, Any]],
    outputs: OutputAxes,
    host: Host | None,
    options: GraphOptions | None,
    platform: Platform | str | None,
    pool: GraphPool | None,
    device: torch.device | str | None,
    arguments: PlanArguments,
) -> RunnerSetup:
    """What `GraphRunner` is given, checked, and with a plan, a pool and buffers."""
    check_kind("plan", plan, Plan)
    check_kind("host", host, Host)
    check_kind("options", options, GraphOptions)
    check_kind("pool", pool, GraphPool)
    check_plan_arguments(arguments, plan, {"options": GraphOptions, "host": Host})
    options = options or GraphOptions()
    announced = arguments.pop("compiled", ()) if plan is None else plan.compiled
    compiled = with_forward(forward, all_compiled(announced))
    pool, place, owns_pool = pool_for(compiled, pool, platform, device)
    if plan is None:
        arguments["compiled"] = compiled
        plan = Plan(**arguments, platform=pool.platform)
    else:
        plan = plan.fitted_to(pool.platform, compiled)
    if options.strict:
        plan.refuse_less()
    # For the largest of the planned graphs, and for the largest batch.
    buffers = StaticInputs(
        inputs,
        platform=pool.platform,
        tokens=max(plan.sizes.max_num_tokens, *(key[1].num_tokens for key in plan.keys), 1),
        reqs=max(plan.sizes.max_num_reqs, *(key[1].num_reqs or 1 for key in plan.keys), 1),
        device=place,
        fetched=options.inputs_in_graph,
    )
    check_forward(forward, inputs)
    layout = OutputLayout(outputs)
    return RunnerSetup(forward, plan, host or Host(), options, pool, buffers, layout, owns_pool)


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
