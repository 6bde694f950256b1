"""The compile cache: compiled pieces on disk, for the next start with the same code.

    <directory>/<key>/key.json            what the key was made of
    <directory>/<key>/rank_0/NAME.piece   a compiled piece, as one process wrote it
    <directory>/<key>/rank_0/NAME/        the same as files, with save_format="unpacked"
    <directory>/<key>/rank_0/*.py         the graph and the call around it

Only `key.json` and the pieces are read; the rest is for people. A piece is code that will be run,
so the directory must be trusted like the program itself: only this user and root may change what is
read (`permissions.py`), and what is loaded is a copy of the very bytes that were checked. The
checksums find damage; they are no signature.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import explain_miss, pieces_in
from graphrt.compile.cache.permissions import RefusedError, make_private, opened
from graphrt.compile.cache.store import (
    ALL_LOADED,
    KEY_FILE,
    SUFFIX,
    TEMP_PREFIX,
    DamagedError,
    pack,
    read_piece,
    remove_tree,
    sweep,
    warn,
    write_atomic,
)
from graphrt.compile.private_torch.inductor import SaveFormat
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import refused, shown
from graphrt.core.base.texts import size_text

DIRECTORY_VARIABLE = "GRAPHRT_CACHE_DIR"
DISABLE_VARIABLE = "GRAPHRT_DISABLE_COMPILE_CACHE"

_MOST_SHOWN = 8
"""So many differences are logged; `graphrt cache why` tells all."""
# Whether this process has missed a piece in any cache.
_has_missed = False
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}


class CacheEntry:
    """The compiled pieces of one key and rank.

    `directory` is by default `default_directory()`. Nothing is written before the first `store`.

    After a failed write, which is a warning, nothing more is stored. A directory that others may
    write, or that belongs to another user, is neither read nor written, which is a warning too.
    """

    def __init__(
        self,
        key: CacheKey,
        directory: str | Path | None = None,
        *,
        rank: int = 0,
        save_format: SaveFormat = "binary",
        enabled: bool = True,
    ) -> None:
        self.key = key
        self.save_format = save_format
        self._root = default_directory() if directory is None else _expanded(directory)
        # The entry's folders below the root.
        self._folders = key.digest[:16], f"rank_{rank}"
        self.directory = self._root.joinpath(*self._folders)
        # Whether this entry has made its directory.
        self._made = False
        self._readable = self._writable = enabled and not _is_disabled()
        self.had_pieces = self._readable and self._has_pieces()
        """Whether any piece was there when the entry was opened."""

    def load(self, name: str) -> bytes | None:
        """The archive of a piece, read and checked, for `unpack`; None for a miss."""
        if not self._readable:
            return None
        try:
            with opened(self._root, *self._folders) as directory:
                archive = read_piece(directory, name, self.key.digest)
        except (DamagedError, OSError) as error:
            self.reject(name, error)
            return None
        self._note(missed=archive is None)
        if archive is not None:
            logger.debug("loaded %s (%s) from %s", name, size_text(len(archive)), self.directory)
        return archive

    def reject(self, name: str, why: object) -> None:
        """Warn that a piece cannot be used; the next `store` of it replaces it."""
        self._note(missed=True)
        where = f"{name} of {self.directory}"
        warn(f"compiled code is not taken from the cache and is compiled again: {where}: {why}")

    def store(self, name: str, save: Callable[[Path], object]) -> None:
        """Keep a piece, which `save` writes to the directory that it is given.

        What `save` raises, other than `OSError`, is raised.
        """
        if not self._writable:
            return
        work = self.directory / f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}-{name}"
        try:
            self._make_directory()
            work.mkdir(mode=0o700)
            save(work)
            content = pack(name, self.key.digest, work)
            write_atomic(self.directory / (name + SUFFIX), content)
            logger.debug("stored %s (%s) in %s", name, size_text(len(content)), self.directory)
            if self.save_format == "unpacked":
                remove_tree(self.directory / name)
                with contextlib.suppress(OSError):  # another process has put its own there
                    work.rename(self.directory / name)
        except OSError as error:
            self._give_up(error)
        finally:
            remove_tree(work)

    def write_text(self, name: str, text: str) -> None:
        """A file for people to read, such as "computation_graph.py"; the cache never reads it."""
        if not self._writable:
            return
        path = self.directory / name
        try:
            content = text.encode()
            # A file of another size is not read, however large it is.
            same = path.is_file() and path.stat().st_size == len(content)
            if not same or path.read_bytes() != content:
                self._make_directory()
                write_atomic(path, content)
                logger.debug("wrote %s", path)
        except OSError as error:
            self._give_up(error)

    def _note(self, *, missed: bool) -> None:
        """Leave `ALL_LOADED` for `graphrt cache why`, as long as this process has missed nothing:
        one start may use several keys."""
        global _has_missed
        _has_missed |= missed
        if not self._writable:
            return
        mark = self.directory / ALL_LOADED
        try:
            if _has_missed:
                mark.unlink(missing_ok=True)
            else:
                mark.touch()
        except OSError as error:
            logger.debug("`graphrt cache why` will not tell of this start: %s", error)

    def _has_pieces(self) -> bool:
        try:
            with opened(self._root, *self._folders):
                pieces = bool(pieces_in(self.directory))
        except RefusedError as error:
            self._readable = self._writable = False
            warn(
                f"the compile cache is neither read nor written, as what it holds is run as code: "
                f"{error}, or set GRAPHRT_CACHE_DIR to a directory of your own"
            )
            return False
        except OSError as error:
            self.reject("all", error)
            return False
        if not pieces and logger.isEnabledFor(logging.DEBUG):
            nearest, *differences = explain_miss(self._root, self.key)
            why = ", ".join(differences[:_MOST_SHOWN])
            logger.debug("no entry %s: %s: %s", self.directory, nearest, why)
        return pieces

    def _make_directory(self) -> None:
        """Make the entry's directory, once; raises `OSError`, also if others may write it."""
        if not self._made:
            make_private(self.directory)
            with opened(self._root, *self._folders):
                write_atomic(self.directory.parent / KEY_FILE, self.key.to_json().encode())
            sweep(self.directory)
            self._made = True

    def _give_up(self, error: OSError) -> None:
        self._writable = False
        warn(
            f"the compile cache cannot be written, and nothing is stored: {self.directory}: {error}"
        )


def default_directory() -> Path:
    """`GRAPHRT_CACHE_DIR`, or graphrt/compile below the user's cache directory."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return _expanded(chosen)
    user = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(user) if os.path.isabs(user) else Path.home() / ".cache") / "graphrt" / "compile"


def _expanded(directory: str | Path) -> Path:
    """A folder, with `~` as the home of its user. Raises `InvalidOptionError` for one that no
    folder can be."""
    try:
        path = Path(directory).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise refused(
            "the folder of the compile cache cannot be used",
            str(directory),
            f"a path of this machine ({error})",
            f"{DIRECTORY_VARIABLE}=/a/folder/of/yours",
        ) from error
    return path


def _is_disabled() -> bool:
    text = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    if text not in _FLAGS:
        raise InvalidOptionError(
            f"{DISABLE_VARIABLE} has a wrong value",
            got=shown(text),
            expected="1 or 0",
            advice=f"{DISABLE_VARIABLE}=1",
        )
    return _FLAGS[text]
