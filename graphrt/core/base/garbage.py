"""Keeping the garbage collector still while graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graphrt.core.base._undo import ProcessChange
from graphrt.core.base.homes import public

_FROZEN_BY_NOBODY = 5000
"""Python 3.12 has 375 objects frozen at its start: to thaw so few costs nothing."""


def _keep_still(undo: list[Callable[[], object]]) -> None:
    undo.append(gc.enable if gc.isenabled() else int)
    gc.disable()
    # What the host froze itself must not be thawed with ours. To ask takes 80 ms where half a
    # million objects are frozen, so the first user alone does.
    if gc.get_freeze_count() < _FROZEN_BY_NOBODY:
        undo.append(gc.unfreeze)
        gc.freeze()


_still = ProcessChange(_keep_still)


def freeze_garbage(user: object) -> None:
    """Collect nothing until this user, and all others, have called `thaw_garbage`.

    A finalizer that runs inside a capture may free device memory or unload a module, which
    invalidates the capture. What is garbage already is frozen, so that not even an explicit
    collection by the forward finalizes it, unless the host has frozen something itself.
    """
    _still.enter(user)


def thaw_garbage(user: object) -> None:
    """End what `freeze_garbage` began for this user, if it did; the last one restores all."""
    _still.leave(user)


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
