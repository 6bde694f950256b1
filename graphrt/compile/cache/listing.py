"""What a directory of the compile cache holds: to list it, to remove from it, to explain a miss."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.permissions import opened, read_file
from graphrt.compile.cache.store import (
    KEY_FILE,
    MOST_TEXT_BYTES,
    TEMP_PREFIX,
    DamagedError,
    Manifest,
    read_artifact,
    read_manifest,
    remove_tree,
)
from graphrt.core.base.errors import GraphRTError, InvalidOptionError
from graphrt.core.base.option_values import shown

_KEY_NAME = re.compile(r"[0-9a-f]{16}")
_RANK_PREFIX = "rank_"
_MOST_SHOWN = 8


@dataclass(frozen=True)
class StoredRank:
    """What one rank has of a key. Without a manifest it is unfinished, or `damage` says why."""

    name: str
    directory: Path
    manifest: Manifest | None
    damage: str | None = None

    @property
    def state(self) -> str:
        """One word."""
        if self.damage is not None:
            return "damaged"
        return "unfinished" if self.manifest is None else "complete"

    def damaged_artifacts(self) -> dict[str, str]:
        """Names and reasons, after reading every file."""
        found = {}
        for name, record in ({} if self.manifest is None else self.manifest.artifacts).items():
            try:
                with opened(*_place(self.directory)) as directory:
                    read_artifact(directory, record)
            except (DamagedError, OSError) as error:
                found[name] = str(error)
        return found


@dataclass(frozen=True)
class StoredKey:
    """All ranks of a key. `key` is None if what it was made of cannot be read."""

    name: str
    directory: Path
    key: CacheKey | None
    ranks: tuple[StoredRank, ...]

    @property
    def created_s(self) -> float:
        """When it was last added to, in seconds since the epoch."""
        times = [each.manifest.created_s for each in self.ranks if each.manifest is not None]
        return max(times, default=self.directory.stat().st_mtime)

    @property
    def size_bytes(self) -> int:
        """Of everything in the directory, unfinished or not."""
        return sum(_size_bytes(each) for each in self.directory.rglob("*"))

    @property
    def complete(self) -> bool:
        """Whether a rank can load from it."""
        return any(each.manifest is not None for each in self.ranks)

    @property
    def pieces(self) -> int:
        """Artifacts of the rank that has most."""
        counts = [len(each.manifest.artifacts) for each in self.ranks if each.manifest is not None]
        return max(counts, default=0)


def stored_keys(directory: Path) -> list[StoredKey]:
    """The latest first; what else lies in the directory is left out."""
    if not directory.is_dir():
        return []
    found = [_stored_key(each) for each in directory.iterdir() if _is_key(each)]
    return sorted(found, key=lambda each: -each.created_s)


def find_key(directory: Path, prefix: str) -> StoredKey:
    """The only key that begins so; raises `InvalidOptionError`."""
    keys = stored_keys(directory)
    matching = [each for each in keys if prefix and each.name.startswith(prefix)]
    if len(matching) != 1:
        raise InvalidOptionError(
            "several keys of the compile cache begin so" if matching else "no such key",
            got=shown(prefix),
            expected=", ".join(each.name for each in matching or keys) or f"none in {directory}",
            advice="graphrt cache ls",
        )
    return matching[0]


def remove(keys: Iterable[StoredKey]) -> None:
    """Remove keys: gone at once for others, and what a killed removal left goes too."""
    for each in keys:
        root = each.directory.parent
        aside = root / f"{TEMP_PREFIX}{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.replace(each.directory, aside)
        for leftover in root.glob(f"{TEMP_PREFIX}*"):
            remove_tree(leftover)


def explain_miss(directory: Path, key: CacheKey) -> str:
    """What would have to be equal for a hit on the nearest entry of the directory."""
    stored = [each for each in stored_keys(directory) if each.key is not None and each.complete]
    differences = {each.name: key.differences(each.key) for each in stored if each.key is not None}
    if not differences:
        return f"{directory} holds nothing yet"
    name = min(differences, key=lambda each: len(differences[each]))
    lines = differences[name]
    if not lines:
        return f"{name} has no such rank"
    more = f" and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return f"{name} is nearest: {'; '.join(lines[:_MOST_SHOWN])}{more}"


def _is_key(path: Path) -> bool:
    return _KEY_NAME.fullmatch(path.name) is not None and path.is_dir()


def _stored_key(directory: Path) -> StoredKey:
    ranks = sorted(each for each in directory.glob(f"{_RANK_PREFIX}*") if each.is_dir())
    return StoredKey(
        directory.name,
        directory,
        _key(directory),
        tuple(_stored_rank(each, directory.name) for each in ranks),
    )


def _stored_rank(directory: Path, key_name: str) -> StoredRank:
    name = directory.name.removeprefix(_RANK_PREFIX)
    try:
        with opened(*_place(directory)) as place:
            manifest = read_manifest(place)
    except (DamagedError, OSError) as error:
        return StoredRank(name, directory, None, str(error))
    if manifest is not None and manifest.digest[:16] != key_name:
        return StoredRank(name, directory, None, f"made for another key, {manifest.digest[:16]}")
    return StoredRank(name, directory, manifest)


def _place(rank: Path) -> tuple[Path, str, str]:
    """For `opened`: the cache, and what of it a rank has."""
    return rank.parent.parent, rank.parent.name, rank.name


def _key(directory: Path) -> CacheKey | None:
    try:
        with opened(directory.parent, directory.name) as place:
            if place is None:
                return None
            text = read_file(place, KEY_FILE, MOST_TEXT_BYTES)
        key = CacheKey.from_groups(json.loads(text))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, GraphRTError):
        return None
    return key if key.digest.startswith(directory.name) else None


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        # Another process removes it at this moment.
        return 0
