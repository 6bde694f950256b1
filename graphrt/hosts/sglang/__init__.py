"""SGLang's graphs, by graphrt: `GRAPHRT_SGLANG=1` and nothing else. See `docs/how-to/sglang.md`.

SGLang loads `install` by its entry point in each process of an engine: nothing of SGLang is
imported with this package, and without the variable not at all.
"""

from __future__ import annotations

from graphrt import RunnerReport
from graphrt.hosts.sglang._state import state
from graphrt.hosts.sglang.installing import asked, install_into_sglang, uninstall

__all__ = ["install", "report", "uninstall"]


def install() -> None:
    """Let graphrt capture and replay what SGLang's Full and Breakable backends capture, in this
    process, if GRAPHRT_SGLANG=1.

    (Entry point of `sglang.srt.plugins`; called again it changes nothing.) Raises
    `UnsupportedHostError` for an SGLang of another version, or one without the names that graphrt
    replaces: nothing is replaced then, and SGLang, which logs the error, keeps its own graphs.
    """
    if asked():
        install_into_sglang()


def report() -> RunnerReport:
    """The graphs that SGLang has captured in this process, with their steps, seconds and bytes, and
    how many steps ran eagerly."""
    return state.report()
