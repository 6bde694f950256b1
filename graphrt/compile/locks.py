"""Locks around torch's compiler, which has one state for a process."""

from __future__ import annotations

import os
import threading


def process_lock() -> threading.RLock:
    """A lock that is free in a forked child, even if a thread of the parent held it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # nothing forks on Windows
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
