"""Files of the compile cache: a compiled piece is one file, which appears in one step.

A file is a line of text, then a zip archive of what the compiler saved. The line has the key and
the name that the piece was made for and a checksum of the archive, which tells damage. No reader
sees half a file: a writer writes another one and renames it. Two writers of one piece write code
that does the same, so the last one wins and nothing is locked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import time
import uuid
import warnings
import zipfile
from pathlib import Path

from graphrt.compile.cache.permissions import opened, read_file
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.texts import printable, size_text

MAGIC = "graphrt compile cache 2"
KEY_FILE = "key.json"
SUFFIX = ".piece"
TEXT_SUFFIX = ".txt"
"""Of the graph of a piece, which only people and `graphrt cache why` read."""
ALL_LOADED = "all_loaded"
"""An empty file beside the pieces: the last start that used them compiled none."""
TEMP_PREFIX = ".tmp-"
MOST_TEXT_BYTES = 16 << 20
"""Largest `key.json` that is read."""
MOST_PIECE_BYTES = 1 << 30
"""Largest piece that is read or written."""
ABANDONED_S = 24 * 3600.0
"""Temporary files are removed after that long; no writer pauses for a day."""


class DamagedError(Exception):
    """A file has other content than was written; never leaves the cache."""


def pack(name: str, key: str, directory: Path) -> bytes:
    """The content of the file of a piece, whose code was saved to `directory`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", strict_timestamps=False) as file:
        for each in sorted(directory.rglob("*")):
            if each.is_file():
                file.write(each, each.relative_to(directory).as_posix())
    body = archive.getvalue()
    if len(body) > MOST_PIECE_BYTES:
        raise InvalidOptionError(
            "a compiled piece is too large for the compile cache",
            got=f"{name} of {size_text(len(body))}",
            expected=f"at most {size_text(MOST_PIECE_BYTES)}",
            advice="let large constants be weights or inputs of the compiled module",
        )
    return _first_line(name, key, body) + body


def read_piece(directory: int | None, name: str, key: str) -> bytes | None:
    """The archive of a piece; None if there is none.

    `directory` is what `opened` gave for an entry. Raises `DamagedError` if it is not what `pack`
    made for this name and key, if others may change it, or if it is too large.
    """
    if directory is None:
        return None
    try:
        # 1024 bytes more have room for the first line.
        content = read_file(directory, name + SUFFIX, MOST_PIECE_BYTES + 1024)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error})") from error
    line, _, body = content.partition(b"\n")
    if line + b"\n" == _first_line(name, key, body):
        return body
    magic, _, rest = line.decode(errors="replace").rpartition(" ")[0].partition(": ")
    if magic != MAGIC:
        raise DamagedError(f"{name} is no piece of this version of graphrt")
    if rest != f"{key} {name}":
        raise DamagedError(f"{name} was made for another key or piece, {rest}")
    raise DamagedError(f"the checksum of {name} is wrong")


def unpack(archive: bytes, directory: Path) -> None:
    """Unpack a piece to a new `directory`, whose parent belongs to this process.

    Raises `OSError`, also where others may write there.
    """
    with opened(directory.parent) as parent:
        if parent is None:
            raise FileNotFoundError(f"{directory.parent} is gone")
    directory.mkdir(mode=0o700)
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        file.extractall(directory)


def _first_line(name: str, key: str, body: bytes) -> bytes:
    line = f"{MAGIC}: {key} {name} {hashlib.sha256(body).hexdigest()}\n"
    # A file of somebody else may have any bytes as its name.
    return line.encode(errors="surrogateescape")


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that others may read or write at the same time: they see all of one content.
    Only this user may write it, whatever the umask of the process says."""
    temporary = path.with_name(f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(directory: Path) -> None:
    """Remove leftovers of killed writers, once they are old."""
    for path in directory.glob(f"{TEMP_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it at this moment
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a file or directory that may be half gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


class CompileCacheWarning(UserWarning):
    """An entry is not used, could not be written, or is where others may write."""


def warn(message: str) -> None:
    """Warn about a piece or a directory; the process goes on without it."""
    warnings.warn(printable(message), CompileCacheWarning, stacklevel=3)
