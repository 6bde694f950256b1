"""What the compile cache tells: `GRAPHRT_LOG=DEBUG` prints it, trouble is a warning."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping

from graphrt.core.errors import InvalidOptionError

LOG_VARIABLE = "GRAPHRT_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

logger = logging.getLogger("graphrt")


class CompileCacheWarning(UserWarning):
    """An entry is not used, could not be written, or lies where others may write."""


def warn(message: str) -> None:
    """The cache goes on without what the message is about."""
    warnings.warn(message, CompileCacheWarning, stacklevel=3)


def set_up_logging(environ: Mapping[str, str] | None = None) -> None:
    """Print the library's log at the level of `GRAPHRT_LOG`; unset, the host's logging decides."""
    level = (os.environ if environ is None else environ).get(LOG_VARIABLE, "").strip().upper()
    if not level:
        return
    if level not in LEVELS:
        raise InvalidOptionError(
            f"{LOG_VARIABLE} names no level of logging",
            got=repr(level),
            expected=", ".join(LEVELS),
            advice=f"{LOG_VARIABLE}=DEBUG",
        )
    logger.setLevel(level)
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        # Else a host that has set up logging would print every line twice.
        logger.propagate = False


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """The one that `GRAPHRT_LOG` sets up, on stderr."""


def size_text(size_bytes: int) -> str:
    """12345 as "12.1 KiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
