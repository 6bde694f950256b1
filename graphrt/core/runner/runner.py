"""`GraphRunner`: static buffers, dispatch, capture and replay of one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from graphrt.core.base.errors import Uncopied
from graphrt.core.base.option_values import check_kind
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, checked_batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.platform import Platform
from graphrt.core.dispatch.reasons import Agreed, Dispatch, Reason
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.inputs.declared import check_forward
from graphrt.core.inputs.output_axes import OutputAxes
from graphrt.core.inputs.slot import InputSlot
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.plan.arguments import PlanArguments, check_plan_arguments
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.resolution import all_compiled
from graphrt.core.replay._turn import in_turn
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner._capturing import Capturing
from graphrt.core.runner._devices import on_own_device
from graphrt.core.runner._meanwhile import Meanwhile
from graphrt.core.runner._path import StepPath
from graphrt.core.runner._rounds import Rounds
from graphrt.core.runner._steps import steps_of
from graphrt.core.runner.compiled import pool_for, with_forward
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.host import Host
from graphrt.core.runner.report import RunnerReport, report_of
from graphrt.core.runner.steps.unpadded import (
    no_graph_to_pad_to,
    no_graph_to_verify,
    refuse_inside_capture,
)
from graphrt.core.runner.steps.updates import LastUpdates

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class GraphRunner(Capturing, Uncopied):
    """Runs a forward for batches of any size, through graphs captured for some sizes.

    Before `capture()` every batch runs eagerly; after it, batches that no graph serves do, each
    with a reason. Equal means: bit for bit what `forward` gives on the same padded inputs.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        plan: Plan | None = None,
        *,
        inputs: Mapping[str, InputSpec | Mapping[str, Any]],
        outputs: OutputAxes = None,
        host: Host | None = None,
        options: GraphOptions | None = None,
        platform: Platform | str | None = None,
        pool: GraphPool | None = None,
        device: torch.device | str | None = None,
        **arguments: Unpack[PlanArguments],
    ) -> None:
        """`plan` says which graphs there are; in its place its own arguments may be given here
        (`sizes=[1, 2, 4]`). `inputs` names every tensor argument of `forward`; `outputs` gives the
        axes of what it returns, such as ("tokens", 64) or {"logits": ("reqs", None)}; None is any
        size. What it does not name is found by comparing shapes at two sizes, if need be with an
        eager step more in `capture()`. `host` is what the host hooks in, `options` how graphs are
        captured and replayed. `pool` shares memory with what never runs at the same time as this
        runner. `device` is where the inputs' buffers are and the graphs run, by default the pool's
        device: the current one where the runner is made. It becomes current in every call.

        A plan of another platform, or without the compiled modules that the forward is or has, is
        resolved again; a `PlanChangedWarning` says what changed. Raises the named errors of bad
        plans, inputs and platforms.
        """
        check_kind("plan", plan, Plan)
        check_kind("host", host, Host)
        check_kind("options", options, GraphOptions)
        check_kind("pool", pool, GraphPool)
        check_plan_arguments(arguments, plan, {"options": GraphOptions, "host": Host})
        self.options = options or GraphOptions()
        announced = arguments.pop("compiled", ()) if plan is None else plan.compiled
        compiled = with_forward(forward, all_compiled(announced))
        self.pool, place, self._owns_pool = pool_for(compiled, pool, platform, device)
        self.platform = self.pool.platform
        if plan is None:
            arguments["compiled"] = compiled
            self.plan = Plan(**arguments, platform=self.platform)
        else:
            self.plan = plan.fitted_to(self.platform, compiled)
        if self.options.strict:
            self.plan.refuse_less()
        self.mode = self.plan.mode
        keys, sizes = self.plan.keys, self.plan.sizes
        self.inputs = StaticInputs(
            inputs,
            platform=self.platform,
            tokens=max(sizes.max_num_tokens, *(key[1].num_tokens for key in keys), 1),
            reqs=max(sizes.max_num_reqs, *(key[1].num_reqs or 1 for key in keys), 1),
            device=place,
            fetched=self.options.inputs_in_graph,
        )
        check_forward(forward, inputs)
        host = host or Host()
        self.graphs = GraphSet(
            forward,
            self.plan,
            host,
            options=self.options,
            pool=self.pool,
            inputs=self.inputs,
            outputs=outputs,
        )
        self.dispatcher = self.graphs.dispatcher
        graphs = self.graphs
        self._steps = graphs.steps
        self._eager_launch = graphs.eager_launch
        self._updates = LastUpdates()
        steps = steps_of(
            forward, graphs, self.plan, host, self.options, self.inputs, self.pool, self._updates
        )
        self._padded = steps.padded
        self._checked, self._slots = steps.checked, steps.slots
        self._meanwhile = Meanwhile(self.dispatcher, self.inputs)
        try_examples: Callable[[], None] | None = None
        if host.example is not None:
            try_examples = partial(self._checked.try_examples, host.example, graphs.release)
        self._rounds = Rounds(
            graphs,
            self.plan,
            self.pool,
            self._meanwhile,
            try_examples,
            strict=self.options.strict,
        )
        self._elsewhere = self.pool.elsewhere
        self._path = StepPath(graphs, self.inputs, self.pool, steps, self._updates)
        self._entrance = self._path.entrance()
        self._time_steps()

    def __call__(
        self,
        batch: Batch | InputSlot | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        agreed: Any = None,
        **values: Any,
    ) -> Any:
        """Run one step on its live rows; returns the live rows of the outputs.

        `values` are tensors in the dtypes and live shapes of `inputs`; `batch` may be left out
        where their shapes say everything. A `slot` stands for both. `updates` are the host
        arguments of updatable tasks, `metadata` is what eager parts read from the context.
        `agreed` is the graph that ranks have agreed on, by its descriptor or what one of them was
        told (`Dispatch`): that one is replayed, or none (RANKS_DISAGREE).

        Outputs are fresh tensors, readable until the next step of the pool begins: touched later
        they raise (`OverwrittenOutputError`). On devices whose memory torch cannot mark, the CPU
        among them, they are copies.

        Raises `InvalidInputError`, `InvalidBatchError`, `PoolBusyError`, what updates raise, and
        what `strict` says.
        """
        # An `isinstance` of a mapping's class takes longer.
        if type(batch) is InputSlot:
            if values:
                self.inputs.check_alone(values)
            return self._run(None, batch, updates, metadata, agreed)
        return self._run(batch, values, updates, metadata, agreed)

    def __repr__(self) -> str:
        return (
            f"GraphRunner({self.mode.name}, {len(self.graphs.records)} graphs, {self.pool.device})"
        )

    @property
    def last_dispatch(self) -> Dispatch | None:
        """What the last step was told, and how it ran."""
        return self._path.last_dispatch

    def slot(self, batch: Batch, *, agreed: Agreed | None = None) -> InputSlot:
        """Where the inputs of the next step, of `batch`, are written in place: `runner(slot)` then
        runs it, and nothing is copied or checked again. Counted as dispatched now. `agreed` is as
        in a call. Raises `InvalidBatchError`, `PoolBusyError` and `InputRingError`."""
        if self._elsewhere is not None and self._elsewhere():
            with self.pool.on_device():
                return self._slots.make(batch, agreed)
        return self._slots.make(batch, agreed)

    def step(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        *,
        updates: Any = None,
        metadata: Any = None,
        agreed: Agreed | None = None,
    ) -> Any:
        """Run one step like a call, with its inputs as a mapping."""
        if type(values) not in (dict, InputSlot) and isinstance(values, Mapping):
            # One that makes its tensors when it is asked is asked once, and they live as long.
            values = {name: values[name] for name in values}
        return self._run(batch, values, updates, metadata, agreed)

    @on_own_device
    def run_padded_eagerly(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any = None,
        metadata: Any = None,
    ) -> Any:
        """The forward, run eagerly on exactly the inputs that the graph of `found` would read."""
        refuse_inside_capture("run_padded_eagerly()")
        check_kind(
            "found", found, Dispatch, optional=False, example="runner.dispatcher.dispatch(batch)"
        )
        run = partial(self._run_padded_eagerly, batch, found, values, updates, metadata)
        return in_turn(self.pool, self.graphs.owner, run)

    def _run_padded_eagerly(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
    ) -> Any:
        if found.slot < 0:
            raise no_graph_to_pad_to(found.reason)
        if found.slot >= len(self._steps) or self._steps[found.slot] is None:
            # Its graph has gone since.
            raise no_graph_to_pad_to(Reason.NOT_CAPTURED)
        batch = checked_batch(batch)
        if updates is not None:
            step = self._steps[found.slot]
            updates = self._updates.resolve(updates, step, -1, self._steps, batch)
        named = found.descriptor
        context = ForwardContext(GraphMode.NONE, named, -1, updates, metadata, live=batch)
        return self._padded.run(batch, found, values, context, eager=True)

    @on_own_device
    def verify(
        self,
        batch: Batch | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        **values: Any,
    ) -> Any:
        """Try one step: by replay, and eagerly with the same padding, with another one and without;
        returns clones of its live outputs, which the last eager run made.

        State, random numbers and Python numbers are put back in between, so that they are advanced
        once. Other effects (the writes of a KV cache too large to be saved) happen several times,
        with equal values. A step that by the plan runs eagerly is run once. Raises
        `VerificationError` for what differs, naming the first operator that is another one than at
        capture, and before the graph of the batch is captured: see `docs/trust.md`.
        """
        refuse_inside_capture("verify()")
        verify = partial(self._verify, batch, values, updates, metadata)
        return in_turn(self.pool, self.graphs.owner, verify)

    def _verify(
        self, batch: Batch | None, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        if batch is None:
            batch = batch_of(self.inputs, values)
        # Its runs without padding take the batch as it is.
        batch = checked_batch(batch)
        found = self.dispatcher.dispatch(batch)
        if self._eager_launch or found.slot < 0:
            if not self._eager_launch and found.reason is not Reason.NOT_CAPTURED:
                self._path.last_dispatch = found
                return self._checked.eagerly(batch, found, values, updates, metadata)
            raise no_graph_to_verify(batch, found.reason)
        verdict = self._checked.verify(batch, found, values, updates, metadata)
        self._path.last_dispatch = found
        self._path.live_tokens += batch[0]
        if verdict.failure is not None:
            raise verdict.failure
        return verdict.outputs

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def report(self) -> RunnerReport:
        """Figures of the graphs and of the steps so far."""
        return report_of(
            self.plan.resolution,
            self.graphs,
            self.pool,
            self.inputs,
            self._path.live_tokens,
            self._meanwhile.seen(),
        )
