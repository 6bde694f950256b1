"""Keeping the garbage collector still while graphs are captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Process-wide because the collector is: nested and concurrent captures are counted.
_lock = threading.Lock()
_depth = 0
_FROZEN_BY_NOBODY = 5000
"""Python 3.12 has 375 objects frozen at its start: to thaw so few costs nothing."""
_restore: tuple[bool, bool] = (False, False)


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No collection until the last user leaves; restored as it was.

    A finalizer that runs inside a capture may free device memory or unload a module, which
    invalidates the capture. What is garbage already is frozen, so that not even an explicit
    collection by the forward finalizes it; where the host has frozen something itself, which
    ours must not thaw, it is collected before instead.
    """
    global _depth, _restore
    with _lock:
        if _depth == 0:
            # What the host froze itself must not be thawed with ours.
            thaw = gc.get_freeze_count() < _FROZEN_BY_NOBODY
            _restore = (gc.isenabled(), thaw)
            gc.disable()
            if thaw:
                gc.freeze()
            else:
                gc.collect()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                enabled, thaw = _restore
                if thaw:
                    gc.unfreeze()
                if enabled:
                    gc.enable()
