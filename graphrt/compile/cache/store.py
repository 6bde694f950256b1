"""Files of the compile cache: atomic writes, checksums, the manifest of an entry.

A manifest is the only thing that makes artifacts part of an entry, and it appears in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from graphrt.compile.cache.permissions import (
    make_private,
    opened,
    read_file,
    without_write_of_others,
)
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public

MAGIC = "graphrt compile cache"
FORMAT = 1
MANIFEST = "manifest.json"
KEY_FILE = "key.json"
RUN_PREFIX = "run-"
TEMP_PREFIX = ".tmp-"
MOST_TEXT_BYTES = 16 << 20
"""Of a manifest or a key, before it is read."""
MOST_ARTIFACT_BYTES = 1 << 30
"""Of all files of an artifact, before one of them is read."""
ABANDONED_S = 24 * 3600.0
"""What no manifest names is removed after that long; no writer pauses for a day."""


class DamagedError(Exception):
    """What is on disk is not what was written; never leaves the cache."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class ArtifactRecord:
    """A compiled piece: a file, or the files of a directory. Paths are relative to the entry."""

    path: str
    directory: bool
    files: tuple[FileRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files)


@dataclass(frozen=True)
class Artifact:
    """What was read of an artifact, and nothing else of it: its files by their paths below it, or
    the content of the one file that it is."""

    content: bytes | Mapping[str, bytes]

    def write(self, path: Path) -> Path:
        """Write it to `path`, which is returned, in a directory of this process's own.

        Raises `OSError`, also where others may write that directory.
        """
        with opened(path.parent) as place:
            if place is None:
                raise FileNotFoundError(f"{path.parent} is gone")
        if isinstance(self.content, bytes):
            write_private(path, self.content)
            return path
        path.mkdir(mode=0o700)
        for name, content in self.content.items():
            file = path / name
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, content)
        return path


