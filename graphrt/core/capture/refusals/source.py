"""Which line of the user's code issued an operator, or raised."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_GRAPHRT = Path(os.path.abspath(__file__)).parents[3]
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    # Not all of graphrt: the demo and the conformance suite are users of it.
    *(
        str(_GRAPHRT / part) + os.sep
        for part in ("core", "cpu", "cuda", "ascend", "accelerator", "compile")
    ),
    "<",
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
        if _is_users(filename):
            return Source(filename, frame.f_lineno, frame.f_code.co_name)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def source_of(error: BaseException) -> Source | None:
    """The innermost frame outside torch and graphrt that `error` came through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            found = Source(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


@cache
def _is_users(filename: str) -> bool:
    # contextlib is between a capture and its body.
    return not filename.startswith(_NOT_THE_USERS) and filename != contextlib.__file__
