"""Keys of the compile cache, of sources that a test names, and pieces that are kept for them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.key.sources import TracedSources
from graphrt.compile.cache.key.versions import compiler_settings, runtime_versions


def cache_key(
    settings: Mapping[str, object],
    sources: TracedSources | Mapping[str, str | Path | bytes],
    *,
    versions: Mapping[str, str] | None = None,
    compiler: Mapping[str, object] | None = None,
    **others: Mapping[str, object],
) -> CacheKey:
    """The key of code made from `sources`: those of a trace, or contents and paths by module.

    `versions` are by default `runtime_versions()`, `compiler` is `compiler_settings()`;
    `others` are further groups.
    """
    return CacheKey.from_groups(
        {
            "versions": runtime_versions() if versions is None else versions,
            "settings": settings,
            "compiler": compiler_settings() if compiler is None else compiler,
            "sources": _digests(sources),
            **others,
        }
    )


def _digests(sources: TracedSources | Mapping[str, str | Path | bytes]) -> dict[str, str]:
    if isinstance(sources, TracedSources):
        return sources.digests()
    digests = {}
    for name, source in sources.items():
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


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
