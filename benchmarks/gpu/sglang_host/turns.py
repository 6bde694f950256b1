"""One engine at a time, where many are started at once: a lock that all of them take in turns."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "GRAPHRT_BENCH_TURNS"
"""`FOLDER:COUNT`: the folder of the lock, and how many engines capture."""

MOST_S = 90.0
"""Waited for engines that do not begin their captures."""


@contextmanager
def in_turn(engine: str = "") -> Iterator[None]:
    """No other engine captures, or makes timed steps, meanwhile. The captures of an `engine` wait
    until all engines are as far."""
    folder, _, count = os.environ.get(VARIABLE, "").rpartition(":")
    if not folder:
        yield
        return
    if engine:
        (Path(folder) / f"{engine}.ready").touch()
        began = time.monotonic()
        while len(list(Path(folder).glob("*.ready"))) < int(count):
            if time.monotonic() - began > MOST_S:
                break
            time.sleep(0.05)
    with open(Path(folder) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
