"""What of Inductor and Triton belongs to the whole process: their directories and patches."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from graphrt.compile.private_torch.inductor import compiler_directory
from graphrt.compile.private_torch.patches import (
    code_forgotten_after_tuning,
    kernels_loaded_as_tuned,
    one_code_for_sums,
    sizes_of_floats,
)


class _Process:
    """What one process has, and no child that it forks."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.lock = threading.RLock()
        self.directory = ""

    def directory_that_is_there(self) -> str:
        with self.lock:
            # Others clean the temporary directory, of what is old.
            if not os.path.isdir(self.directory):
                self.directory = tempfile.mkdtemp(prefix="graphrt-")
                # Unlike `atexit` it is for forked workers too, and in each for its own only.
                Finalize(None, shutil.rmtree, (self.directory, True), exitpriority=0)
            return self.directory


_process = _Process()
if hasattr(os, "register_at_fork"):
    # Another thread may hold the lock, which the child does not have and would wait for.
    os.register_at_fork(after_in_child=_process.begin)

_TRITON_VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """One thread at a time: what is replaced in the block is the whole process's."""
    with _process.lock:
        yield


@contextlib.contextmanager
def tuned_kernels() -> Iterator[None]:
    """Triton kernels that are compiled in the block are saved as they are after tuning.

    Inductor tunes them before it loads its code, which then finds the same objects in memory, with
    every configuration that was tried: saved like that, they would be tuned again at every start.
    """
    with taking_turns(), code_forgotten_after_tuning():
        yield


@contextlib.contextmanager
def code_for_any_size() -> Iterator[None]:
    """Code that is compiled in the block for a batch of any size sums over any of them, and makes
    floats of them."""
    with taking_turns(), one_code_for_sums(), sizes_of_floats():
        yield


@contextlib.contextmanager
def tuned_before() -> Iterator[None]:
    """Triton kernels that are loaded in the block stay as they were tuned before they were saved.

    A configuration (of Triton 3.6) forgets on disk that it was found by a search, and every kernel
    would be tuned again at its first call.
    """
    with taking_turns(), kernels_loaded_as_tuned():
        yield


@contextlib.contextmanager
def own_directory(place: str, directory: Path | None = None) -> Iterator[None]:
    """Inductor's and Triton's caches of the block are in `directory`, or else in `place`.

    Triton's are always in `place`, which is of `new_directory`.

    A saved piece is taken from Inductor's cache after it was put there: from one that others write
    to, it may be another piece than that, as guards are not compared, or a damaged one.
    """
    _start_triton()
    with (
        taking_turns(),
        compiler_directory(str(directory or place)),
        _triton_directory(f"{place}/triton"),
    ):
        yield


def _start_triton() -> None:
    """Triton builds its driver with a C compiler, once for each of its directories."""
    if torch.accelerator.is_available() and importlib.util.find_spec("triton") is not None:
        from triton.runtime import driver

        driver.active.get_current_target()


@contextlib.contextmanager
def _triton_directory(path: str) -> Iterator[None]:
    # Inductor sets the variable once, to what lies below its directory at that time.
    before = os.environ.get(_TRITON_VARIABLE)
    os.environ[_TRITON_VARIABLE] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TRITON_VARIABLE]
        else:
            os.environ[_TRITON_VARIABLE] = before


def new_directory() -> str:
    """An empty one, as kernels may look for their sources as long as the process runs.

    Raises `OSError`.
    """
    return tempfile.mkdtemp(dir=_process.directory_that_is_there())
