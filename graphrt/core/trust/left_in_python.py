"""Tensors of graphs that a forward leaves in Python, where no replay makes new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from graphrt.core.base._warnings import StaleTensorWarning, warn_caller
from graphrt.core.base.errors import PythonStateError
from graphrt.core.trust.places.slots import Place
from graphrt.core.trust.watching.watch import storage_key

_TOLD = 8
"""Of so many the paths are told."""


class LeftInPython:
    """The paths of tensors that lie in graph memory and were not there before the session."""

    def __init__(self, is_in_graphs: Callable[[torch.Tensor], bool], *, each_warmed_up: bool):
        self._is_in_graphs = is_in_graphs
        self._each_warmed_up = each_warmed_up
        self.before: set[int] = set()
        """The memory that the forward has reached before."""
        self.of_weights: set[str] = set()
        """Where a run has put a tensor that it computed without its inputs, as hooks that normalize
        a weight do at every call."""
        self._paths: list[str] = []

    def note(self, found: Iterable[tuple[Place, torch.Tensor]]) -> None:
        """Look at what the forward reaches now."""
        for place, tensor in found:
            key = storage_key(tensor)
            is_news = key is not None and key not in self.before
            # What was refused once is, though it was taken back.
            if is_news and place.path not in self._paths and self._is_in_graphs(tensor):
                self._paths.append(place.path)

    def forget_remade(self, put_back: set[str]) -> set[str]:
        """Every eager run makes some of these anew, and what is there now is what was there before:
        returns them, as no graph's."""
        remade = put_back & self.of_weights
        self._paths = [path for path in self._paths if path not in remade]
        return remade

    def check(self, put_back: Collection[str]) -> None:
        """Warn of them. Where some size was captured without a warm-up raise `PythonStateError`,
        but for those that were `put_back`: one of them may be a table that was built there, which
        eager steps would read."""
        # What every run makes anew, such as a weight that a hook computes, is no table.
        kept = [path for path in self._paths if path not in put_back]
        if kept and not self._each_warmed_up:
            raise PythonStateError(
                "the capture of a size that was not warmed up has left tensors in Python that lie "
                "in the memory of its graph: eager steps may read them, and other graphs write "
                "there",
                got=_listed(kept),
                expected="nothing that a forward makes and keeps",
                advice="build tables before the capture, return what the host reads, or leave "
                "warm_up_each=False out",
            )
        if self._paths:
            error = PythonStateError(
                "the forward leaves tensors of its graphs in Python: no replay makes new ones, and "
                "steps write in their memory",
                got=_listed(self._paths),
                expected="results that are returned, or written in place",
                advice="return them, copy_() them into a tensor that is there before capture(), or "
                "leave clones of them in an @eager_break",
            )
            warn_caller(str(error), StaleTensorWarning)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _TOLD} more" if len(paths) > _TOLD else ""
    return ", ".join(paths[:_TOLD]) + more
