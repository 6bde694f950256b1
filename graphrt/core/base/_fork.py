"""What a child of this process must put right: it has one thread, and the others' locks.

`os.fork()` copies a process with whatever its other threads were in the middle of, and none of
these threads goes on in the child. A lock that one of them held would never be released there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Lock = TypeVar("Lock")


class LivesThroughForks(Protocol):
    """An object with state of threads, such as a turn, that do not exist in a child."""

    def forked(self) -> None:
        """Called in a child, before anything else runs there."""


# Process-wide because a fork is. Weak, so that nothing lives longer by it.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_objects: weakref.WeakSet[LivesThroughForks] = weakref.WeakSet()
_functions: list[Callable[[], object]] = []


def fork_safe(lock: Lock) -> Lock:
    """A lock of `threading`, which a child finds released, whoever held it."""
    _locks.add(lock)
    return lock


def tell_of_forks(told: LivesThroughForks) -> None:
    """Call `told.forked()` in every child; it is not kept alive."""
    _objects.add(told)


def after_forks(call: Callable[[], object]) -> None:
    """Call a function of a module in every child."""
    _functions.append(call)


def _in_child() -> None:
    for lock in list(_locks):
        # An RLock of the thread that forked is still its own.
        owned = getattr(lock, "_is_owned", None)
        if owned is None or not owned():
            lock._at_fork_reinit()
    for call in _functions:
        call()
    for each in list(_objects):
        each.forked()


if hasattr(os, "register_at_fork"):  # nothing forks on Windows
    os.register_at_fork(after_in_child=_in_child)
