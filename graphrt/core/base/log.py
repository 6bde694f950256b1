"""The library's log: `GRAPHRT_LOG=DEBUG` prints it."""

from __future__ import annotations

import logging
import os
import warnings

LOG_VARIABLE = "GRAPHRT_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

logger = logging.getLogger("graphrt")


def set_up_logging() -> None:
    """Print the library's log at the level of `GRAPHRT_LOG`; unset, the host's logging decides."""
    level = os.environ.get(LOG_VARIABLE, "").strip().upper()
    if not level:
        return
    if level not in LEVELS:
        # No error: it would be one of `import graphrt`.
        warnings.warn(
            f"{LOG_VARIABLE}={level!r} names no level of logging and is ignored; expected "
            f"{', '.join(LEVELS)}",
            stacklevel=3,
        )
        return
    logger.setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    # Without this a host that has set up logging prints every line twice.
    logger.propagate = False
