"""Keys of the compile cache, of what a test names, and what is kept for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    found = {}
    for name, source in sources.items():
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def bytes_of(entry: CacheEntry, name: str) -> bytes | None:
    """What was stored as bytes, checked; None for a miss."""
    artifact = entry.load(name)
    assert artifact is None or isinstance(artifact.content, bytes)
    return None if artifact is None else artifact.content
