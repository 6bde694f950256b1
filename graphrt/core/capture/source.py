"""Which line of the user's code issued an operator, or raised."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_GRAPHRT = Path(os.path.abspath(__file__)).parents[2]
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    # Not all of graphrt: the demo and the conformance suite are users of it.
    *(
        str(_GRAPHRT / part) + os.sep
        for part in ("core", "cpu", "cuda", "ascend", "accelerator", "compile")
    ),
    "<",
)


_generated: dict[str, Callable[[int], Source | None]] = {}


class Source(NamedTuple):
    """A line of code; its text is only read when it is printed."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.filename, self.line).strip()
        return f"{self.filename}:{self.line} in {self.function}: {code}"


def stands_for(filename: str, line_of: Callable[[int], Source | None]) -> Callable[[], None]:
    """Say which line of the user's code each line of generated code stands for, until what is
    returned is called."""
    _generated[filename] = line_of

    def forget() -> None:
        _generated.pop(filename, None)

    return forget


def user_source() -> Source | None:
    """The innermost frame outside torch and graphrt, or the line that generated code stands for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Watches ask at every operator, from deep inside of torch and graphrt.
        code = frame.f_code
        if _is_users(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, code.co_name)
        line_of = _generated.get(code.co_filename)
        source = None if line_of is None else line_of(frame.f_lineno)
        if source is not None:
            return source
        frame = frame.f_back
    return None


def source_of(error: BaseException) -> Source | None:
    """The innermost such frame that `error` came through."""
    source = None
    trace = error.__traceback__
    while trace is not None:
        code, line = trace.tb_frame.f_code, trace.tb_lineno
        if _is_users(code.co_filename):
            source = Source(code.co_filename, line, code.co_name)
        elif code.co_filename in _generated:
            source = _generated[code.co_filename](line) or source
        trace = trace.tb_next
    return source


@cache
def _is_users(filename: str) -> bool:
    # contextlib is between a capture and its body.
    return not filename.startswith(_NOT_THE_USERS) and filename != contextlib.__file__
