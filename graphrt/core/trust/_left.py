"""Tensors of graphs that a forward leaves in Python, where no replay makes new ones."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.core.base._warnings import StaleTensorWarning, warn_caller
from graphrt.core.base.errors import PythonStateError

_TOLD = 8
"""Of so many the paths are told."""


def say_what_is_left(paths: Sequence[str], *, each_warmed_up: bool) -> None:
    """Warn of tensors that lie in graph memory and that the forward's Python side holds; raise
    `PythonStateError` where some size was captured without a warm-up: one of them may be a table
    that was built there, which eager steps would read."""
    told = ", ".join(paths[:_TOLD])
    if len(paths) > _TOLD:
        told += f" and {len(paths) - _TOLD} more"
    if not each_warmed_up:
        raise PythonStateError(
            "the capture of a size that was not warmed up has left tensors in Python that lie in "
            "the memory of its graph: eager steps may read them, and other graphs write there",
            got=told,
            expected="nothing that a forward makes and keeps",
            advice="build tables before the capture, return what the host reads, or leave "
            "warm_up_each=False out",
        )
    error = PythonStateError(
        "the forward leaves tensors of its graphs in Python: no replay makes new ones, and steps "
        "write in their memory",
        got=told,
        expected="results that are returned, or written in place",
        advice="return them, copy_() them into a tensor that is there before capture(), or leave "
        "clones of them in an @eager_break",
    )
    warn_caller(str(error), StaleTensorWarning)
