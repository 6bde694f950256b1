"""What the compile cache tells: trouble is a warning, the rest is in the library's log."""

from __future__ import annotations

import warnings

from graphrt.core.base.homes import public


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
