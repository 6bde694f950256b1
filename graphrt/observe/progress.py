"""A bar of a capture on the terminal, and nothing where there is none."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO

from graphrt.core.base.texts import counted, seconds_text
from graphrt.core.batch.descriptor import BatchDescriptor

_WIDTH = 24


class ProgressBar:
    """For `runner.capture(progress=ProgressBar())`: rewrites one line of a terminal before each
    graph, and ends it after the last."""

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
