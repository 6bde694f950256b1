"""The contract between a runner and whoever checks it.

A runner asks its `StepChecks` before it replays a graph, and a capture session has its forward run
by the `RunWatch` that they give it. The classes here check nothing: they are what a runner has with
`check="off"`. `graphrt.trust` derives its own from them; core imports none of it.

1. `capture()`: `runs(setup)` gives the session its `RunWatch`, which runs each warm-up and capture
   and puts the state back. Then `captured` is told which graphs there are.
2. A step: while `on`, a graph is replayed at once if its slot is not `pending` and the next of
   `glances.looks` is True. Else the engine asks `why_eager`, then `try_step`.
3. A step without a graph is run by `run_eagerly`.
4. `release()`: `reset`.

C reads `on`, `pending` and `looks` at fixed offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

from graphrt.core.base import errors
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.state import SavedState
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.runner.findings import Look, TrustReport
from graphrt.core.runner.host import MakeExample
from graphrt.core.runner.setup import RunnerSetup
from graphrt.core.runner.weights import NamedWeights, refuse_moved

T = TypeVar("T")

Values = Mapping[str, Any]
"""The tensors of a step, by the names of the inputs."""

Calls: TypeAlias = Callable[[], Callable[[], T]]
"""Called unwatched before each run: returns its call, with arguments that the run may reshape."""


class Step(NamedTuple):
    """One step: its batch, its dispatch (the graph, or why there is none) and what the host gave,
    with `updates` as `StepExecutor.updates_of` resolves them. With `agreed`, ranks have agreed on
    the graph. `graph_mode` is the mode of the graph that an eager step stands for; NONE for a
    miss."""

    batch: Batch
    dispatch: Dispatch
    values: Values
    updates: Any = None
    metadata: Any = None
    agreed: bool = False
    graph_mode: GraphMode = GraphMode.NONE


class Looks:
    """One answer for each step: whether nothing has changed since the capture."""

    __slots__ = ("__dict__", "looks")

    def __init__(self) -> None:
        self.looks: Iterator[bool] = repeat(True)


@dataclass
class RunWatch:
    """Runs the forward for one capture session, and puts its state back. This one knows only the
    state that the host declares, and generators of random numbers."""

    state: SavedState

    def run(self, kind: Hashable, tokens: int, inputs: Values, calls: Calls[T]) -> T:
        """Run a forward of so many tokens eagerly, for graphs of a `kind`; None is no graph's.
        `inputs` are what it reads, in the runner's buffers."""
        return calls()()

    def capture(
        self,
        mode: GraphMode,
        descriptor: BatchDescriptor,
        call: Callable[[], T],
        *,
        in_one: bool,
        is_tried: bool = False,
    ) -> T:
        """Capture a forward, as one graph (`in_one`) or as pieces. It `is_tried` where no
        warm-up of its size came before."""
        return call()

    def before_replay(self, in_one: bool, is_last: bool) -> bool:
        """A capture is about to replay a segment, the last one if `is_last`; returns whether that
        is needed. Nobody uses what a session's capture returns: the last segment of one that is
        `in_one` is read only if that left tensors in Python, as far as is known."""
        return True

    def copies(self) -> int:
        """By how many tensors the state that is held grew in the last capture."""
        return 0

    def may_try(self, kind: Hashable) -> bool:
        """Whether the next capture, of this `kind`, may be tried: a warm-up has told what to expect
        of it, in this session or before, and it can be taken back in Python."""
        return True

    def contradicts(self) -> bool:
        """Whether the capture that was just tried did what its kind's warm-up did not, as a first
        call does: then it has to be warmed up."""
        return False

    def take_back(self) -> bool:
        """Put back what a capture that was tried has changed in Python; returns whether it had
        changed anything, again if it is called twice."""
        return False

    def restore(self) -> None:
        """Put back the state that the last run has changed; it may be called again. The first
        error of the host's own functions is raised when all is done."""
        self.state.restore_memory()

    def may_draw(self, *, is_tried: bool = False) -> bool:
        """Whether the last run drew random numbers, as far as is known. Where a capture `is_tried`,
        that of a larger size has passed a look at each operator."""
        return not is_tried or self.state.generators.host_has_drawn()

    def reads_host_memory(self) -> bool:
        """Whether a warm-up has read memory of the host: where one operand is a number there, its
        value is an argument of the kernel."""
        return False

    def settle(self, last_runs: Callable[[], None]) -> None:
        """After all captures, and after `last_runs` of the forward: find what graphs read."""
        last_runs()

    def give_up(self) -> None:
        """End a session that was interrupted, without further runs: put Python values back, and
        note what its graphs read."""


