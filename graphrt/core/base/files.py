"""Files of a bounded size."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


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
