"""What is told of a capture: a function of the host, or a bar on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import TextIO

from graphrt.core.base.option_values import check_takes
from graphrt.core.base.texts import counted, seconds_text
from graphrt.core.batch.descriptor import BatchDescriptor

Progress = Callable[[int, int, BatchDescriptor], None]
"""Told how many graphs are done, of how many, and which one comes next (at the end: the last)."""

_WIDTH = 24


class ProgressBar:
    """Rewrites one line of a terminal before each graph, and ends it after the last."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """The bar is written to `stream`, by default to stderr where that is a terminal."""
        if stream is None and sys.stderr.isatty():
            stream = sys.stderr
        self._stream = stream
        self._began = perf_counter()
        self._written = 0

    def __call__(self, done: int, total: int, descriptor: BatchDescriptor, more: str = "") -> None:
        """See `graphrt.GraphRunner.capture`; `more` is what somebody else knows of the capture."""
        if self._stream is None:
            return
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
    """What is called for `capture(progress=)`. Raises `InvalidOptionError`."""
    if progress is None or isinstance(progress, bool):
        return ProgressBar() if progress else None
    check_takes("progress", progress, "progress(done, total, descriptor)")
    return progress
