"""Files of a bounded size, and files that no planted link leads elsewhere."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from graphrt.core.base.errors import GraphRTError, InvalidOptionError
from graphrt.core.base.option_values import shown


def read_bounded(path: Path, most_bytes: int) -> str:
    """The text of a regular file of at most `most_bytes` bytes.

    Raises `OSError` if the path is missing, or leads to a pipe or device: reading `/dev/zero`
    would not end. Raises `ValueError` if the file is larger, or not UTF-8.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content.decode("utf-8")


def write_whole(
    path: str | os.PathLike[str],
    text: str,
    *,
    what: str,
    error: type[GraphRTError] = InvalidOptionError,
) -> None:
    """Write text to a file, whole or not at all, and through no link.

    The text goes to a new file of a random name in the same folder, which then takes the place of
    `path`, with the rights of a file of ours that was there. Links in the folder's path are
    followed. Raises `error` if `path` is a link or no regular file, or cannot be written; `what`
    says what was to be written.
    """
    try:
        target = Path(path)
        status = None
        with suppress(FileNotFoundError):
            status = target.lstat()
        if status is not None and not stat.S_ISREG(status.st_mode):
            is_link = stat.S_ISLNK(status.st_mode)
            raise OSError(errno.EINVAL, "a link" if is_link else "no regular file")
        beside = target.with_name(f".graphrt-{secrets.token_hex(8)}")
        try:
            # "x" makes a file, or fails: a link that is there already is not followed.
            with beside.open("x", encoding="utf-8") as file:
                # Of another user's file the mode may be anything, such as one that runs as us.
                if status is not None and status.st_uid == os.geteuid():
                    os.chmod(file.fileno(), status.st_mode & 0o777)
                file.write(text)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as cause:
        raise error(
            f"{what} cannot be written",
            got=f"{shown(path)} ({cause})"[:500],
            expected="a path in a folder that may be written, of a regular file or of none",
            advice="another path, or make the folder before; a link is never written through",
        ) from cause
