"""What decides whether compiled code may be used again: versions, settings and sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt.compile.cache.key.settings import compiler_settings
from graphrt.compile.cache.key.sources import TracedSources, digests_of
from graphrt.compile.cache.key.versions import runtime_versions
from graphrt.core.base.errors import InvalidOptionError

Groups = dict[str, dict[str, Any]]

GROUPS = ("versions", "settings", "compiler", "ambient", "environment", "sources", "called")
_DIGESTS = ("sources", "called")


@dataclass(frozen=True)
class CacheKey:
    """`digest` names an entry of the cache, `groups` are what it was made of."""

    digest: str
    groups: Groups

    @classmethod
    def of(
        cls,
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
        Settings are JSON types; raises `InvalidOptionError` for others.
        """
        traced = sources.digests() if isinstance(sources, TracedSources) else digests_of(sources)
        return cls.from_groups(
            {
                "versions": dict(runtime_versions() if versions is None else versions),
                "settings": dict(settings),
                "compiler": dict(compiler_settings() if compiler is None else compiler),
                "sources": traced,
                **others,
            }
        )

    @classmethod
    def from_groups(cls, groups: Mapping[str, Mapping[str, object]]) -> CacheKey:
        """The key of these groups: what `to_json` wrote, or what `of` gathered."""
        plain = {group: _checked(group, groups.get(group, {})) for group in GROUPS}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return cls(hashlib.sha256(text.encode()).hexdigest(), plain)

    def to_json(self) -> str:
        """For reading, and for `from_groups`."""
        return json.dumps(self.groups, indent=1, sort_keys=True) + "\n"

    def differences(self, other: CacheKey) -> list[str]:
        """What `self` has otherwise than `other`, as "versions.torch: 2.12.0 -> 2.13.0"."""
        return [
            line
            for group in GROUPS
            for line in _differences(group, other.groups[group], self.groups[group])
        ]


def _checked(group: str, values: Mapping[str, object]) -> dict[str, Any]:
    """JSON types only, so that what is read back equals what was written."""
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            f"the {group} of a cache key cannot be compared",
            got=str(error),
            expected="strings, numbers, booleans, None, lists and dicts of them",
            advice="give the name or the digest of anything else",
        ) from error
    return loaded


def _differences(group: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        what = f"{group}.{name}"
        if name not in old:
            yield f"{what}: new"
        elif name not in new:
            yield f"{what}: gone"
        elif old[name] != new[name]:
            changed = f"{old[name]} -> {new[name]}"
            yield f"{what}: {'edited' if group in ('sources', 'called') else changed}"
