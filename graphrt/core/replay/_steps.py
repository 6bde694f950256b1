"""Whose turn it is in a pool: the steps that use its memory, one after the other."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import Token
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import CaptureError, GraphRTError, PoolBusyError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.replay._left_behind import LeftBehind
from graphrt.core.replay._turn import Turn
from graphrt.core.replay.handout import HandedOut, expire

_CAPTURED: Final = object()
"""What `step` is after a capture, so that the next replay, of whatever step, is looked at."""


class AwaitsUpdates(ABC):
    """A launched step that owns the pool until its updates came."""

    def __init__(self) -> None:
        self.thread = get_ident()

    @abstractmethod
    def abandon(self) -> GraphRTError:
        """Bring the step to its end with the arguments it has; returns the error that says so."""


class PoolSteps:
    """The steps of a pool, and what they have handed out.

    A step of one graph begins and ends with its replay. One of several pieces begins with the first
    of them, and ends where its context is left or, where a host only began it, with the next one.
    """

    # What every step reads: `NativeReplay` knows where in an object these are.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "closed",
        "generation",
        "owner",
        "step",
        "stream_id",
    )

    def __init__(self) -> None:
        self.closed = False
        self.stream_id: int | None = None
        self.generation = 0
        # What steps of runners have handed out and no step has overwritten yet.
        self.handed_out: HandedOut = []
        # The wrapper's replay path reads and writes the following directly. The owner is whose
        # turn it is (see `Turn`); `step` the token of the last step of pieces that replayed
        # something.
        self.owner: object | None = None
        self.step: object = None
        # What would put state back at its end: a capture, or a trial. None, mostly.
        self.puts_back: str | None = None
        # The last step of pieces that replayed or captured, and its token.
        self.step_context: ForwardContext | None = None
        self._begun: object = None
        self._replayed: object = None
        # The last step that a host began, and that another one has followed.
        self._step_over: object = None
        # What it has captured so far, to be taken back with what fails.
        self._captured_in_step: list[tuple[weakref.ref[Any], BatchDescriptor]] = []
        # The step in which a piece had no graph.
        self.without_graph: object = None
        # Outputs that entries hold weakly, by their storage.
        self._loose: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def turn(self, owner: object, *, idle: bool = False) -> AbstractContextManager[None]:
        """A turn of `owner`: meanwhile nobody else steps, captures or destroys graphs in the pool.

        With `idle` it is refused between the pieces of a step too. Raises `PoolBusyError` where it
        is entered.
        """
        return Turn(self, owner, idle=idle)

    def _pass_to(self, owner: object) -> None:
        """In a turn: from here on the pool is this owner's, until it is passed back."""
        self.owner = owner

    def end_turn_of(self, waiting: object) -> None:
        """End the turn of a launched step, whose updates came or never will."""
        if self.owner is waiting:
            self.owner = None

    def _enter_step(self, context: ForwardContext) -> None:
        """Note that a step of several pieces replays something; raises `PoolBusyError` inside of
        another one, and for one that another one has followed."""
        token = context.token
        if token is None or token is not self._begun:
            self._begin(context)
        self.step = self._replayed = token
        self.generation += 1
        self._expire_outputs()

    def _enter_capture(self, context: ForwardContext) -> None:
        """Note that a step captures something; raises as `_enter_step` does, and `CaptureError`
        behind a replay of the same step: what that left in the pool nobody holds, and a capture
        may have its memory."""
        token = context.token
        if context.mode is GraphMode.FULL:
            self._leave_step(context)
            return
        if token is None or token is not self._begun:
            self._begin(context)
        elif token is self._replayed:
            raise _behind_a_replay(context)
        self.step = _CAPTURED

    def _begin(self, context: ForwardContext) -> None:
        token = context.token
        if token is not None and token is self._step_over:
            raise self.busy_error(context)
        self._leave_step(context)
        self._begun, self.step_context = token, context
        self._replayed = None
        self._captured_in_step.clear()

    def _leave_step(self, context: ForwardContext | None) -> None:
        """Forget the last step of several pieces; raises `PoolBusyError` if it is not over."""
        last = self.step_context
        if last is not None and last is not context and last.token is self._begun is not None:
            if isinstance(self._begun, Token):
                raise self.busy_error(context)
            # Nobody says where a step of a host's own context ends: here, at the latest.
            self._step_over = self._begun
        self.step = self._begun = self.step_context = None

    def _note_captured(self, wrapper: Any, context: ForwardContext) -> None:
        """Note what a step of pieces has captured, which goes if another piece of it fails."""
        if context.token is not None and context.token is self._begun:
            self._captured_in_step.append((weakref.ref(wrapper), context.descriptor))  # type: ignore[arg-type]

    def _take_step_back(self, context: ForwardContext) -> None:
        """Destroy what the step has captured so far: behind it nothing could be captured alone."""
        if context.token is None or context.token is not self._begun:
            return
        while self._captured_in_step:
            reference, descriptor = self._captured_in_step[-1]
            wrapper = reference()
            if wrapper is not None:
                wrapper.destroy_graphs(descriptor)
            self._captured_in_step.pop()

    def _hold_loosely(self, aliases: Iterable[torch.Tensor]) -> None:
        """Note outputs that replays hand out, and that do not keep their memory."""
        for tensor in aliases:
            self._loose[tensor.untyped_storage()._cdata] = tensor

    def _check_held(self, arguments: Any, context: ForwardContext) -> None:
        """Raise `CaptureError` for what a replay has handed out: see `_enter_capture`."""
        if not self._loose:
            return
        for tensor in tree.tensors(arguments):
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._loose:
                raise _behind_a_replay(context)

    def _misses(self, context: ForwardContext) -> bool:
        """Note that a piece of a step runs eagerly; whether it is the first of the step, as far as
        can be told, so that what comes after it must look where its arguments are."""
        token = context.token
        seen = (context, self.generation) if token is None else token
        if seen == self.without_graph:
            return False
        self.without_graph = seen
        return True

    def _is_behind_a_miss(self, context: ForwardContext) -> bool:
        """Whether a piece of the same step has run eagerly."""
        return context.token is not None and context.token is self.without_graph

    def _will_put_back(self, what: str, later: Callable[[Callable[[], object]], object]) -> None:
        """Note that `what` changes state until all is undone that it was given as `later`: a child
        of the process, in which nobody undoes it, cannot go on."""
        later(partial(setattr, self, "puts_back", self.puts_back))
        self.puts_back = what

    def _forget_steps(self) -> None:
        """Forget the steps of threads that a child of the process does not have."""
        self.owner = self.puts_back = None
        self.step = self._begun = self._replayed = self.step_context = None
        self._captured_in_step.clear()

    def _expire_outputs(self) -> None:
        """Make what runners have handed out unreadable: its memory is about to be written."""
        if self.handed_out:
            expire(self.handed_out)

    def check_idle(self) -> None:
        """Raise `PoolBusyError` while a step or a capture is under way, or a context is entered in
        which pieces have run: others may be to come."""
        if self.owner is not None or self.entered is not None:
            raise self.busy_error(None)

    @property
    def entered(self) -> ForwardContext | None:
        """The context that is entered, in whatever thread, and in which pieces have run."""
        last = self.step_context
        if last is not None and last.token is self._begun and isinstance(self._begun, Token):
            return last
        return None

    def busy_error(self, context: object) -> GraphRTError:
        """Why `context` cannot use the pool. A step of this thread that waits for its updates is
        ended, so that the next one can."""
        waiting = self.owner
        if isinstance(waiting, LeftBehind):
            return waiting.error()
        if isinstance(waiting, AwaitsUpdates) and waiting.thread == get_ident():
            self.end_turn_of(waiting)
            return waiting.abandon()
        return PoolBusyError(
            "two steps use one graph pool at the same time",
            got=f"{context!r} in thread {get_ident()} while {self.owner or self.step_context!r} "
            "is under way",
            expected="one step at a time, from one thread at a time",
            advice="give what runs at the same time a GraphPool of its own",
        )


def _behind_a_replay(context: ForwardContext) -> CaptureError:
    return CaptureError(
        "a piece would be captured behind a replay of its step: what that left in the pool nobody "
        "holds, and the capture may have its memory",
        got=f"{context.mode.name} [{context.descriptor}]",
        expected="all pieces of a step captured in one step, or replayed",
        advice="GraphPool.drop(descriptor), and run the step again; give a piece that two models "
        "share a wrapper for each",
    )