@dataclass(frozen=True)
class Manifest:
    """What belongs to an entry. `digest` is that of its key, so that it fits no other one."""

    digest: str
    torch: str
    created_s: float
    artifacts: Mapping[str, ArtifactRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """For `from_bytes`, with a checksum of its own."""
        entry = asdict(self)
        wrapped = {"magic": MAGIC, "format": FORMAT, "sha256": _checksum(entry), "entry": entry}
        return (json.dumps(wrapped, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Raises `DamagedError` for anything but what `to_bytes` gave."""
        try:
            wrapped = json.loads(content)
            if wrapped["magic"] != MAGIC:
                raise DamagedError("it is not a manifest of graphrt")
            if wrapped["format"] != FORMAT:
                raise DamagedError(f"its format is {wrapped['format']}, not {FORMAT}")
            entry = wrapped["entry"]
            if _checksum(entry) != wrapped["sha256"]:
                raise DamagedError("the checksum of its manifest is wrong")
            artifacts = {name: _record(each) for name, each in entry.pop("artifacts").items()}
            return cls(artifacts=artifacts, **entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"its manifest cannot be read ({error})") from error


def read_manifest(directory: int | None, digest: str | None = None) -> Manifest | None:
    """None if there is none; raises `DamagedError`, also for the manifest of another key.

    `directory` is what `opened` gave for an entry.
    """
    if directory is None:
        return None
    try:
        content = read_file(directory, MANIFEST, MOST_TEXT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"its manifest cannot be read ({error})") from error
    manifest = Manifest.from_bytes(content)
    if digest is not None and manifest.digest != digest:
        raise DamagedError(
            f"it was made for another key, {manifest.digest[:16]} (torch {manifest.torch})"
        )
    return manifest


def publish_manifest(directory: Path, run: Path, manifest: Manifest, *, replace: bool) -> bool:
    """Make the manifest that of the entry; False if there was one and `replace` is off."""
    temporary, target = run / MANIFEST, directory / MANIFEST
    write_synced(temporary, manifest.to_bytes())
    if not replace:
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here; then the last of several writers wins.
            replace = True
    if replace:
        os.replace(temporary, target)
    with contextlib.suppress(OSError):
        # It is published either way.
        temporary.unlink(missing_ok=True)
        sync_directory(directory)
    return True


# Checksums ------------------------------------------------------------------------------------


def record_artifact(directory: Path, path: Path) -> ArtifactRecord:
    """Force an artifact to disk, and say what it is."""
    whole = path.is_dir()
    found = list(_files_below(path))
    size_bytes = sum(each.stat().st_size for each in found)
    if size_bytes > MOST_ARTIFACT_BYTES:
        raise InvalidOptionError(
            "an artifact is too large for the compile cache",
            got=f"{path.name} of {size_text(size_bytes)}",
            expected=f"at most {size_text(MOST_ARTIFACT_BYTES)}",
            advice="let large constants be weights or inputs of the compiled module",
        )
    files = [_recorded(directory, each) for each in found]
    if whole:
        for each in [*(below for below in path.rglob("*") if below.is_dir()), path]:
            without_write_of_others(each)
            sync_directory(each)
    return ArtifactRecord(_relative(directory, path), whole, tuple(files))


def read_artifact(directory: int | None, record: ArtifactRecord) -> Artifact:
    """What is below an opened entry; raises `DamagedError` if a byte of it changed, if others may
    change it, or if it is too large.

    Files that were added to a directory are no part of it.
    """
    if record.size_bytes > MOST_ARTIFACT_BYTES:
        most = size_text(MOST_ARTIFACT_BYTES)
        raise DamagedError(f"{record.path} has {size_text(record.size_bytes)}, at most {most} are")
    if directory is None:
        raise DamagedError("the entry is gone")
    top = _inside(record.path)
    read = {}
    for each in record.files:
        path = _inside(each.path)
        if not path.is_relative_to(top):
            raise DamagedError(f"it names a file outside of it, {each.path}")
        read[path.relative_to(top).as_posix()] = _read_verified(directory, each)
    return Artifact(read if record.directory else read["."])


def _read_verified(directory: int, record: FileRecord) -> bytes:
    try:
        content = read_file(directory, record.path, record.size_bytes)
    except OSError as error:
        raise DamagedError(f"{record.path} cannot be read ({error})") from error
    if len(content) != record.size_bytes:
        was = f"{len(content)} bytes, written were {record.size_bytes}"
        raise DamagedError(f"{record.path} has {was}")
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise DamagedError(f"the checksum of {record.path} is wrong")
    return content


def _recorded(directory: Path, path: Path) -> FileRecord:
    without_write_of_others(path)
    content = path.read_bytes()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(_relative(directory, path), len(content), hashlib.sha256(content).hexdigest())


def _files_below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())
    else:
        yield path


def _relative(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _inside(relative: str) -> PurePosixPath:
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise DamagedError(f"it names a file outside of it, {relative}")
    return path


def _checksum(entry: object) -> str:
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _record(plain: dict[str, object]) -> ArtifactRecord:
    files = plain.pop("files")
    if not isinstance(files, list):
        raise TypeError("the files of an artifact are no list")
    record = ArtifactRecord(files=tuple(FileRecord(**each) for each in files), **plain)  # type: ignore[arg-type]
    for each in record.files:
        if type(each.size_bytes) is not int or each.size_bytes < 0:
            raise ValueError(f"a file of {each.size_bytes!r} bytes")
    if not record.directory and len(record.files) != 1:
        raise ValueError(f"{len(record.files)} files where there is one")
    return record


# Writing --------------------------------------------------------------------------------------


def write_synced(path: Path, content: bytes) -> None:
    """Write a file of one's own, and force it to disk."""
    write_private(path, content, synced=True)


def write_private(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Write a file that others may not write, whatever the umask of the process says."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that others may read or write at the same time: they see all of one content."""
    temporary = path.with_name(f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk, where the system can."""
    if os.name == "nt":  # pragma: no cover - a directory cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_run_directory(root: Path, *entry: str) -> Path:
    """A directory of this writer alone, inside of an entry; raises `OSError`, also where others may
    write the entry."""
    directory = root.joinpath(*entry)
    make_private(directory)
    with opened(root, *entry):
        pass
    run = directory / f"{RUN_PREFIX}{uuid.uuid4().hex[:12]}"
    run.mkdir(mode=0o700)
    return run


def sweep(directory: Path, manifest: Manifest | None, *, now_s: float | None = None) -> None:
    """Remove what killed writers left, once it is old; what the manifest names stays."""
    kept = set() if manifest is None else {_run_of(each) for each in manifest.artifacts.values()}
    now_s = time.time() if now_s is None else now_s
    for path in list(directory.iterdir()):
        ours = path.name.startswith((RUN_PREFIX, TEMP_PREFIX))
        if ours and path.name not in kept and now_s - _modified_s(path) > ABANDONED_S:
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a file or directory that may be half gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _run_of(record: ArtifactRecord) -> str:
    return PurePosixPath(record.path).parts[0]


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        # Another process removes it at this moment.
        return float("inf")


@public("graphrt.compile")
class CompileCacheWarning(UserWarning):
    """An entry is not used, could not be written, or lies where others may write."""


def warn(message: str) -> None:
    """The cache goes on without what the message is about."""
    warnings.warn(message, CompileCacheWarning, stacklevel=3)


def size_text(size_bytes: int) -> str:
    """12345 as "12.1 KiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
