"""Which line of the user's code issued an operator."""

from __future__ import annotations

import linecache
import os
import sys
from typing import NamedTuple

import torch

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__))
)


class Source(NamedTuple):
    """A line of code; its text is only read when it is printed."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.filename, self.line).strip()
        return f"{self.filename}:{self.line} in {self.function}: {code}"


def user_source() -> Source | None:
    """The innermost frame outside torch and graphrt."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARIES) and not filename.startswith("<"):
            return Source(filename, frame.f_lineno, frame.f_code.co_name)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
