"""State of Inductor and Triton that the whole process shares: directories, patches, and the C++
libraries that compiled pieces call.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphrt.compile.cache.key.versions import cpu_features
from graphrt.compile.locks import process_lock
from graphrt.compile.private_torch.inductor import compiler_directory
from graphrt.compile.private_torch.patches import (
    Load,
    code_forgotten_after_tuning,
    kernels_loaded_as_tuned,
    library_loads,
    load_library,
    one_code_for_sums,
    sizes_of_floats,
)

_lock = process_lock()
_directories: dict[int, str] = {}
"""By the number of a process: a forked one makes its own."""

_TRITON_VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def compiling() -> Iterator[dict[str, Path]]:
    """What Inductor compiles in the block can be kept, and is for a batch of any size: it sums over
    any of them, and makes floats of them. One thread at a time; the C++ libraries that were built,
    or found built, by `_digest`.

    Triton kernels are saved as they are after tuning. Inductor tunes them before it loads its code,
    which then finds the same objects in memory, with every configuration that was tried: saved like
    that, they would be tuned again at every start.
    """
    built: dict[str, Path] = {}

    def recording(kind: type, build: Callable[[], Load], args: Any, kwargs: Any) -> Load:
        load = build()

        def loaded() -> Any:
            library = load()
            built[_digest(kind, args, kwargs)] = _path_of(library)
            return library

        return loaded

    with (
        _lock,
        code_forgotten_after_tuning(),
        one_code_for_sums(),
        sizes_of_floats(),
        library_loads(recording),
    ):
        yield built


@contextlib.contextmanager
def loading(own_caches: str, libraries: Path, directory: Path | None = None) -> Iterator[None]:
    """What is loaded in the block needs no C++ compiler and tunes nothing. Inductor's caches are in
    `directory`, or else in `own_caches`, where Triton's always are; it is of `new_directory`.

    C++ libraries are those that `keep_libraries` put into `libraries`: Inductor finds one by its
    compiler's whole command line, for which it runs that compiler several times, and by which no
    other machine finds it. A saved piece is taken from Inductor's cache after it was put there:
    from one that others write to, it may be another piece than that, as guards are not compared, or
    a damaged one. Triton kernels stay as they were tuned before they were saved: a configuration
    (of Triton 3.6) forgets on disk that it was found by a search.
    """
    kept = {path.stem: path for path in libraries.iterdir()} if libraries.is_dir() else {}

    def from_there(kind: type, build: Callable[[], Load], args: Any, kwargs: Any) -> Load:
        digest = _digest(kind, args, kwargs)
        path = kept.get(digest)
        return build() if path is None else partial(load_library, kind, path, digest)

    _start_triton()
    with (
        _lock,
        compiler_directory(str(directory or own_caches)),
        _triton_directory(f"{own_caches}/triton"),
        library_loads(from_there),
        kernels_loaded_as_tuned(),
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
    with _lock:
        top = _directories.get(os.getpid(), "")
        # Cleaners of temporary directories remove old entries while the process lives.
        if not os.path.isdir(top):
            top = _directories[os.getpid()] = tempfile.mkdtemp(prefix="graphrt-")
            # Unlike `atexit` it is for forked workers too, and in each for its own only.
            Finalize(None, shutil.rmtree, (top, True), exitpriority=0)
        return tempfile.mkdtemp(dir=top)


def keep_libraries(libraries: Mapping[str, Path], directory: Path) -> None:
    """Copy them, for `loading`."""
    directory.mkdir()
    for digest, path in libraries.items():
        shutil.copyfile(path, directory / f"{digest}{path.suffix}")


def _digest(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of the source and settings of a library and the CPU it is for, without who builds it."""
    settings = sorted((name, each) for name, each in kwargs.items() if name != "submit_fn")
    content = kind.__name__, cpu_features(), args, settings
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _path_of(library: Any) -> Path:
    return Path(str(library.__file__ if isinstance(library, ModuleType) else library._name))
