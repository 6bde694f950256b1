"""Raising `KeyboardInterrupt` inside of graphrt, at a chosen place or at a chosen time."""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import graphrt

_GRAPHRT = str(Path(graphrt.__file__).parent)

# Where CPython looks for signals: as a function is entered, after a call, at the end of a loop.
_CHECKED_BEFORE = ("CALL", "RESUME", "JUMP_BACKWARD")


class Places:
    """Counts the places in graphrt where a Ctrl-C could be noticed, and raises at the n-th.

    With `lines` these are all lines, also most of those where CPython does not look for signals.
    """

    def __init__(self, at: int = -1, *, lines: bool = False) -> None:
        self.at = at
        self.seen = 0
        self.where = ""
        self._lines = lines

    def __call__(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_GRAPHRT):
            return None
        if not self._lines:
            frame.f_trace_lines = False
            frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, at = frame.f_code, frame.f_lasti
        if (
            at in _checked(code)
            if event == "opcode"
            else event == "line" and at not in _never(code)
        ):
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self.seen += 1
                raise KeyboardInterrupt(self.where)
            self.seen += 1
        return self._trace


@functools.cache
def _checked(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that come after CPython has looked for signals."""
    offsets, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(_CHECKED_BEFORE):
            offsets.add(instruction.offset)
        before = instruction.opname
    return frozenset(offsets)


@functools.cache
def _never(code: CodeType) -> frozenset[int]:
    """Offsets of lines at which nothing can be raised: the word `try`, which no handler covers, and
    where a `with` is left, which of a lock is one instruction: `__exit__` is given three None."""
    instructions = list(dis.get_instructions(code))
    left = {each.offset for each in instructions if each.opname == "NOP"}
    for place, first in enumerate(instructions[:-2]):
        if all(_loads_none(each) for each in instructions[place : place + 3]):
            # A result that is returned lies on top of `__exit__`.
            before = instructions[place - 1]
            left |= {first.offset, before.offset if before.opname == "SWAP" else first.offset}
    return frozenset(left)


def _loads_none(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and instruction.argval is None


def after_seconds(seconds: float, function: Callable[[], Any]) -> Any:
    """Call `function` and interrupt it by a signal after so many seconds."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return function()
    finally:
        # One that comes just now is as good as one that came before.
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
