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
from graphrt.compile.cache.permissions import check_tree
from graphrt.compile.cache.store import warn
from graphrt.compile.errors import CompileError
from graphrt.compile.locks import process_lock
from graphrt.compile.private_torch.inductor import compiler_directory, default_compiler_directory
from graphrt.compile.private_torch.patches import (
    Load,
    code_forgotten_after_tuning,
    kernels_loaded_as_tuned,
    library_loads,
    load_library,
    without_kept_headers,
)

_lock = process_lock()
_directories: dict[int, str] = {}
"""Number of a process -> its directory: a forked process makes its own."""
_own_folders: dict[int, str] = {}
"""Number of a process -> its compiler's folder, in place of one that others may write."""

_TRITON_VARIABLE = "TRITON_CACHE_DIR"
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_walked: set[str] = set()
"""Folders whose content was checked. Nobody else could write there since: see `check_tree`."""


@contextlib.contextmanager
def compiling() -> Iterator[dict[str, Path]]:
    """Have Inductor compile code that can be kept. One thread at a time. Yields the C++ libraries
    that the code calls, by `_digest`.

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
        trusted_folders(),
        code_forgotten_after_tuning(),
        library_loads(note_library),
    ):
        yield built


@contextlib.contextmanager
def trusted_folders() -> Iterator[None]:
    """Have Inductor and Triton use their own folders only where nobody but this user and root may
    write, and else a folder of this process, with a warning.

    They run the libraries, kernels and Python that they find there, and graphrt keeps them in its
    cache for later starts. By default the folder is in the system's temporary directory, where
    anybody may have made it. Inductor always keeps precompiled C++ headers there.
    """
    default = default_compiler_directory()
    folder = os.environ.get(_INDUCTOR_VARIABLE) or default
    triton = os.environ.get(_TRITON_VARIABLE)
    with _lock, contextlib.ExitStack() as block:
        if not all(_is_trusted(each) for each in (folder, triton) if each):
            own = _own_folder()
            block.enter_context(compiler_directory(own))
            block.enter_context(_triton_directory(f"{own}/triton"))
        elif (real := os.path.realpath(folder)) != os.path.abspath(folder):
            # Whoever made a link in the path may let it lead elsewhere after the check.
            block.enter_context(compiler_directory(real))
        if not _is_trusted(default):
            block.enter_context(without_kept_headers())
        yield


def _is_trusted(folder: str) -> bool:
    """Whether only this user and root may write a folder; warns if others may."""
    try:
        check_tree(Path(os.path.abspath(folder)), below=folder not in _walked)
    except OSError as error:
        warn(
            f"the compiler's folder {folder} is not used, as what it holds is run as code and kept "
            f"in the compile cache: {error}; or set {_INDUCTOR_VARIABLE}, and for precompiled "
            "headers TMPDIR, to a folder of your own"
        )
        return False
    _walked.add(folder)
    return True


def _own_folder() -> str:
    """A folder for the compiler's caches that lasts as long as the process. Raises `CompileError`
    where others may write in the temporary directory."""
    folder = _own_folders.get(os.getpid(), "")
    if not os.path.isdir(folder):
        folder = _own_folders[os.getpid()] = new_directory()
    try:
        check_tree(Path(folder), below=False)
    except OSError as error:
        raise CompileError(
            "others may write everywhere that a compiler may keep its files",
            got=str(error),
            expected="a temporary directory that is sticky, or writable by this user alone",
            advice="set TMPDIR to a folder of your own",
        ) from error
    return folder


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
