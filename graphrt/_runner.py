"""`GraphRunner`: the runner of core, with its checks of `graphrt.trust`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from graphrt.core.base.errors import MissingCapabilityError
from graphrt.core.base.option_values import nan_choice
from graphrt.core.runner.runner import R, Runner

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack  # in typing from Python 3.11 on

    from graphrt._pacing import Pace
    from graphrt.core.batch.descriptor import Batch
    from graphrt.core.capture.options import GraphOptions
    from graphrt.core.device.platform import Platform
    from graphrt.core.inputs.buffers import InputSlot
    from graphrt.core.inputs.outputs import OutputAxes
    from graphrt.core.inputs.spec import Inputs
    from graphrt.core.plan.plan import Plan, PlanArguments
    from graphrt.core.replay.pool import GraphPool
    from graphrt.core.runner.capture_session import CaptureProgress, Progress
    from graphrt.core.runner.contract import StepChecks
    from graphrt.core.runner.host import Host
    from graphrt.core.runner.setup import RunnerSetup


class GraphRunner(Runner[R]):
    """Runs a forward for batches of any size, through graphs captured for some sizes.

    A call returns what `forward` returns: `GraphRunner[Tensor]` is the type of one whose forward
    returns a tensor. Before `capture()` every batch runs eagerly; after it, batches that no graph
    serves do, each with a reason. Equal means: bit for bit what `forward` gives on the same padded
    inputs.
    """

    _pace: Pace | None = None

    def __init__(
        self,
        forward: Callable[..., R],
        plan: Plan | None = None,
        *,
        inputs: Inputs,
        outputs: OutputAxes = None,
        host: Host | None = None,
        options: GraphOptions | None = None,
        platform: Platform | str | None = None,
        pool: GraphPool | None = None,
        device: torch.device | str | None = None,
        **arguments: Unpack[PlanArguments],
    ) -> None:
        """`plan` says which graphs there are; in its place its own arguments may be given here
        (`sizes=[1, 2, 4]`). `inputs` names every tensor argument of `forward`, by its
        `InputSpec`, or by a tensor like it, whose dimension 0 has the rows; `outputs` gives the
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
        # Imported by the first runner: see `Runner`.
        from graphrt.core.runner.setup import RunnerSetup

        setup = RunnerSetup(
            forward, plan, inputs, outputs, host, options, platform, pool, device, arguments
        )
        super().__init__(setup, _checks_for(setup))
        if setup.options.find_nan:
            from graphrt.observe.nans import NanWatch

            self._run = NanWatch(self)

    def verify(
        self,
        batch: Batch | InputSlot | torch.Tensor | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        nan: bool | Literal["inf"] = False,
        **values: Any,
    ) -> R:
        """Try one step, given as to a call: by replay, and eagerly with the same padding, with
        another one and without; returns clones of its live outputs, which the last eager run made.

        State, random numbers and Python numbers are put back in between, so that they are advanced
        once. Other effects (the writes of a KV cache too large to be saved) happen several times,
        with equal values. A step that by the plan runs eagerly is run once. With `nan` a NaN in the
        outputs is a `graphrt.observe.NanError`, which names the first operator that made one, with
        its line; "inf": infinities too.

        Raises `VerificationError` for what differs, naming the first operator that is another one
        than at capture, and before the graph of the batch is captured: see
        `docs/concepts/trust.md`.
        """
        verify: Callable[..., R] = super().verify
        if not nan_choice("nan", nan):
            return verify(batch, updates=updates, metadata=metadata, **values)
        from graphrt.observe.nans import verified

        known, given = self.inputs.completed(*self._without_batch(batch, values))
        again = partial(verify, batch, updates=updates, metadata=metadata, **values)
        outputs: R = verified(self, again, (known, given, updates, metadata), inf=nan == "inf")
        return outputs

    def capture_next(self, *, share: float | None = None) -> CaptureProgress:
        """Capture one of the graphs that are missing, between two steps; seal after the last:
        `while runner.capture_next(): ...`.

        They come in the order of `capture()`, the largest first. Batches are served by what there
        is, else eagerly. The first call compiles what is not compiled, the last one also tries
        `Host(example=)`. With `Host(ranks=)` ranks compare what they capture.

        With `share`, such as 0.1, captures take at most that share of wall time, beside one that is
        never cut short: a call that comes too early does nothing. The largest and the smallest
        graph of each mode come first (then the result is `ready`), then what most batches have
        missed. `share=1` never waits: `while not runner.capture_next(share=1).ready: ...`. Ranks
        cannot have one: `InvalidOptionError`.

        Raises `PoolBusyError` while a step is under way in the pool, ends one that waits for its
        updates with `MissingUpdateError`, and raises
        what `capture()` does: a graph that fails raises once, is left to a `capture()`, and the
        next call goes on with the others.
        """
        from graphrt._pacing import Pace, next_key, progress_now

        self.graphs.check_open()
        if share is not None:
            self._pace = self._pace or Pace(self.graphs)
            return self._pace.capture(share, partial(self._capture_next, next_key))
        progress = super().capture_next()
        return replace(progress, ready=progress_now(self.graphs).ready)

    def measure(self, sizes: Collection[int] | None = None) -> None:
        """Time a step of each graph of these sizes in tokens, by default of the smallest and the
        largest of each mode, against its forward run eagerly: `report()` has the seconds.

        Steps are the host's examples, else of padding; state is put back. Ranks call it together.
        Raises `InvalidOptionError` for sizes without a graph, and what steps raise.
        """
        from graphrt._measure import measure

        self.graphs.check_open()
        self._in_turn(partial(measure, self._executor, sizes))

    def _capture(self, progress: Progress | bool | None, first: Callable[[], None] | None) -> None:
        if progress is True:
            from graphrt._forecast import CaptureBar

            progress = CaptureBar(self.graphs)
        super()._capture(progress, first)


def runner_of(setup: RunnerSetup) -> Runner[Any]:
    """A runner of parts that are made already, with the checks of its level."""
    return Runner(setup, _checks_for(setup))


def _checks_for(setup: RunnerSetup) -> StepChecks:
    """The checks of a runner, by its level. At `off` nothing of `graphrt.trust` is imported before
    `verify()`."""
    if setup.options.checks("capture"):
        return _trust(setup)
    from graphrt.core.runner.contract import StepChecks

    return StepChecks(tried_by=partial(_trust, setup))


def _trust(setup: RunnerSetup) -> StepChecks:
    """The checks of `graphrt.trust`. Raises `MissingCapabilityError` where it is left out: a runner
    never has fewer checks than were asked for."""
    try:
        from graphrt.trust.runner_checks import RunnerChecks
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("graphrt.trust"):
            raise
        raise MissingCapabilityError(
            "graphrt.trust, which checks steps, is not installed",
            got=f"check={setup.options.check!r}",
            expected="the whole package of graphrt",
            advice='install graphrt again, or take GraphOptions(check="off")',
        ) from None
    return RunnerChecks(setup)