class StepChecks:
    """Decides which steps of a runner are replayed. This one has all of them replayed.

    It knows neither the runner nor its graphs; what it needs of them comes with each call, as a
    `GraphTable` or a `StepExecutor`. All calls are in a turn of the pool.
    """

    __slots__ = ("__dict__", "on", "pending")

    decided: bool | None = None
    """The ranks' vote on whether the next step is a trial; None if they have not voted."""

    def __init__(self, tried_by: Callable[[], StepChecks] | None = None) -> None:
        """`tried_by` makes the checks that try a step where the host asks for that alone."""
        self.tried_by = tried_by
        self.on = False
        """Whether there is anything to ask: C and Python replay at once where not."""
        self.pending: dict[int, int | tuple[int, int]] = {}
        """slot -> the token count, or tokens and requests, of batches that may be replayed at once;
        -1: no batch of that graph. A slot that is missing may always."""
        self.glances = Looks()

    # Captures

    def runs(self, setup: RunnerSetup) -> RunWatch:
        """What runs the forward in a new capture session. Raises `StateTooLargeError`."""
        platform = setup.pool.platform
        limit = setup.options.state_limit(platform)
        return RunWatch(SavedState(platform.device_type, limit, setup.host.state))

    def captured(self, graphs: Iterable[Dispatch], *, more: bool = False) -> None:
        """Note captured graphs, some of which may have been noted before. With `more` to come none
        is taken for the smallest or the largest of its kind."""

    def try_examples(self, executor: Any, make: MakeExample) -> None:
        """Try captured graphs by steps that the host makes; raises the first failure."""

    def dropped(self, slot: int) -> None:
        """Forget a graph that was destroyed, where others remain."""

    def reset(self) -> None:
        """Forget everything: there are no graphs."""

    # Steps

    def changed_settings(self) -> errors.VerificationError | None:
        """The error for settings of torch that are not those of the first capture, or None."""
        return None

    def look_at_host(self) -> None:
        """Note what the host has changed in Python since the last look."""

    def why_eager(self, dispatch: Dispatch, *, agreed: bool) -> Reason | None:
        """Why the step of a graph must not be replayed; None if it may. Ranks may have `agreed` on
        the step. With `strict` raises the error instead."""
        return None

    def try_step(self, executor: Any, step: Step) -> tuple[Dispatch, Any] | Reason | None:
        """Try a step if it is due: how it ran, and its live outputs. None if it is not due, a
        reason to run it eagerly if it cannot be tried. With `strict` raises a failure."""
        return None

    def may_repeat(self, executor: Any, step: Step, error: errors.BreakError) -> bool:
        """Whether a step that has ended half way, as an eager part returned what its graph cannot
        read, may run again, eagerly. Then its graph is replayed no more."""
        return False

    def run_eagerly(self, executor: Any, step: Step) -> Any:
        """Run a step eagerly on its live rows."""
        return executor.run_unpadded(step)

    def lends(self) -> Collection[int] | None:
        """None if an eager step runs on copies of its inputs. Else it may read them in the caller's
        memory, as the forward writes none; but not those in storages of these numbers."""
        return None

    def stop_lending(self, kept: Mapping[str, int]) -> None:
        """Have eager steps run on copies from now on: the forward has written an input, or may have
        `kept` some, by name with the number of the storage."""

    def after_eager_step(self) -> None:
        """A step has run eagerly with the padding of its graph."""

    def verify(self, executor: Any, step: Step) -> tuple[Any, Exception | None]:
        """Try a step in any case; returns clones of its live outputs, and its failure or None."""
        if self.tried_by is not None:
            return self.tried_by().verify(executor, step)
        raise errors.VerificationError(
            "this runner was made without checks, so it cannot verify a step",
            expected="checks of graphrt.trust",
            advice="make it as graphrt.GraphRunner",
        )

    # Ranks

    def for_vote(self) -> tuple[Collection[int], Collection[int]]:
        """For ranks that vote on the next step: the slots of graphs whose next step has to be tried
        whatever its batch is, and of those in quarantine."""
        return (), ()

    def decide(self, slot: int, tried: bool) -> None:
        """Note the ranks' vote on whether the next step, of this graph, is a trial. It holds until
        `decided` is None again."""

    # What is known

    def check_named(self, named: NamedWeights) -> list[str]:
        """Raise `StaleInputError` if a weight has moved that graphs read. Returns the names of
        others that have moved, as those of an adapter that was not active."""
        refuse_moved([name for name, _ in named.moved()])
        return []

    def check_weights(self, graphs: Any) -> None:
        """Raise `StaleInputError` if a tensor that graphs read has moved, and
        `UntrackedWeightsError` if that cannot be told."""
        self.check_named(graphs.named)
        graphs.named.refuse_others()

    def outdated(self, graphs: Any) -> Collection[int]:
        """The slots of graphs that may be wrong by now: they read a tensor that has moved, are in
        quarantine, or something else has changed in Python since. Asked again once these are
        destroyed; with none left, the largest of each kind is to be tried."""
        try:
            self.check_weights(graphs)
        except (errors.StaleInputError, errors.UntrackedWeightsError):
            return [each.slot for each in graphs.dispatcher.published]
        return ()

    def set_aside(self, failure: Exception) -> None:
        """Let all batches run eagerly; the caller raises `failure` itself."""

    def look(self) -> Look:
        """What has changed in Python since the last capture. Raises `VerificationError` where
        checks have noted nothing to compare with."""
        raise errors.VerificationError(
            "look() compares with what checks have noted at a capture",
            got="no graphs" if self.on else 'check="off"',
            expected='graphs, captured at check="capture" or a higher level',
            advice="capture() first" if self.on else "GraphOptions(check=), GRAPHRT_CHECK unset",
        )

    def report(self, graphs: Any, *, quick: bool) -> TrustReport:
        """What is known of whether the graphs equal their forward. A `quick` report makes no walk:
        it says nothing of the memory that graphs read."""
        return TrustReport()
