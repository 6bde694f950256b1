"""Undoing changes whatever interrupts them, a Ctrl-C between two lines included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


class Undo:
    """What has to be undone, noted *before* it is done, by functions that may be called twice.

    A `with` statement loses what it should leave if a `KeyboardInterrupt` comes as `__exit__` is
    entered, and `finally` does what it has begun only in part. So who changes state that outlives
    its call does it in this form, where both calls of `now` do what is left to be done:

        undo = Undo()
        try:
            undo.later(put_back)
            change()
            undo.now()
        except BaseException:
            undo.now()
            raise
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: list[Callable[[], object]] = []

    def later(self, undo: Callable[[], object]) -> None:
        """Note what undoes the change that is made next."""
        self._left.append(undo)

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager, whose `__exit__` may be called twice."""
        self.later(lambda: _leave(manager))
        return manager.__enter__()

    def now(self) -> None:
        """Undo what is noted, the last change first; all of it, even where some of it raises.

        The first error is raised when all is done; an interrupt goes before errors.
        """
        failed: BaseException | None = None
        cut_short: Callable[[], object] | None = None
        while self._left:
            undo = self._left[-1]
            try:
                undo()
            except Exception as error:
                failed = failed or error
            except BaseException as error:
                # A second Ctrl-C, while the first one is undone: the rest still has to be.
                failed = error
                if undo is not cut_short:
                    cut_short = undo
                    continue
            # Only now: an interrupt before this has it undone once more.
            self._left.pop()
        if failed is not None:
            raise failed


class _Leaving(BaseException):
    """What a context manager that is left sees, entered or not."""


def _leave(manager: AbstractContextManager[object]) -> None:
    # Without an exception a generator that an interrupt kept from starting would start now.
    leaving = _Leaving()
    manager.__exit__(_Leaving, leaving, None)
