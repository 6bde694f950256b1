"""The parts that a runner is made of, and the wrappers of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import CaptureError, InvalidOptionError
from graphrt.core.base.option_values import check_callable, check_kind, shown
from graphrt.core.base.thread_mode import where_asked, without_gradients
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.options import NO_LIMIT, GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.device.platform import Platform, asked_device, check_exists
from graphrt.core.device.registry import resolve_platform
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import check_forward, with_specs
from graphrt.core.inputs.outputs import OutputAxes, OutputLayout
from graphrt.core.inputs.spec import Inputs
from graphrt.core.plan.plan import Plan, PlanArguments, check_plan_arguments
from graphrt.core.plan.resolution import all_compiled, compiled_in
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Host


class RunnerSetup:
    """All that one runner was made with, checked, every default resolved: its forward, plan, host,
    buffers, pool and wrappers. Made first by a runner, and never changed: graphs come and go in the
    `GraphTable`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        plan: Plan | None,
        inputs: Inputs,
        outputs: OutputAxes,
        host: Host | None,
        options: GraphOptions | None,
        platform: Platform | str | None,
        pool: GraphPool | None,
        device: torch.device | str | None,
        arguments: PlanArguments,
    ) -> None:
        """See `GraphRunner`."""
        check_kind("plan", plan, Plan)
        check_kind("host", host, Host)
        check_kind("options", options, GraphOptions)
        check_kind("pool", pool, GraphPool)
        check_plan_arguments(arguments, plan)
        announced = arguments.pop("compiled", ()) if plan is None else plan.compiled
        check_callable("forward", forward)
        inputs = with_specs(inputs)
        # The announced modules, the forward if it is one, and its submodules; each once.
        modules = (*compiled_in(forward), *all_compiled(announced))
        compiled = list({id(module): module for module in modules}.values())
        self.forward = forward
        self.host = host or Host()
        self.options = (options or GraphOptions()).of_process()
        self.pool, buffers_device, self.owns_pool = _pool_for(compiled, pool, platform, device)
        if plan is None:
            arguments["compiled"] = compiled
            plan = Plan(**arguments, platform=self.pool.platform)
        else:
            plan = plan.fitted_to(self.pool.platform, compiled)
        if self.options.strict:
            plan.refuse_less()
        self.plan = plan
        # Compiled modules, which compile themselves at their first call and not later. In a warm-up
        # or a capture each calls `enlist(self)` of its context. See `graphrt.compile`.
        self.compiled = plan.compiled
        # With room for the largest planned graph, and the largest batch.
        self.inputs = StaticInputs(
            inputs,
            platform=self.pool.platform,
            tokens=max(plan.sizes.max_num_tokens, *(key[1].num_tokens for key in plan.keys), 1),
            reqs=max(plan.sizes.max_num_reqs, *(key[1].num_reqs or 1 for key in plan.keys), 1),
            device=buffers_device,
            fetched=self.options.inputs_in_graph,
        )
        check_forward(forward, inputs)
        self.outputs = OutputLayout(outputs)
        # What eager runs call: `forward` without gradients. Wrappers call `forward` itself.
        self.run_forward = EagerForward(forward)
        # `GraphPool.owner` in a step or a change of graphs, as errors call it: see `in_turn`.
        self.owner = "a step, or a capture, of a runner"
        # mode -> the wrapper of whole steps; none where compiled modules capture their own pieces.
        self.wrappers = self._wrappers()

    @property
    def ring(self) -> Any:
        """The ring that graphs fetch their inputs from; None with `bind`, which may read or write
        the inputs: they would not be in the buffers before the launch."""
        return None if self.host.bind is not None else self.inputs.transport.ring

    def enlist(self, module: Any) -> None:
        """Let a compiled module take part in a warm-up or capture.

        Raises `CaptureError` for one that neither the plan nor the forward has named: its weights
        would not be followed, and it could be compiled while serving.
        """
        if not any(module is known for known in self.compiled):
            raise CaptureError(
                "a compiled module is captured that neither the plan nor the forward names",
                got=shown(module),
                expected=", ".join(map(repr, self.compiled)) or "no compiled module",
                advice="GraphRunner(..., compiled=[module])",
            )

    def _wrappers(self) -> dict[GraphMode, GraphWrapper]:
        """A FULL wrapper around a breakable PIECEWISE one, or the one that the mode needs. Pieces
        of compiled modules are captured with the same options."""
        mode, hooks = self.plan.mode, self.host.around_graph
        # Wrappers neither capture lazily nor clone: the runner captures whole steps, and clones the
        # live rows.
        outputs = "static" if self.options.outputs == "static" else "pool"
        options = self.options.merged({"lazy": False, "outputs": outputs, **NO_LIMIT})
        for_pieces = options.merged({"breaks": ()})
        for module in self.compiled:
            module.use_capture_sizes({descriptor.num_tokens for _, descriptor in self.plan.keys})
            module.use_modes(self.plan.keys)
            module.use_wrapper_options(for_pieces, hooks)
        wrapper_cls = wrapper_class(self.pool.platform)
        wrap = partial(wrapper_cls, pool=self.pool, options=options, hooks=hooks)
        inner = self.forward if self.ring is None else partial(_fetched, self.forward, self.ring)
        wrappers: dict[GraphMode, GraphWrapper] = {}
        if mode.has_piecewise and self.plan.pieces is PieceProvider.BREAKABLE:
            inner = wrappers[GraphMode.PIECEWISE] = wrap(inner, GraphMode.PIECEWISE, breakable=True)
        if mode.has_full:
            wrappers[GraphMode.FULL] = wrap(inner, GraphMode.FULL)
        for wrapper in wrappers.values():
            wrapper.serve_owner()
        return wrappers


