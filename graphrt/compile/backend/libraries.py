"""The C++ libraries that compiled pieces call, kept beside them."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from graphrt.compile.backend.process import taking_turns
from graphrt.compile.cache.key.versions import cpu_features
from graphrt.compile.private_torch.patches import Load, library_loads, load_library


@contextlib.contextmanager
def recorded_libraries() -> Iterator[dict[str, Path]]:
    """The C++ libraries that compiling in the block built or found built, by `_digest`."""
    found: dict[str, Path] = {}

    def recording(kind: type, build: Callable[[], Load], digest: str) -> Load:
        load = build()

        def loaded() -> Any:
            library = load()
            found[digest] = _path_of(library)
            return library

        return loaded

    with _replaced(recording):
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

    def from_there(kind: type, build: Callable[[], Load], digest: str) -> Load:
        path = kept.get(digest)
        return build() if path is None else partial(load_library, kind, path, digest)

    with _replaced(from_there):
        yield


@contextlib.contextmanager
def _replaced(instead: Callable[[type, Callable[[], Load], str], Load]) -> Iterator[None]:
    """Where Inductor asks for a C++ library, of whichever kind."""

    def load_async(
        kind: type, build: Callable[[], Load], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Load:
        return instead(kind, build, _digest(kind, args, kwargs))

    with taking_turns(), library_loads(load_async):
        yield


def _digest(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of the source and settings of a library and the CPU it is for, without who builds it."""
    settings = sorted((name, each) for name, each in kwargs.items() if name != "submit_fn")
    content = kind.__name__, cpu_features(), args, settings
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _path_of(library: Any) -> Path:
    return Path(str(library.__file__ if isinstance(library, ModuleType) else library._name))
