"""Keys of the compile cache, of code that a test names, and pieces that are kept for them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.key.versions import compiler_settings, runtime_versions


def cache_key(
    settings: Mapping[str, object],
    called: Mapping[str, str | Path | bytes],
    *,
    versions: Mapping[str, str] | None = None,
    compiler: Mapping[str, object] | None = None,
    **others: Mapping[str, object],
) -> CacheKey:
    """The key of code that calls functions, whose contents or files are `called` by name.

    `versions` are by default `runtime_versions()`, `compiler` is `compiler_settings()`;
    `others` are further groups.
    """
    return CacheKey.from_groups(
        {
            "versions": runtime_versions() if versions is None else versions,
            "settings": settings,
            "compiler": compiler_settings(Values()) if compiler is None else compiler,
            "called": {name: [_digest(each)] for name, each in called.items()},
            **others,
        }
    )


def _digest(source: str | Path | bytes) -> str:
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    return hashlib.sha256(content).hexdigest()


def saving(*names: str, content: bytes = b"code") -> Callable[[Path], None]:
    """What writes files to the directory that it is given, as a compiled piece does."""

    def save(directory: Path) -> None:
        for name in names or ("code",):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return save


def files_of(entry: CacheEntry, name: str) -> dict[str, bytes] | None:
    """The files of a piece, checked; None for a miss."""
    archive = entry.load(name)
    if archive is None:
        return None
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {each: file.read(each) for each in file.namelist()}
