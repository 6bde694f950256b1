"""Who may write the compile cache: nobody but its user."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from graphrt.compile.cache.log import warn

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path) -> None:
    """Make a directory, with its missing parents, that only this user may enter."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def warn_if_writable_by_others(directory: Path) -> None:
    """An entry is code that will run: who may write it may run anything as this user."""
    if os.name == "nt":  # pragma: no cover - other permissions
        return
    try:
        found = directory.stat()
    except OSError:
        return
    if found.st_uid not in (os.geteuid(), 0):
        _warn_once(directory, f"belongs to user {found.st_uid}")
    elif found.st_mode & _OTHERS_WRITE:
        _warn_once(directory, f"may be written by others ({stat.filemode(found.st_mode)})")


@cache
def _warn_once(directory: Path, why: str) -> None:
    warn(
        f"the compile cache {directory} {why}, and what it holds is run as code: "
        f"chmod go-w {directory}, or set GRAPHRT_CACHE_DIR to a directory of your own"
    )
