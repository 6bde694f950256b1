"""Lists a directory of the compile cache, removes keys from it, and explains misses."""

from __future__ import annotations

import contextlib
import difflib
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
    ALL_LOADED,
    KEY_FILE,
    MOST_TEXT_BYTES,
    SUFFIX,
    TEMP_PREFIX,
    TEXT_SUFFIX,
    DamagedError,
    read_piece,
    remove_tree,
)
from graphrt.core.base.errors import GraphRTError, InvalidOptionError
from graphrt.core.base.option_values import shown

_KEY_NAME = re.compile(r"[0-9a-f]{16}")
_LEFTOVER_NAME = re.compile(re.escape(TEMP_PREFIX) + r"[0-9a-f]{12}")
_RANK_PREFIX = "rank_"


@dataclass(frozen=True)
class StoredKey:
    """All ranks of a key. `key` is None if its file cannot be read. `ranks` has the sizes of pieces
    by rank and name, in bytes."""

    name: str
    directory: Path
    key: CacheKey | None
    ranks: dict[str, dict[str, int]]

    @property
    def created_s(self) -> float:
        """When its last piece was written, in seconds since the epoch."""
        pieces = [*self.directory.glob(f"*/*{SUFFIX}")]
        return max(map(_changed_s, pieces or [self.directory]))

    @property
    def loaded_s(self) -> float:
        """When a start loaded all of its pieces, if that was the last start to use them; else 0."""
        return min(
            (
                _changed_s(self.directory / f"{_RANK_PREFIX}{rank}" / ALL_LOADED)
                for rank in self.ranks
            ),
            default=0.0,
        )

    @property
    def size_bytes(self) -> int:
        """Of everything in the directory."""
        return sum(_size_bytes(each) for each in self.directory.rglob("*"))

    @property
    def pieces(self) -> int:
        """Pieces of the rank that has most."""
        return max(map(len, self.ranks.values()), default=0)

    def damaged(self, rank: str) -> dict[str, str]:
        """Names of pieces that cannot be used, and why, after reading every file."""
        if self.key is None:
            return {}
        reasons = {}
        for name in self.ranks[rank]:
            try:
                with opened(self.directory.parent, self.name, _RANK_PREFIX + rank) as directory:
                    read_piece(directory, name, self.key.digest)
            except (DamagedError, OSError) as error:
                reasons[name] = str(error)
        return reasons


def stored_keys(directory: Path) -> list[StoredKey]:
    """The keys of a directory, the latest first; other files are left out."""
    if not directory.is_dir():
        return []
    keys = [_stored_key(each) for each in directory.iterdir() if _is_key(each)]
    return sorted(keys, key=lambda each: -each.created_s)


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
    """Remove keys, each in one step for other processes, and leftovers of killed removals beside
    them."""
    roots = set()
    for each in keys:
        roots.add(each.directory.parent)
        aside = each.directory.with_name(f"{TEMP_PREFIX}{uuid.uuid4().hex[:12]}")
        with contextlib.suppress(FileNotFoundError):
            os.replace(each.directory, aside)
    for root in roots:
        for leftover in root.glob(f"{TEMP_PREFIX}*"):
            if _LEFTOVER_NAME.fullmatch(leftover.name) and _holds_a_key(leftover, half_gone=True):
                remove_tree(leftover)


def explain_miss(directory: Path, key: CacheKey, *, but: str = "") -> list[str]:
    """The nearest key of the directory, other than `but`, and the differences from it."""
    stored = [each for each in stored_keys(directory) if each.pieces and each.name != but]
    differences = {each.name: key.differences(each.key) for each in stored if each.key is not None}
    if not differences:
        return [f"{directory} holds no other key"]
    name = min(differences, key=lambda each: len(differences[each]))
    return [f"{name} is nearest", *(differences[name] or ["it has no such rank"])]


def explain_pieces(stored: StoredKey, rank: str) -> list[str]:
    """The piece of a rank that was written last, the nearest other one of its kind, and the lines
    of their graphs that differ: two edits of a forward have one key, and pieces of their own."""
    texts: dict[str, list[str]] = {}
    with opened(stored.directory.parent, stored.name, _RANK_PREFIX + rank) as directory:
        if directory is None:
            return []
        for name in stored.ranks[rank]:
            with contextlib.suppress(OSError):
                text = read_file(directory, name + TEXT_SUFFIX, MOST_TEXT_BYTES)
                texts[name] = text.decode(errors="replace").splitlines()
    folder = stored.directory / (_RANK_PREFIX + rank)
    last = max(texts, key=lambda name: _changed_s(folder / (name + SUFFIX)), default="")
    # Beside a whole graph its start has written the pieces of it, which are no edit of it.
    others = [name for name in texts if name != last and _kind(name) == _kind(last)]
    lines = {name: _different(texts[name], texts[last]) for name in others}
    if not lines:
        return []
    name = min(lines, key=lambda each: len(lines[each]))
    return [f"{last} is the last piece that was written, {name} the nearest to it", *lines[name]]


def _kind(name: str) -> str:
    """Of a piece: "piece", "partitioned" or "whole"."""
    return name.partition("_")[0]


def _different(old: list[str], new: list[str]) -> list[str]:
    return list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]


def pieces_in(rank: Path) -> dict[str, int]:
    """The pieces of a rank by name, and their sizes in bytes."""
    return {each.name[: -len(SUFFIX)]: _size_bytes(each) for each in rank.glob(f"*{SUFFIX}")}


def _is_key(path: Path) -> bool:
    return _KEY_NAME.fullmatch(path.name) is not None and _holds_a_key(path)


def _holds_a_key(path: Path, *, half_gone: bool = False) -> bool:
    """Whether a directory, and no link to one, has what a key's directory has and nothing else: a
    folder of another program may have the name of a key. Of one that is `half_gone` all may be."""
    try:
        names = os.listdir(path)
    except OSError:
        return False  # a file, or gone by now, or of another user
    known = [n for n in names if n == KEY_FILE or n.startswith((_RANK_PREFIX, TEMP_PREFIX))]
    return not path.is_symlink() and known == names and (half_gone or bool(names))


def _stored_key(directory: Path) -> StoredKey:
    ranks = sorted(each for each in directory.glob(f"{_RANK_PREFIX}*") if each.is_dir())
    sizes = {each.name.removeprefix(_RANK_PREFIX): pieces_in(each) for each in ranks}
    return StoredKey(directory.name, directory, _key(directory), sizes)


def _key(directory: Path) -> CacheKey | None:
    try:
        with opened(directory.parent, directory.name) as opened_directory:
            if opened_directory is None:
                return None
            text = read_file(opened_directory, KEY_FILE, MOST_TEXT_BYTES)
        key = CacheKey.from_groups(json.loads(text))
        _check_texts(key)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, GraphRTError):
        return None
    return key if key.digest.startswith(directory.name) else None


def _check_texts(key: CacheKey) -> None:
    """Raise `TypeError` or `ValueError` for a key whose texts are something else, or cannot be
    printed: anybody may compute the digest of such a key."""
    groups = key.groups
    texts = [*groups["versions"].values(), groups["settings"].get("backend", "")]
    texts += [text for several in groups["called"].values() for text in several]
    "".join(texts)
    json.dumps(groups, ensure_ascii=False).encode()


def _changed_s(path: Path) -> float:
    try:
        # Of a link itself: a planted one may lead nowhere.
        return path.lstat().st_mtime
    except OSError:
        # Another process removes it at this moment.
        return 0.0


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        # Another process removes it at this moment.
        return 0
