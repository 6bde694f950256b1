"""`Turn`: who has a pool to itself, from before a graph is looked up until its outputs are out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import GraphRTError, PoolBusyError, PoolLeftBehindError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.context import current_context

T = TypeVar("T")


class OwnedPool(Protocol):
    """A pool, as far as its turns go."""

    owner: object | None

    @property
    def entered(self) -> object | None:
        """A step of which some pieces are to come."""

    def busy_error(self, context: object) -> GraphRTError:
        """Why `context` cannot use the pool."""


class Turn:
    """A turn of `owner` in a pool: meanwhile nobody else steps, captures or destroys graphs in it.

    A step takes its turn first. Then it dispatches, is checked, fills its buffers, launches and
    hands out. Whoever captures, publishes, quarantines, drops or closes takes one too. So no step
    sees half of a change, and what finds the pool taken raises `PoolBusyError` and has done
    nothing. A turn never waits, so locks may be taken in one.

    Inside of a turn the pool is passed to the context of a forward (`pool._pass_to`), and back
    after it. Wrappers that are called in this context know by it that the step is theirs.

    `__exit__` may be called twice, and without `__enter__`, so `Undo` can enter a turn. Between
    the look at the owner and the store there is no call: Python switches threads, and delivers
    interrupts, at calls and backward jumps only. Four callers are on the way of every step, and a
    `with` would cost them 0.3 us: `StepEngine.step` (and its twin in native/path.c), its `slot`,
    `GraphWrapper.__call__` and `KeyedGraph.replay` write the same look and stores out.
    """

    __slots__ = ("_owner", "_pool", "_taken")

    def __init__(self, pool: OwnedPool, owner: object) -> None:
        self._pool = pool
        self._owner = owner
        self._taken = False

    def __enter__(self) -> None:
        pool = self._pool
        if pool.owner is not None:
            raise pool.busy_error(self._owner)
        self._taken = True
        pool.owner = self._owner
        # Between the pieces of a step too.
        if pool.entered is not None:
            self.__exit__()
            raise pool.busy_error(self._owner)

    def __exit__(self, *error: object) -> None:
        if self._taken:
            self._taken = False
            # Whoever it was passed to: an interrupt may have kept that one from passing it back.
            self._pool.owner = None


class PoolOwner:
    """The owner of a pool, with a name for the error of a call that finds the pool taken."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def refusal(self, pool: OwnedPool) -> GraphRTError | None:
        """A more precise error than `PoolBusyError` for a call that finds the pool taken, or None.

        May end the owner: a step that waits for its updates is ended here, in its own thread.
        """
        return None


@undoing
def in_turn(pool: OwnedPool, undo: Undo, owner: object, call: Callable[[], T]) -> T:
    """Call what changes the graphs of a pool, in a turn of `owner`; an interrupt loses no turn.

    Raises `PoolBusyError` while a step is under way, or has pieces to come.
    """
    undo.enter(Turn(pool, owner))
    return call()


def check_between_steps(pool: OwnedPool, what: str) -> None:
    """Raise `PoolBusyError` while a step or a capture is under way in the pool, or a context is
    entered in this thread, whatever has been called in it. A step that waits for its updates, or
    of which some pieces are to come, is under way; it is not ended."""
    under_way = pool.owner or current_context() or pool.entered
    if under_way is not None:
        raise PoolBusyError(
            f"{what} was called while a step, or a capture, is under way",
            got=shown(under_way),
            expected="a call between two steps of the pool, when the last one has its updates",
            advice="call it after the step has returned, from the thread that steps",
        )


class LeftBehind(PoolOwner):
    """The owner for good of a pool in a child of its process that cannot be used there."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self._advice = advice

    def refusal(self, pool: OwnedPool) -> PoolLeftBehindError:
        return PoolLeftBehindError(
            "the graph pool was made before this process was forked, and cannot be used in it",
            got=self,
            expected="a pool of this process's own",
            advice=self._advice,
        )


def in_capture(what: str) -> LeftBehind:
    """Another thread was in a capture or a trial: what it would put back stays as it was."""
    return LeftBehind(
        f"{what} was under way in another thread, and the state of the model is what it had made "
        "of it",
        "fork while nothing is captured or tried; or make model, pool and runner in the child",
    )


def without_device(name: str) -> LeftBehind:
    """What the device knew of the parent process, it does not know of a child."""
    return LeftBehind(
        f"graphs and memory of platform {name!r} do not survive a fork",
        "start the process with multiprocessing's 'spawn', and make model and runner in it",
    )
