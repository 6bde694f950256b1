"""Lines of the forward in what Dynamo says."""

from __future__ import annotations

import re

from graphrt.core.capture.source import Source

_FRAME = re.compile(r'File "([^<].*)", line (\d+), in (.*)')


def innermost_line(stack: str) -> Source | None:
    """The last line of a stack as text; None where it has none of a file."""
    return next(reversed(lines_of(stack)), None)


def lines_of(stack: str) -> list[Source]:
    """The lines of files in a stack as text, the innermost last."""
    return [Source(file, int(line), function) for file, line, function in _FRAME.findall(stack)]
