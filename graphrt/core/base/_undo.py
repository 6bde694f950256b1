"""Undoing changes whatever interrupts them, a Ctrl-C between two lines included.

State that outlives a call (a mode of torch, the owner of a pool, an open capture) is changed in a
function under `@undoing`, and nowhere else by `with` or `finally`:

1. the function notes in its `Undo` how a change is undone, and then makes the change;
2. when it returns, or raises, all that it noted is undone, the last change first, and the error
   that it raised is the one that the caller sees;
3. if an interrupt or an error comes while a change is undone, that change is undone once more, and
   then the rest.

A `with` statement is not enough: after an interrupt as `__exit__` is entered, before its first
instruction, nobody leaves what was entered. Nor is `finally`, of which an interrupt skips the rest.
Here changes are undone in two places, in `try` and in its handler: one interrupt cannot stop both.

A few functions that every replay runs repeat this form inline, because `@undoing` costs 0.3 us.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from graphrt.core.base.log import logger
from graphrt.core.base.texts import error_line

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Undo(list[Callable[[], object]]):
    """Functions that undo changes, each noted *before* its change, and each safe to call twice.

    `later(undo)` notes the one that undoes the change that is made next.
    """

    __slots__ = ()

    later = list.append

    def after_error(self, undo: Callable[[], object]) -> None:
        """Note what is called only after an error, as to destroy a capture that is half made."""
        self.later(_AfterError(undo))

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager. Its `__exit__` is called once more if it raises or is
        interrupted, and is given an exception only after an error."""
        leave = _Leave(manager)
        self.later(leave)
        entered = manager.__enter__()
        leave.is_entered = True
        return entered

    def set(self, variable: ContextVar[T], value: T) -> None:
        """Set a variable of this thread, which has a value or a default."""
        self.later(partial(variable.set, variable.get()))
        variable.set(value)

    def now(self, *, failed: bool = False) -> None:
        """Undo what is noted, the last change first; all of it, even where some of it raises.

        The first error is raised when all is done; an interrupt goes before errors.
        """
        raised: BaseException | None = None
        # What was called and raised: it is called once more, and not a third time.
        cut_short: Callable[[], object] | None = None
        at = len(self)
        while at:
            undo = self[at - 1]
            if failed or type(undo) is not _AfterError:
                try:
                    undo(failed) if type(undo) is _Leave else undo()
                except BaseException as error:
                    # A second Ctrl-C, an error that a signal's handler raised, or no memory for
                    # the call itself: what it undoes may be as it was.
                    if raised is None or not isinstance(error, Exception):
                        raised = error
                    if undo is not cut_short:
                        cut_short = undo
                        continue
                # After the call: interrupted before this line, it is undone once more.
                del self[at - 1]
            at -= 1
        if raised is not None:
            raise raised


def undoing(function: Callable[Concatenate[S, Undo, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a function that changes state: its second parameter is an `Undo`, which callers do
    not pass, and what it notes there is undone when it returns or raises."""

    @functools.wraps(function)
    def undone(first: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        undo = Undo()
        try:
            result = function(first, undo, *args, **kwargs)
            undo.now()
            return result
        except BaseException as error:
            undo_after(error, partial(undo.now, failed=True))
            raise

    return undone


def undo_after(error: BaseException, undo: Callable[[], object]) -> None:
    """Undo what `error` has left half done. Where that raises too, the first error is what the
    caller has to know: the second is its note. An interrupt goes before both."""
    try:
        undo()
    except Exception as second:
        note(error, f"while this was undone: {error_line(second)}")


def note(error: BaseException, text: str) -> None:
    """Add a note to an error. If it takes none, the line goes to the log: errors have no notes on
    Python 3.10, and a user's error may have an `add_note` of its own."""
    try:
        error.add_note(text)
    except (Exception, SystemExit):
        logger.error("%s: %s", type(error).__name__, text)


def notes_of(error: BaseException) -> list[str]:
    """The notes of an error; none where its class keeps something else under that name."""
    try:
        return [each for each in error.__notes__ if isinstance(each, str)]
    except (Exception, SystemExit):
        return []


class ProcessChange:
    """A change of the whole process that is there as long as anybody needs it, such as a garbage
    collector that is off: the first user's `enter` makes it, the last one's `leave` undoes it.

    Users are kept by `id` and not counted, so that leaving twice, or without having entered,
    changes nothing. `make` is given a list to which it adds what undoes each step, before the step.
    Where it adds nothing, as there is nothing to change yet, the next user calls it again.
    """

    def __init__(self, make: Callable[[list[Callable[[], object]]], None]) -> None:
        self._make = make
        self._lock = threading.Lock()
        # `id` of each user that has entered and not left.
        self.users: set[int] = set()
        # What undoes the change, the last step last; empty while the change is not there.
        self._undone_by: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        """Whether it is there."""
        return bool(self._undone_by)

    def enter(self, user: object) -> None:
        """Make it, unless it is there."""
        with self._lock:
            self.users.add(id(user))
            if not self._undone_by:
                self._make(self._undone_by)

    def leave(self, user: object) -> None:
        """Undo it, if this user was the last."""
        with self._lock:
            self.users.discard(id(user))
            while self._undone_by and not self.users:
                self._undone_by[-1]()
                self._undone_by.pop()


class _AfterError(partial[object]):
    """A function that is called only after an error."""


class _Leave:
    """Leaves a context manager."""

    def __init__(self, manager: AbstractContextManager[object]) -> None:
        self._manager = manager
        self.is_entered = False

    def __call__(self, failed: bool = True) -> None:
        if failed or not self.is_entered:
            # A generator that an interrupt kept from starting would start now without an exception.
            self._manager.__exit__(BaseException, BaseException(), None)
        else:
            # With one, `@contextmanager` skips the lines after a `yield` without `finally`.
            self._manager.__exit__(None, None, None)
