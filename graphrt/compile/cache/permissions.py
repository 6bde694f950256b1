"""Reads the compile cache, and has a compiler use its own, only where nobody but its user and root
may write.

Every directory of the path, and the file, is opened relative to the descriptor of the one before.
It is checked and read by its own descriptor, so a file that is put in its place in between is never
read. The checks look at owners and mode bits, and not at the rights of this process: root has all.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40
"""In one path, as Linux has it."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_CAN_CHECK = os.open in os.supports_dir_fd
if _CAN_CHECK:
    # With O_PATH, which some systems lack, a directory of the path need not be readable.
    _WALK = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    # Opening a pipe would otherwise wait for its other end.
    _READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RefusedError(PermissionError):
    """Others may write a file or directory, or it is too large; never leaves the cache."""


def make_private(directory: Path) -> None:
    """Make a directory, with its missing parents, that only this user may enter."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def opened(root: Path, *below: str) -> Iterator[int | None]:
    """A descriptor of the directory `below` in `root`, which only this user and root may change;
    None if there is no such directory, and only they may make it.

    Links in the path of `root` are followed first, if nobody else can turn them (`resolved`), and
    their targets are checked; below `root` links are refused. Raises `RefusedError`, and other
    `OSError` where it cannot be opened.
    """
    if not _CAN_CHECK:
        raise RefusedError("this system does not tell who may write a directory that is open")
    real = resolved(root)
    names = (*real.parts[1:], *below)
    path = Path(real.anchor)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, _WALK)
        stack.callback(os.close, descriptor)
        _check_owner(os.fstat(descriptor), path, above=bool(names))
        for depth, name in enumerate(names):
            path /= name
            try:
                descriptor = _directory_in(descriptor, name, path)
            except (FileNotFoundError, NotADirectoryError):
                yield None
                return
            stack.callback(os.close, descriptor)
            _check_owner(os.fstat(descriptor), path, above=depth < len(names) - len(below) - 1)
        yield descriptor


def resolved(path: Path) -> Path:
    """The path without links. Raises `RefusedError` for a link that belongs to another user, or is
    in a directory where another user may replace it: once checked, it could lead elsewhere."""
    left = [*reversed(Path.cwd().joinpath(path).parts[1:])]
    real, links = Path(Path.cwd().anchor), 0
    while left:
        name = left.pop()
        if name == "..":
            real = real.parent
            continue
        each = real / name
        try:
            status = os.lstat(each)
        except (FileNotFoundError, NotADirectoryError):
            return each.joinpath(*reversed(left))
        if not stat.S_ISLNK(status.st_mode):
            real = each
            continue
        links += 1
        if links > _MOST_LINKS:
            raise RefusedError(f"{path} has more than {_MOST_LINKS} symbolic links")
        _check_user(status, each)
        for above in (real, *real.parents):
            _check_owner(os.lstat(above), above, above=True)
        target = Path(os.readlink(each))
        if target.is_absolute():
            real = Path(target.anchor)
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return real


def check_tree(root: Path, *, below: bool = True) -> None:
    """Raise `RefusedError`, and other `OSError`, unless only this user and root may change a
    directory, and with `below` everything in it. A missing one is made, for this user alone.

    For a compiler that reads and writes by path. Directories that it makes get the rights that the
    process gives: a group that may write them is refused too. Where nobody else may enter `root`,
    the rights of what is in it do not matter.
    """
    make_private(root)
    with opened(root) as top:
        if top is None:
            raise FileNotFoundError(f"{root} is gone")
        is_open = bool(os.fstat(top).st_mode & _OTHERS_ENTER)
        if is_open and _new_directories_are_shared():
            raise RefusedError(
                f"others may enter {root}, and write what this process makes there "
                f"(umask): chmod -R go-rwx {root}"
            )
        for path, directories, files, descriptor in os.fwalk(dir_fd=top) if below else ():
            for name in (*directories, *files):
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    each = root / path / name
                    if stat.S_ISLNK(status.st_mode):
                        raise RefusedError(f"{each} is a symbolic link")
                    if is_open:
                        _check_owner(status, each, above=False)
                    else:
                        _check_user(status, each)


def _new_directories_are_shared() -> bool:
    """Whether others may write the directories that this process makes. `os.umask` would tell by
    changing it, for other threads too."""
    with tempfile.TemporaryDirectory(prefix="graphrt-") as own:
        os.mkdir(probe := os.path.join(own, "probe"))
        return bool(os.stat(probe).st_mode & _OTHERS_WRITE)


def read_file(directory: int, name: str, most_bytes: int) -> bytes:
    """The content of a file in an opened directory, if only this user and root may change it, and
    it has at most `most_bytes`.

    Raises `RefusedError`, and another `OSError` if the file does not exist or cannot be read.
    """
    _refuse_link(directory, name, Path(name))
    file = os.open(name, _READ, dir_fd=directory)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"{name} is no file ({stat.filemode(status.st_mode)})")
        _check_owner(status, Path(name), above=False)
        if status.st_size > most_bytes:
            raise RefusedError(
                f"{name} has {status.st_size} bytes, expected are at most {most_bytes}"
            )
        return _read(file, status.st_size)
    finally:
        os.close(file)


def _directory_in(directory: int, name: str, path: Path) -> int:
    _refuse_link(directory, name, path)
    return os.open(name, _WALK, dir_fd=directory)


def _refuse_link(directory: int, name: str, path: Path) -> None:
    """For the message: `open` refuses links too."""
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise RefusedError(f"{path} is a symbolic link")


def _read(file: int, size: int) -> bytes:
    """The content, up to the checked size even if the file has grown since; 16 MiB at a time."""
    parts = []
    while size > 0:
        part = os.read(file, min(size, 1 << 24))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _check_owner(status: os.stat_result, path: Path, *, above: bool) -> None:
    """Raise `RefusedError` if another user owns it or may write it.

    In a sticky directory `above` the cache, such as /tmp, others may make files of their own: they
    can neither rename nor replace ours, and everything below is checked itself.
    """
    _check_user(status, path)
    if status.st_mode & _OTHERS_WRITE and not (above and status.st_mode & stat.S_ISVTX):
        raise RefusedError(
            f"{path} may be written by others ({stat.filemode(status.st_mode)}): chmod go-w {path}"
        )


def _check_user(status: os.stat_result, path: Path) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise RefusedError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()} or root")
