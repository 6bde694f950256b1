"""What Inductor keeps outside of a saved piece: libraries, tuned kernels, its directories."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphrt.compile.cache.key import cpu_features


class _Process:
    """What one process has, and no child that it forks."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        # What is replaced here is the whole process's.
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

Load = Callable[[], Any]


@contextlib.contextmanager
def recorded_libraries() -> Iterator[dict[str, Path]]:
    """The C++ libraries that compiling in the block built or found built, by `_digest`."""
    found: dict[str, Path] = {}

    def load_async(build: Callable[..., Load], digest: str, cls: Any) -> Load:
        load = build()

        def loaded() -> Any:
            library = load()
            found[digest] = _path_of(library)
            return library

        return loaded

    with _replaced(load_async):
        yield found


def keep_libraries(libraries: Mapping[str, Path], directory: Path) -> None:
    """Copy them, for `kept_libraries`."""
    directory.mkdir()
    for digest, path in libraries.items():
        shutil.copyfile(path, directory / f"{digest}{path.suffix}")


@contextlib.contextmanager
def kept_libraries(directory: Path) -> Iterator[None]:
    """Code that is loaded in the block takes its C++ libraries from there.

    Inductor finds a library by its compiler's whole command line, for which it runs that compiler
    several times, and by which no other machine finds it.
    """
    kept = {path.stem: path for path in directory.iterdir()} if directory.is_dir() else {}

    def load_async(build: Callable[..., Load], digest: str, cls: Any) -> Load:
        path = kept.get(digest)
        return build() if path is None else lambda: cls._load_library(str(path), digest)

    with _replaced(load_async):
        yield


@contextlib.contextmanager
def tuned_kernels() -> Iterator[None]:
    """Triton kernels that are compiled in the block are saved as they are after tuning.

    Inductor tunes them before it loads its code, which then finds the same objects in memory, with
    every configuration that was tried: saved like that, they would be tuned again at every start.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    wrapper: Any = PythonWrapperCodegen
    with _process.lock:
        original = wrapper.generate_and_run_autotune_block

        def replacement(self: Any) -> None:
            original(self)
            PyCodeCache.cache_clear()

        wrapper.generate_and_run_autotune_block = replacement
        try:
            yield
        finally:
            wrapper.generate_and_run_autotune_block = original


@contextlib.contextmanager
def tuned_before() -> Iterator[None]:
    """Triton kernels that are loaded in the block stay as they were tuned before they were saved.

    A configuration (of Triton 3.6) forgets on disk that it was found by a search, and every kernel
    would be tuned again at its first call.
    """
    from torch._inductor.triton_bundler import TritonBundler

    bundler: Any = TritonBundler
    with _process.lock:
        original = vars(bundler)["load_autotuners"]

        def replacement(cls: Any, kernels: Any) -> Any:
            for each in kernels or ():
                if len(each.kernel.compile_results) == 1:
                    each.kernel.compile_results[0].config.found_by_coordesc = True
            return original.__func__(cls, kernels)

        bundler.load_autotuners = classmethod(replacement)
        try:
            yield
        finally:
            bundler.load_autotuners = original


@contextlib.contextmanager
def own_directory(place: str, directory: Path | None = None) -> Iterator[None]:
    """Inductor's and Triton's caches of the block are in `directory`, or else in `place`.

    Triton's are always in `place`, which is of `new_directory`.

    A saved piece is taken from Inductor's cache after it was put there: from one that others write
    to, it may be another piece than that, as guards are not compared, or a damaged one.
    """
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    _start_triton()
    with (
        _process.lock,
        temporary_cache_dir(str(directory or place)),
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


@contextlib.contextmanager
def _replaced(load_async: Callable[[Callable[..., Load], str, Any], Load]) -> Iterator[None]:
    """Where Inductor asks for a C++ library, of whichever kind."""
    from torch._inductor.codecache import CppCodeCache

    caches: Any = CppCodeCache
    with _process.lock:
        original = vars(caches)["load_async"]

        def replacement(cls: Any, *args: Any, **kwargs: Any) -> Load:
            def build() -> Load:
                load: Load = original.__func__(cls, *args, **kwargs)
                return load

            return load_async(build, _digest(cls, args, kwargs), cls)

        caches.load_async = classmethod(replacement)
        try:
            yield
        finally:
            caches.load_async = original


def _digest(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of the source and settings of a library and the CPU it is for, without who builds it."""
    settings = sorted((name, each) for name, each in kwargs.items() if name != "submit_fn")
    content = cls.__name__, cpu_features(), args, settings
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _path_of(library: Any) -> Path:
    return Path(str(library.__file__ if isinstance(library, ModuleType) else library._name))
