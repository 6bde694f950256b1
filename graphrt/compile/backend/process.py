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
"""Number of a process -> its directory: a forked process makes its own."""

_TRITON_VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def compiling() -> Iterator[dict[str, Path]]:
    """Have Inductor compile code that can be kept and that is right for batches of any size, whose
    sums and floats it would else fix to the example's. One thread at a time. Yields the C++
    libraries that the code calls, by `_digest`.

    Triton kernels are saved with the tuned configuration alone. Inductor tunes kernels before it
    loads its code, and the code would find the kernels of the tuning in memory, with every
    configuration that was tried. Saved like that, they would be tuned again at every start.
    """
    built: dict[str, Path] = {}

    def note_library(kind: type, build: Callable[[], Load], args: Any, kwargs: Any) -> Load:
        load = build()

        def load_and_note() -> Any:
            library = load()
            built[_digest(kind, args, kwargs)] = _path_of(library)
            return library

        return load_and_note

    with (
        _lock,
        code_forgotten_after_tuning(),
        one_code_for_sums(),
        sizes_of_floats(),
        library_loads(note_library),
    ):
        yield built


@contextlib.contextmanager
def loading(own_caches: str, libraries: Path, directory: Path | None = None) -> Iterator[None]:
    """Have Inductor load code without a C++ compiler, and without tuning. Inductor's caches are in
    `directory`, or else in `own_caches`, a `new_directory`; Triton's are always there.

    C++ libraries are those that `keep_libraries` put into `libraries`. Inductor would look for them
    by its compiler's command line: it runs the compiler several times for that, and on another
    machine finds nothing. Inductor unpacks a saved piece into its cache and loads it from there. In
    a cache that others write, that may be a damaged piece, or another one, as guards are not
    compared. Triton kernels count as tuned: on disk, a configuration (of Triton 3.6) loses the mark
    that a search found it.
    """
    kept = {path.stem: path for path in libraries.iterdir()} if libraries.is_dir() else {}

    def load_kept(kind: type, build: Callable[[], Load], args: Any, kwargs: Any) -> Load:
        digest = _digest(kind, args, kwargs)
        path = kept.get(digest)
        return build() if path is None else partial(load_library, kind, path, digest)

    _start_triton()
    with (
        _lock,
        compiler_directory(str(directory or own_caches)),
        _triton_directory(f"{own_caches}/triton"),
        library_loads(load_kept),
        kernels_loaded_as_tuned(),
    ):
        yield


def _start_triton() -> None:
    """Have Triton build its driver, which takes a C compiler, in the user's cache directory."""
    if torch.accelerator.is_available() and importlib.util.find_spec("triton") is not None:
        from triton.runtime import driver

        driver.active.get_current_target()


@contextlib.contextmanager
def _triton_directory(path: str) -> Iterator[None]:
    # Inductor itself sets the variable only once, to a folder of its directory at that time.
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
    """A new empty directory that lasts as long as the process: kernels may look for their sources.

    Raises `OSError`.
    """
    with _lock:
        top = _directories.get(os.getpid(), "")
        # Cleaners of temporary directories remove old entries while the process lives.
        if not os.path.isdir(top):
            top = _directories[os.getpid()] = tempfile.mkdtemp(prefix="graphrt-")
            # Unlike `atexit`, it runs in forked workers too, in each for its own directory only.
            Finalize(None, shutil.rmtree, (top, True), exitpriority=0)
        return tempfile.mkdtemp(dir=top)


def keep_libraries(libraries: Mapping[str, Path], directory: Path) -> None:
    """Copy the libraries to a new `directory`, for `loading`."""
    directory.mkdir()
    for digest, path in libraries.items():
        shutil.copyfile(path, directory / f"{digest}{path.suffix}")


def _digest(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A hash of a library's source and settings and of the CPU; `submit_fn` only builds it."""
    settings = sorted((name, each) for name, each in kwargs.items() if name != "submit_fn")
    content = kind.__name__, cpu_features(), args, settings
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _path_of(library: Any) -> Path:
    return Path(str(library.__file__ if isinstance(library, ModuleType) else library._name))
