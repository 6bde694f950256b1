"""Turns: who has a pool to itself, from before a graph is looked up until its outputs are out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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


def in_turn(pool: OwnedPool, owner: object, call: Callable[[], T]) -> T:
    """Call what uses or changes the graphs of a pool in a turn of `owner`: meanwhile nobody else
    steps, captures or destroys graphs in it. A turn never waits: raises `PoolBusyError` while a
    step is under way, or has pieces to come.

    A step takes its turn first. Then it dispatches, is checked, fills its buffers, launches and
    hands out. So no step sees half of a change, and a call that finds the pool taken has done
    nothing. Inside of a turn the pool is passed to the context of a forward, and back after it:
    wrappers that are called in this context know by it that the step is theirs.

    Between the look at the owner and the store there is no call: Python switches threads, and
    delivers interrupts, at calls and backward jumps only. And the turn ends inside of `try`, not in
    a `finally`: an interrupt on the way out must not keep the pool. `StepEngine.step` (and its
    twin in native/path.c), `GraphWrapper.__call__` and `KeyedGraph.replay` are on the way of every
    step, which a call more would cost 0.2 us: they write this form out.
    """
    if pool.owner is not None:
        raise pool.busy_error(owner)
    try:
        pool.owner = owner
        if pool.entered is None:
            result = call()
            # Whoever it was passed to: an interrupt may have kept that one from passing it back.
            pool.owner = None
            return result
        pool.owner = None
    except BaseException:
        pool.owner = None
        raise
    raise pool.busy_error(owner)


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


def in_turn_of(owner: object) -> LeftBehind:
    """Another thread had the pool: the state of the model is what that had made of it."""
    return LeftBehind(
        f"{owner!r} was under way, and the state of the model is what it had made of it",
        "fork between two steps and captures; or make model, pool and runner in the child",
    )


def without_device(name: str) -> LeftBehind:
    """What the device knew of the parent process, it does not know of a child."""
    return LeftBehind(
        f"graphs and memory of platform {name!r} do not survive a fork",
        "start the process with multiprocessing's 'spawn', and make model and runner in it",
    )
