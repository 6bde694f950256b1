"""Lines of the forward in what Dynamo says."""

from __future__ import annotations

import re

from graphrt.core.capture import Source

_FRAME = re.compile(r'File "([^<].*)", line (\d+), in (.*)')


def innermost_line(stack: str) -> Source | None:
    """The last line of a stack as text; None where it has none of a file."""
    frames = _FRAME.findall(stack)
    if not frames:
        return None
    file, line, function = frames[-1]
    return Source(file, int(line), function)
