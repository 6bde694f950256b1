"""The report of a process that serves vLLM, in a file.

With `GRAPHRT_VLLM_REPORT=run.json` each process saves its own to `run.PID.json` after its captures
and when it ends.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path

from graphrt import RunnerReport

FILE = "GRAPHRT_VLLM_REPORT"


def save(report: RunnerReport) -> Path | None:
    """Write a report to the file that the variable names, with the number of this process in its
    name: vLLM has several. None if there is no variable."""
    path = os.environ.get(FILE)
    if not path or not report.graphs:
        return None
    file = Path(path)
    file = file.with_name(f"{file.stem}.{os.getpid()}{file.suffix or '.json'}")
    report.save(file)
    return file


def save_at_end(make: Callable[[], RunnerReport]) -> None:
    """Save what `make` reports when this process ends, if the variable asks for it."""
    if os.environ.get(FILE):
        atexit.register(lambda: save(make()))
