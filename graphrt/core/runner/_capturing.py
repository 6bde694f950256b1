"""What a runner's graphs go through: captured, all or a few at a time, sealed, released."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from graphrt.core.base.option_values import check_takes
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.reasons import Agreed
from graphrt.core.replay._turn import in_turn
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner._devices import on_own_device
from graphrt.core.runner._meanwhile import Meanwhile
from graphrt.core.runner._path import StepPath
from graphrt.core.runner._rounds import CaptureProgress, Rounds
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.session import Progress
from graphrt.core.runner.steps.updates import LastUpdates


class Capturing:
    """The part of a runner that captures. Its steps do not come by here."""

    pool: GraphPool
    graphs: GraphSet
    _path: StepPath
    _entrance: Callable[..., Any]
    _run: Callable[..., Any]
    _rounds: Rounds
    _meanwhile: Meanwhile
    _updates: LastUpdates
    _owns_pool: bool
    _is_closed = False

    @on_own_device
    def capture(self, progress: Progress | None = None) -> None:
        """Capture every planned graph that is not captured yet, then seal.

        `progress(done, total, descriptor)` is called before each graph and at the end. With
        `Host(example=)` graphs are tried then; one that fails its trial raises `VerificationError`,
        and nothing is captured. A failed capture raises; the graphs before it serve, and a further
        call tries the rest again. Graphs that the device has no room for are dropped
        (`report().dropped`) with a `GraphsDroppedWarning`, or under `strict` a
        `ResourceExhaustedError` when the rest is done.
        """
        self._path.check_open()
        check_takes("progress", progress, "progress(done, total, descriptor)", optional=True)
        try:
            self._rounds.all(progress)
        finally:
            self._time_steps()

    @on_own_device
    def capture_next(self, budget_s: float = 0.0, *, prefer: Iterable[int] = ()) -> CaptureProgress:
        """Capture some of the graphs that are missing, between two steps; seal after the last.

        As many as by those before them fit into `budget_s` seconds of the host, and at least one:
        `while runner.capture_next(0.05).left: ...`. First come the sizes (in tokens) of `prefer`,
        then what steps meanwhile have missed most, then what the plan's `traffic` needs most; but
        of each kind the largest graph is the first. Batches are served by what there is, else
        eagerly; `report().meanwhile` has the slowest steps. The first call compiles what is not
        compiled, the last one also tries `Host(example=)`. Ranks that capture together have to
        capture the same: they pass no budget, and equal batches or an agreed `prefer`.

        Raises `PoolBusyError` while a step is under way in the pool, or waits for its updates,
        `InvalidOptionError`, and what `capture()` does: a graph that fails raises once, is left to
        a `capture()`, and the next call goes on with the others.
        """
        self._path.check_open()
        try:
            return self._rounds.next(budget_s, prefer)
        finally:
            self._time_steps()

    def seal(self) -> None:
        """Capture nothing any more, in no wrapper of this runner."""
        self.graphs.seal()
        self._meanwhile.end()
        self._time_steps()

    def release(self) -> None:
        """Destroy all graphs, keeping the plan; batches run eagerly until `recapture()`. Raises
        `PoolBusyError` while a step is under way in the pool."""
        try:
            in_turn(self.pool, self.graphs.owner, self._release)
        finally:
            self._time_steps()

    @on_own_device
    def recapture(self, progress: Progress | None = None) -> None:
        """Destroy all graphs and capture them again, for weights that have moved: in one turn of
        the pool, so no step comes between."""
        check_takes("progress", progress, "progress(done, total, descriptor)", optional=True)
        self._path.check_open()

        def again() -> None:
            self._release()
            self._rounds.all_in_turn(progress)

        try:
            in_turn(self.pool, self.graphs.owner, again)
        finally:
            self._time_steps()

    def _release(self) -> None:
        self.graphs.release()
        self._updates.forget_graphs()
        self._meanwhile.end()

    def weights_changed(self) -> None:
        """Declare that weights were written; raises `StaleInputError` if they moved,
        `UntrackedWeightsError` if graphs read what nobody owns, and `PoolBusyError` while a step is
        under way in the pool. Then as `module_changed`. Where steps are checked they run eagerly
        after a `StaleInputError` too, until `recapture()`."""
        in_turn(self.pool, self.graphs.owner, self.graphs.check_weights)
        self.module_changed()

    def module_changed(self) -> None:
        """Declare that modules have other attributes, hooks or submodules, or were `train()`ed;
        raises `StaleInputError` if graphs read a tensor that was replaced, and `RetraceError` if
        compiled code has baked in what is different now. Where steps are checked they run eagerly
        from then on, until `recapture()`."""
        self.graphs.check_modules()

    def close(self) -> None:
        """Destroy the graphs, and the pool if it is this runner's own.

        Must come before the host tears down the communicators that graphs hold. Raises
        `PoolBusyError` while a step is under way in the pool.
        """
        if self._is_closed:
            return
        if self.pool.left_behind:
            self._path.closed = True
        else:
            in_turn(self.pool, self.graphs.owner, self._close)
        if self._owns_pool:
            self.pool.close()
        # Last: interrupted before it, a second call does what is left.
        self._is_closed = True

    def _close(self) -> None:
        self.graphs.release()
        self._path.closed = True

    def _time_steps(self) -> None:
        """Have steps timed while graphs are missing; no step looks for that itself."""
        self._run = self._run_timed if self._meanwhile.on else self._entrance

    def _run_timed(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        path = self._path
        step = partial(path.run, batch, values, updates, metadata, agreed)
        return self._meanwhile.timed(step, lambda: path.last_dispatch, batch, values, agreed)
