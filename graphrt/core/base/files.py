"""Files of a bounded size."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def read_bounded(path: Path, most_bytes: int) -> str:
    """The text of a file of at most so many bytes; raises `OSError` where there is none, or what is
    there is no file (a pipe, a device without an end), and `ValueError` for one that is larger or
    no UTF-8."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content.decode("utf-8")
