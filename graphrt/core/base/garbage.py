"""Keeping the garbage collector still while graphs are captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphrt.core.base._fork import after_forks, fork_safe
from graphrt.core.base.homes import public

# Process-wide because the collector is: captures may be nested and concurrent. They are kept by
# name and not counted, so that leaving twice, or without having come in, changes nothing.
_lock = fork_safe(threading.Lock())
_users: set[int] = set()
_FROZEN_BY_NOBODY = 5000
"""Python 3.12 has 375 objects frozen at its start: to thaw so few costs nothing."""
_restore: tuple[bool, bool] = (False, False)


def freeze_garbage(user: object, *, heap: bool = True) -> None:
    """Collect nothing until this user, and all others, have called `thaw_garbage`.

    A finalizer that runs inside a capture may free device memory or unload a module, which
    invalidates the capture. What is garbage already is frozen, so that not even an explicit
    collection by the forward finalizes it; where the host has frozen something itself, which
    ours must not thaw, it is collected before instead. To ask takes 80 ms where half a million
    objects are frozen. Without `heap` it is left as it is, for a host that sees to it.
    """
    global _restore
    with _lock:
        if not _users:
            # What the host froze itself must not be thawed with ours.
            thaw = heap and gc.get_freeze_count() < _FROZEN_BY_NOBODY
            _restore = (gc.isenabled(), thaw)
            _users.add(id(user))
            gc.disable()
            if thaw:
                gc.freeze()
            elif heap:
                gc.collect()
        _users.add(id(user))


def thaw_garbage(user: object) -> None:
    """End what `freeze_garbage` began for this user, if it did; the last one restores all."""
    with _lock:
        if _users == {id(user)}:
            _put_back()
        _users.discard(id(user))


def _put_back() -> None:
    enabled, thaw = _restore
    if thaw:
        gc.unfreeze()
    if enabled:
        gc.enable()


def _forked() -> None:
    """The captures of other threads, which would have thawed it, do not exist in a child."""
    if _users:
        _put_back()
        _users.clear()


after_forks(_forked)


@public("graphrt.lowlevel")
@contextmanager
def frozen_gc() -> Iterator[None]:
    """No collection in the body, nor in that of any other user; see `freeze_garbage`."""
    user = object()
    try:
        freeze_garbage(user)
        yield
    finally:
        thaw_garbage(user)
