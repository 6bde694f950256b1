"""SGLang's graphs, by graphrt: `GRAPHRT_SGLANG=1` and nothing else. See `docs/how-to/sglang.md`.

SGLang loads `install` by its entry point in each process of an engine: nothing of SGLang is
imported with this package, and without the variable not at all.
"""

from __future__ import annotations

from graphrt import RunnerReport
from graphrt.hosts.sglang._state import state
from graphrt.hosts.sglang.installing import install, uninstall

__all__ = ["install", "report", "uninstall"]


def report() -> RunnerReport:
    """The graphs that SGLang has captured in this process, with their steps, seconds and bytes, and
    how many steps ran eagerly."""
    return state.report()
