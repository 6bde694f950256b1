"""`Runner`: static buffers, dispatch, capture and replay of one forward.

`graphrt.GraphRunner` is a `Runner` that has its checks of `graphrt.trust`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import torch
from typing_extensions import TypeVar  # in typing from Python 3.13 on

from graphrt.core.base.errors import InvalidInputError, Uncopied
from graphrt.core.base.option_values import check_kind, check_takes
from graphrt.core.base.torch_names import runs_hooks, untraced
from graphrt.core.batch.descriptor import Batch
from graphrt.core.capture.refusals import NESTED_CAPTURE
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.inputs.buffers import InputSlot
from graphrt.core.replay.pool import in_last_turn, in_turn
from graphrt.core.replay.recording import current_capture, refuse_inside_capture

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

    from graphrt.core.batch.modes import GraphMode
    from graphrt.core.device.platform import Platform
    from graphrt.core.dispatch.dispatcher import GraphDispatcher
    from graphrt.core.inputs.buffers import StaticInputs
    from graphrt.core.plan.plan import Plan
    from graphrt.core.runner.capture_session import CaptureProgress, Choose, Progress
    from graphrt.core.runner.contract import StepChecks
    from graphrt.core.runner.findings import Look
    from graphrt.core.runner.host import Run
    from graphrt.core.runner.report import RunnerReport
    from graphrt.core.runner.setup import RunnerSetup

T = TypeVar("T")
R = TypeVar("R", default=Any)


class Runner(Uncopied, Generic[R]):
    """Runs a forward for batches of any size, through graphs captured for some sizes: see
    `graphrt.GraphRunner`, which is made with its arguments one by one."""

    _is_closed = False

    def __init__(self, setup: RunnerSetup, checks: StepChecks) -> None:
        """`checks` say which steps may be replayed: see contract.py."""
        # Imported by the first runner, so that programs which only name the class, in a registry or
        # a signature, start without the code that runs and captures.
        from graphrt.core.runner.engine import StepEngine
        from graphrt.core.runner.executor import StepExecutor
        from graphrt.core.runner.graph_table import GraphTable

        self.options = setup.options
        self.pool, self.inputs = setup.pool, setup.inputs
        # The table has the graphs, the executor runs a step, the engine decides how.
        self.graphs = GraphTable(setup, checks)
        self._executor = StepExecutor(self.graphs)
        self._engine = StepEngine(self._executor)
        # What `__call__` calls for a step. Observers wrap it (graphrt/observe/tap.py): a step that
        # nobody observes pays nothing.
        self._run: Callable[..., R] = self._engine.entrance()
        if setup.host.ranks is not None:
            self._run = setup.host.ranks.entrance(self.graphs, self._run)
        if self.inputs.declared.optional:
            self._run = partial(_completed, self.inputs, self._run)

    @untraced
    def __call__(
        self,
        batch: Batch | InputSlot | torch.Tensor | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        agreed: Any = None,
        **values: Any,
    ) -> R:
        """Run one step on its live rows; returns the live rows of the outputs.

        `values` are tensors in the dtypes and live shapes of `inputs`; `batch` may be left out
        where their shapes say everything. An input slot stands for both; values beside it take the
        place of its own. A tensor in its place is the input of a runner that has one alone; the
        forward gets it by name all the same, so one with hooks refuses it.
        `updates` are the host arguments of updatable tasks, `metadata` is what eager parts read
        from the context.
        `agreed` is the graph that ranks have agreed on, by its descriptor or the `Dispatch` of one
        of them: that one is replayed, or none (RANKS_DISAGREE).

        Outputs are fresh tensors, readable until the next step of the pool begins: touched later
        they raise (`OverwrittenOutputError`). On devices whose memory torch cannot mark, the CPU
        among them, they are copies.

        Raises `InvalidInputError`, `InvalidBatchError`, `PoolBusyError`, what updates raise, and
        what `strict` says.
        """
        if batch is not None and batch.__class__ is not Batch:
            batch, values = self._without_batch(batch, values)
        return self._run(batch, values, updates, metadata, agreed)

    def _without_batch(self, first: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The batch and the inputs of a step, where a slot or a tensor was given in the batch's
        place. Raises `InvalidInputError` for a tensor that could be one of several inputs."""
        if isinstance(first, InputSlot):
            return first.batch, {**first, **values}
        if not isinstance(first, torch.Tensor):
            return first, values
        declared = self.inputs.declared
        names = [name for name in declared.specs if name not in declared.optional] or [
            *declared.specs
        ]
        if runs_hooks(self.graphs.setup.forward):
            raise InvalidInputError(
                "a tensor was given without its name, and the forward has hooks: they would see it "
                "by name, as the forward is always called here",
                got=f"a tensor of {tuple(first.shape)} by position",
                expected=f"{', '.join(names)} by name",
                advice="pass it by name, with hooks made by with_kwargs=True; or use graphed()",
            )
        if len(names) > 1 or values or "." in names[0]:
            raise InvalidInputError(
                "a tensor was given without its name, and could be any of the inputs",
                got=f"a tensor of {tuple(first.shape)} in the place of the batch",
                expected=f"{', '.join(names)} by name",
                advice=f"runner({', '.join(f'{name}=...' for name in names)})",
            )
        return None, {names[0]: first}

    def __repr__(self) -> str:
        return (
            f"GraphRunner({self.mode.name}, {len(self.graphs.records)} graphs, {self.pool.device})"
        )

    @property
    def platform(self) -> Platform:
        """The platform that the graphs run on."""
        return self.pool.platform

    @property
    def plan(self) -> Plan:
        """The plan. Where its budget says bytes without costs: with what graphs have taken so far,
        and what is predicted of the others."""
        return self.graphs.plan()

    @property
    def mode(self) -> GraphMode:
        """The mode that the plan was resolved to."""
        return self.graphs.setup.plan.mode

    @property
    def dispatcher(self) -> GraphDispatcher:
        """Finds the graph for a batch."""
        return self.graphs.dispatcher

    @property
    def last_dispatch(self) -> Dispatch | None:
        """The dispatch of the last step, which says how it ran."""
        return self._engine.last_dispatch

    def unwrap(self) -> Callable[..., R]:
        """The forward, which the runner calls inside of another one's capture."""
        return self.graphs.setup.forward

    def slot(self, batch: Batch) -> InputSlot:
        """Host memory in which the inputs of `batch` are written in place, and which the caller
        keeps: `runner(slot)` runs their step. Raises `InvalidBatchError`."""
        return self.inputs.slot(batch)

    def run_padded_eagerly(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any = None,
        metadata: Any = None,
    ) -> Any:
        """Run the forward eagerly on exactly the inputs that the graph of the dispatch `found`
        would read; returns the live rows of its outputs."""
        refuse_inside_capture("run_padded_eagerly()")
        check_kind(
            "found", found, Dispatch, optional=False, example="runner.dispatcher.dispatch(batch)"
        )
        run, values = self._engine.run_padded_eagerly, self.inputs.completed(batch, values)[1]
        return self._in_turn(partial(run, batch, found, values, updates, metadata))

    def verify(
        self,
        batch: Batch | InputSlot | torch.Tensor | None = None,
        /,
        *,
        updates: Any = None,
        metadata: Any = None,
        **values: Any,
    ) -> R:
        """Try one step, given as to a call: by replay, and eagerly with the same padding, with
        another one and without; returns clones of its live outputs, which the last eager run made.

        State, random numbers and Python numbers are put back in between, so that they are advanced
        once. Other effects (the writes of a KV cache too large to be saved) happen several times,
        with equal values. A step that by the plan runs eagerly is run once. Raises
        `VerificationError` for what differs, naming the first operator that is another one than at
        capture, and before the graph of the batch is captured: see `docs/concepts/trust.md`.
        """
        refuse_inside_capture("verify()")
        step = self.inputs.completed(*self._without_batch(batch, values))
        verify: Callable[[], R] = partial(self._engine.verify, *step, updates, metadata)
        return self._in_turn(verify)

    # The graphs -----------------------------------------------------------------------------------

    def capture(self, progress: Progress | bool | None = None) -> None:
        """Capture every planned graph that is not captured yet, then seal.

        `progress(done, total, descriptor)` is called before each graph and at the end; True shows a
        bar on a terminal, with what the rest takes from the third graph on. With `Host(example=)`
        graphs are tried then; one that fails its trial raises `VerificationError`, and nothing is
        captured. A failed capture raises; the graphs before it serve, and a further call tries the
        rest again. Graphs that the device has no room for are dropped (`report().dropped`) with a
        `GraphsDroppedWarning`, or under `strict` a `ResourceExhaustedError` when the rest is done.
        """
        self._capture(progress, self.graphs.left_out.clear)

    def capture_next(self) -> CaptureProgress:
        """Capture the first of the graphs that are missing, between two steps; seal after the last.
        See `graphrt.GraphRunner.capture_next`."""
        return self._capture_next()

    def _capture_next(self, choose: Choose | None = None) -> CaptureProgress:
        from graphrt.core.runner.capture_session import capture_next

        self.graphs.check_open()
        refuse_inside_capture("capture_next()")
        return self._in_turn(partial(capture_next, self._executor, choose))

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper of this runner."""
        self.graphs.seal()

    def release(self) -> None:
        """Destroy all graphs, keeping the plan; batches run eagerly until `recapture()`. Raises
        `PoolBusyError` while a step is under way in the pool."""
        self._in_turn(self.graphs.release)

    def recapture(
        self, progress: Progress | bool | None = None, *, only_outdated: bool = False
    ) -> None:
        """Destroy all graphs and capture them again, for weights that have moved: in one turn of
        the pool, so no step comes between. `progress` is as in `capture()`.

        With `only_outdated` graphs stay unless they read a tensor that has moved, are in
        quarantine, or something else has changed in Python that trials have not shown to be
        harmless: weights that were written in place capture nothing. Where it cannot be told what
        graphs read, all that were there are captured. Graphs that were never captured, or that a
        limit has ended, stay missing: lazy steps and `capture_next()` go on. The next step of the
        largest graph of each kind is a trial; with `Host(example=)` it is tried now, or when all
        are captured, and a failure raises as in `capture()`.
        """
        check_kind("only_outdated", only_outdated, bool, optional=False, example="True")
        self._capture(progress, None if only_outdated else self.graphs.release)

    def _capture(self, progress: Progress | bool | None, first: Callable[[], None] | None) -> None:
        """Capture what is missing after the call of `first`; without one, what is outdated."""
        from graphrt.core.runner.capture_session import capture_all, capture_outdated

        # `GraphRunner` has put a bar in the place of True.
        tell = None if isinstance(progress, bool) else progress
        if tell is not None:
            check_takes("progress", tell, "progress(done, total, descriptor)")
        self.graphs.check_open()
        if current_capture() is not None:
            raise NESTED_CAPTURE()

        def capture() -> None:
            if first is None:
                return capture_outdated(self._executor, tell)
            first()
            capture_all(self._executor, tell)

        self._in_turn(capture)

    def weights_changed(self) -> None:
        """Declare that weights were written or replaced, or that modules have other attributes,
        hooks or submodules, or were `train()`ed.

        Raises `StaleInputError` if a tensor that graphs read is another one by now, and
        `RetraceError` if compiled code has baked in what is different; where steps are checked they
        run eagerly from then on, until `recapture()`. Raises `UntrackedWeightsError` if graphs read
        tensors that nothing in the forward leads to, and `PoolBusyError` while a step is under way
        in the pool.
        """
        self._in_turn(self.graphs.check)

    def look(self) -> Look:
        """What has changed since the last capture of all that the forward reaches in Python, by
        name: attributes, hooks, code, values, and tensors that are others or elsewhere. It only
        tells: what a change leads to, steps and `weights_changed()` decide.

        Raises `VerificationError` at `check="off"` and without graphs, and `PoolBusyError` while a
        step is under way in the pool.
        """
        return self._in_turn(self.graphs.checks.look)

    def close(self) -> None:
        """Destroy the graphs, and the pool if it is this runner's own.

        Must come before the host tears down the communicators that graphs hold. Raises
        `PoolBusyError` while a step is under way in the pool.
        """
        if self._is_closed:
            return
        if self.pool.left_behind:
            self.graphs.closed = True
        else:
            self._in_turn(self._close, in_last_turn)
        if self.graphs.setup.owns_pool:
            self.pool.close()
        # Last: interrupted before it, a second call does what is left.
        self._is_closed = True

    def _in_turn(self, call: Callable[[], T], turn: Callable[..., T] = in_turn) -> T:
        """Run `call`, which uses or changes the graphs, on the pool's device and in a turn of the
        pool."""
        with self.pool.on_device():
            return turn(self.pool, self.graphs.setup.owner, call)

    def _close(self) -> None:
        """Destroy the graphs, and mark their table as closed; in a turn of the pool."""
        self.graphs.release()
        self.graphs.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def report(self) -> RunnerReport:
        """Figures of the graphs and of the steps so far."""
        from graphrt.core.runner.report import report_of

        return report_of(self.graphs, self._engine.live_tokens)


def _completed(inputs: StaticInputs, run: Run, batch: Any, values: Any, *others: Any) -> Any:
    """Run a step that may lack optional inputs."""
    return run(*inputs.completed(batch, values), *others)