def _pool_for(
    modules: Iterable[Any],
    pool: GraphPool | None,
    platform: Platform | str | None,
    device: torch.device | str | None,
) -> tuple[GraphPool, torch.device, bool]:
    """Returns the pool of a runner (the one given, else that of its compiled `modules`, else a new
    one); the device of its buffers; and whether the pool is the runner's own.

    Raises `InvalidOptionError` for modules that capture in another pool, for a pool of another
    platform or device, and for a device that does not exist.
    """
    for module in modules:
        of_module = getattr(module, "pool", None)
        if of_module is not None and of_module is not pool:
            if pool is not None:
                # A step in this pool would not expire outputs that live in the module's pool.
                raise InvalidOptionError(
                    "a compiled module of the forward captures its pieces in another pool",
                    got=f"pool={pool!r}",
                    expected=f"{of_module!r}, which it was compiled with",
                    advice="pass the same pool= to graphrt.compile and to GraphRunner",
                )
            pool = of_module
    owns_pool = pool is None
    if pool is None:
        platform = resolve_platform(platform)
        asked = asked_device(platform.device_type, device)
        pool = GraphPool(platform, device=asked if asked.type == platform.device_type else None)
    else:
        asked = asked_device(pool.device.type, device)
        if platform is not None:
            pool.check_is_of(platform)
    if asked.type != pool.device.type:
        check_exists(asked, pool.device.type)
        return pool, asked, owns_pool
    if asked.index is not None:
        pool.check_is_of(pool.platform, asked)
    return pool, pool.device, owns_pool


def _fetched(forward: Callable[..., Any], ring: Any, /, **arguments: Any) -> Any:
    """Fetch the inputs, if no graph has, then call the forward.

    In a capture the fetch is the graph's first operation, so a replay does not come here. A step
    that a wrapper runs eagerly after all does.
    """
    if ring.pending is not None:
        ring.fetch_pending()
    return forward(**arguments)


class EagerForward:
    """The forward itself, which runs eagerly unless the context says otherwise, and without
    gradients, as graphs do.

    Where a trial has shown that the forward asks torch for gradients or inference mode, and acts on
    the answer, it `follows` its caller: it runs under the caller's settings.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.follows = False
        self._forward = forward
        # (gradients, inference mode) that the forward is told inside of `where`; else None.
        self._asked: tuple[bool, bool] | None = None

    def __call__(self, **arguments: Any) -> Any:
        call = partial(self._forward, **arguments)
        if self._asked is not None:
            return where_asked(call, *self._asked)
        if self.follows:
            return where_asked(call, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return without_gradients(call)

    @undoing
    def where(self, undo: Undo, gradients: bool, inference: bool, run: Callable[[], Any]) -> Any:
        """Call `run`. In it torch tells the forward that gradients and inference mode are on or
        off as asked here, and graphrt, which runs around the forward, keeps its own modes."""
        undo.later(partial(setattr, self, "_asked", None))
        self._asked = gradients, inference
        return run()
