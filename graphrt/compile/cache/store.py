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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from graphrt.compile.cache.permissions import make_private

MAGIC = "graphrt compile cache"
FORMAT = 1
MANIFEST = "manifest.json"
KEY_FILE = "key.json"
RUN_PREFIX = "run-"
TEMP_PREFIX = ".tmp-"
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"its manifest cannot be read ({error})") from error


def read_manifest(directory: Path, digest: str | None = None) -> Manifest | None:
    """None if there is none; raises `DamagedError`, also for the manifest of another key."""
    try:
        content = (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
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
    files = [_recorded(directory, each) for each in _files_below(path)]
    if whole:
        for each in [*(below for below in path.rglob("*") if below.is_dir()), path]:
            sync_directory(each)
    return ArtifactRecord(_relative(directory, path), whole, tuple(files))


def verify_artifact(directory: Path, record: ArtifactRecord) -> Path:
    """The artifact's path; raises `DamagedError` if a byte of it changed.

    Files that were added to a directory are no damage: the compiler keeps what it built there.
    """
    for each in record.files:
        read_verified(directory, each)
    return _inside(directory, record.path)


def read_verified(directory: Path, record: FileRecord) -> bytes:
    """A file's content; raises `DamagedError` if it is not what was written."""
    try:
        content = _inside(directory, record.path).read_bytes()
    except OSError as error:
        raise DamagedError(f"{record.path} cannot be read ({error.strerror})") from error
    if len(content) != record.size_bytes:
        was = f"{len(content)} bytes, written were {record.size_bytes}"
        raise DamagedError(f"{record.path} has {was}")
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise DamagedError(f"the checksum of {record.path} is wrong")
    return content


def _recorded(directory: Path, path: Path) -> FileRecord:
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


def _inside(directory: Path, relative: str) -> Path:
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise DamagedError(f"it names a file outside of it, {relative}")
    return directory / path


def _checksum(entry: object) -> str:
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _record(plain: dict[str, object]) -> ArtifactRecord:
    files = plain.pop("files")
    assert isinstance(files, list)
    return ArtifactRecord(files=tuple(FileRecord(**each) for each in files), **plain)  # type: ignore[arg-type]


# Writing --------------------------------------------------------------------------------------


def write_synced(path: Path, content: bytes) -> None:
    """Write a file of one's own, and force it to disk."""
    with path.open("wb") as file:
        file.write(content)
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


def make_run_directory(directory: Path) -> Path:
    """A directory of this writer alone, inside the entry."""
    make_private(directory)
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
