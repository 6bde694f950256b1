"""`capture(progress=True)`: a bar on the terminal, and nothing where there is none."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO

from graphrt.core.base.option_values import check_takes
from graphrt.core.base.texts import counted, seconds_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.runner.capture_session import Progress

_WIDTH = 24


class ProgressBar:
    """Rewrites one line of a terminal before each graph, and ends it after the last."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = perf_counter()
        self._written = 0

    def __call__(self, done: int, total: int, descriptor: BatchDescriptor, more: str = "") -> None:
        """`more` is what somebody else knows of the capture."""
        took = seconds_text(perf_counter() - self._began) + (f", {more}" if more else "")
        line, end = f"captured {counted(total, 'graph')} in {took}", "\n"
        if done < total:
            bar = "#" * (_WIDTH * done // total)
            line, end = f"[{bar:.<{_WIDTH}}] {done}/{total}, next: {descriptor}, {took}", ""
        # What a longer line before it has left is written over.
        self._stream.write(f"\r{line:<{self._written}}{end}")
        self._stream.flush()
        self._written = len(line)


def progress_of(progress: Progress | bool | None) -> Progress | None:
    """What to tell of each graph: True is a bar, on a terminal alone. Raises
    `InvalidOptionError` for what cannot be called."""
    if progress is True:
        return ProgressBar(sys.stderr) if sys.stderr.isatty() else None
    if progress is False:
        return None
    check_takes("progress", progress, "progress(done, total, descriptor)", optional=True)
    return progress
