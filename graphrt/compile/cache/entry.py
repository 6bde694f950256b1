"""One entry of the compile cache: the artifacts of a key and a rank."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import explain_miss
from graphrt.compile.cache.permissions import RefusedError, opened
from graphrt.compile.cache.store import (
    KEY_FILE,
    MANIFEST,
    Artifact,
    ArtifactRecord,
    DamagedError,
    Manifest,
    make_run_directory,
    publish_manifest,
    read_artifact,
    read_manifest,
    record_artifact,
    remove_tree,
    size_text,
    sweep,
    warn,
    write_atomic,
    write_synced,
)
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown

Payload = bytes | Callable[[Path], object]

_NAME = re.compile(r"\w[\w.\-]*")


@dataclass
class CacheFigures:
    """What one process had from its cache. A damaged artifact is a miss too."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    damaged: int = 0


class CacheEntry:
    """The artifacts of one key and rank, as they were when it was opened.

    What `store` takes is there for others after `complete`, all at once. Artifacts of one name are
    interchangeable: the first one is kept, unless it was found damaged.

    As a context manager it completes, or discards if the block raises. What cannot be written is a
    warning, after which the process goes on without storing. A directory that others may write, or
    that belongs to another user, is neither read nor written, which is a warning too.
    """

    def __init__(
        self,
        root: Path,
        key: CacheKey,
        *,
        rank: str,
        save_format: str,
        enabled: bool,
        figures: CacheFigures,
    ) -> None:
        self.key = key
        self._place = key.digest[:16], f"rank_{rank}"
        self.directory = root.joinpath(*self._place)
        self.save_format = save_format
        self._root = root
        self._figures = figures
        self._enabled = self._writable = enabled
        self._run: Path | None = None
        self._stored: dict[str, ArtifactRecord] = {}
        self._bad: set[str] = set()
        self._manifest = self._read() if enabled else None

    def __enter__(self) -> CacheEntry:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.complete()
        else:
            self.discard()

    @property
    def found(self) -> bool:
        """Whether there is a complete entry; single artifacts of it may still be damaged."""
        return self._manifest is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The artifacts of the complete entry."""
        return tuple(self._artifacts)

    def load(self, name: str) -> Artifact | None:
        """A file or directory as it was read and checked; None for a miss."""
        if not self._enabled:
            return None
        record = self._artifacts.get(name)
        if record is None:
            self._figures.misses += 1
            return None
        try:
            with opened(self._root, *self._place) as directory:
                loaded = read_artifact(directory, record)
        except (DamagedError, OSError) as error:
            self._figures.misses += 1
            self._bad.add(name)
            self._tell_damaged(f"{name} of {self.directory}", error)
            return None
        self._figures.hits += 1
        where = self.directory / record.path
        logger.debug("loaded %s (%s) from %s", name, size_text(record.size_bytes), where)
        return loaded

    def reject(self, name: str, why: object) -> None:
        """What `load` gave could not be used after all: a miss, which `store` then replaces."""
        self._figures.hits -= 1
        self._figures.misses += 1
        self._bad.add(name)
        self._tell_damaged(f"{name} of {self.directory}", why)

    def store(self, name: str, payload: Payload) -> None:
        """Take in an artifact: bytes, or what writes itself to the file or directory it is given.

        What the payload raises, other than `OSError`, is raised.
        """
        _check_name(name)
        if not self._writable:
            return
        path: Path | None = None
        try:
            path = self._run_directory() / name
            remove_tree(path)
            if isinstance(payload, bytes):
                write_synced(path, payload)
            else:
                payload(path)
            record = record_artifact(self.directory, path)
        except OSError as error:
            self._give_up(error)
            return
        except BaseException:  # an interrupt too leaves no artifact of which half is written
            if path is not None:
                remove_tree(path)
            self._stored.pop(name, None)
            raise
        self._stored[name] = record
        self._figures.stores += 1
        logger.debug("stored %s (%s) in %s", name, size_text(record.size_bytes), path)

    def write_text(self, name: str, text: str) -> None:
        """A file for people to read, such as "computation_graph.py"; the cache never reads it.

        Unlike an artifact it is there at once, so that a compilation that fails can be looked into.
        """
        _check_name(name)
        if not self._writable:
            return
        path = self.directory / name
        try:
            content = text.encode()
            # Of another size it is not read, whatever lies there.
            same = path.is_file() and path.stat().st_size == len(content)
            if not same or path.read_bytes() != content:
                self._run_directory()
                write_atomic(path, content)
                logger.debug("wrote %s", path)
        except OSError as error:
            self._give_up(error)

    def complete(self) -> bool:
        """Show others what was stored; False if nothing was, or another process was first."""
        run, self._run = self._run, None
        stored, self._stored = self._stored, {}
        if run is None:
            return False
        try:
            published = bool(stored) and self._publish(run, stored)
        except OSError as error:
            remove_tree(run)
            self._give_up(error)
            return False
        if not published:
            remove_tree(run)
            if stored:
                logger.debug("another process was first: %s stays as it is", self.directory)
        with contextlib.suppress(OSError):
            sweep(self.directory, self._manifest)
        return published

    def discard(self) -> None:
        """Forget what was stored and not completed."""
        if self._run is not None:
            remove_tree(self._run)
        self._run, self._stored = None, {}

    def explain_miss(self) -> str:
        """How this key differs from the nearest entry of the cache."""
        return explain_miss(self._root, self.key)

    @property
    def _artifacts(self) -> Mapping[str, ArtifactRecord]:
        return {} if self._manifest is None else self._manifest.artifacts

    def _read(self) -> Manifest | None:
        try:
            with opened(self._root, *self._place) as directory:
                manifest = read_manifest(directory, self.key.digest)
        except RefusedError as error:
            self._refuse(error)
            return None
        except (DamagedError, OSError) as error:
            self._tell_damaged(str(self.directory), error)
            return None
        if manifest is None and logger.isEnabledFor(logging.DEBUG):
            logger.debug("no entry %s: %s", self.directory, self.explain_miss())
        return manifest

    def _run_directory(self) -> Path:
        if self._run is None:
            self._run = make_run_directory(self._root, *self._place)
            write_atomic(self.directory.parent / KEY_FILE, self.key.to_json().encode())
        return self._run

    def _publish(self, run: Path, stored: Mapping[str, ArtifactRecord]) -> bool:
        """A name that is there already stays, but for one that was damaged and still is."""
        while True:
            try:
                with opened(self._root, *self._place) as directory:
                    current = read_manifest(directory, self.key.digest)
                there = current is not None
            except DamagedError:
                current, there = None, True
            theirs = {} if current is None else current.artifacts
            ours = {
                name: record
                for name, record in stored.items()
                if name not in theirs
                or (name in self._bad and theirs[name] == self._artifacts.get(name))
            }
            if not ours:
                self._manifest = current
                return False
            merged = Manifest(
                digest=self.key.digest,
                torch=str(self.key.groups["versions"].get("torch")),
                created_s=time.time(),
                artifacts={**theirs, **ours},
            )
            if publish_manifest(self.directory, run, merged, replace=there):
                self._manifest = merged
                self._bad.clear()
                return True

    def _tell_damaged(self, what: str, why: object) -> None:
        self._figures.damaged += 1
        warn(f"compiled code is not taken from the cache and is compiled again: {what}: {why}")

    def _refuse(self, error: RefusedError) -> None:
        self._enabled = self._writable = False
        warn(
            f"the compile cache is neither read nor written, as what it holds is run as code: "
            f"{error}, or set GRAPHRT_CACHE_DIR to a directory of your own"
        )

    def _give_up(self, error: OSError) -> None:
        self.discard()
        self._writable = False
        where = self.directory / MANIFEST
        warn(f"the compile cache cannot be written, and nothing is stored: {where}: {error}")


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None or name in (MANIFEST, KEY_FILE):
        raise InvalidOptionError(
            "a name in the compile cache is the name of a file",
            got=shown(name),
            expected="letters, digits, '_', '-' and '.'",
            advice="piece_0",
        )
