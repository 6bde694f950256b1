"""What one batch may have: which modes, how many tokens at least, how much padding."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from graphrt.core.base import InvalidBatchError, InvalidModeError, count_of, padding_ratio
from graphrt.core.batch import Batch, GraphMode
from graphrt.core.dispatch.index import BEST_FIRST
from graphrt.core.dispatch.reasons import Dispatch

NO_MODES: frozenset[GraphMode] = frozenset()
_LEVEL = {GraphMode.NONE: 0, GraphMode.PIECEWISE: 1, GraphMode.FULL: 2}


class Limits(NamedTuple):
    """What one batch may have: not these modes, at least so many tokens, at most this level."""

    banned: frozenset[GraphMode]
    tokens: int
    highest: int
    max_padding: float | None

    @property
    def modes(self) -> list[GraphMode]:
        """The modes that are allowed, the best first."""
        banned, highest = self.banned, self.highest
        return [mode for mode in BEST_FIRST if mode not in banned and _LEVEL[mode] <= highest]

    def wasted_by(self, found: Dispatch) -> bool:
        """Whether a graph would pad more than allowed."""
        ratio = self.max_padding
        return ratio is not None and found.descriptor.num_tokens > self.tokens * ratio


def limits_of(
    batch: Batch,
    exclude: Collection[GraphMode | str],
    at_least: int,
    at_most_mode: GraphMode | str | None,
    max_padding: float | None,
) -> Limits:
    """The limits of a batch; raises `InvalidModeError` and `InvalidBatchError` for what is none."""
    highest = GraphMode.FULL
    if at_most_mode is not None:
        highest = GraphMode.parse_runtime(at_most_mode, "ranks agree on a mode that steps run in")
    if type(at_least) is not int:
        at_least = count_of("at_least", at_least, error=InvalidBatchError)
    return Limits(
        _excluded(exclude, batch.exclude),
        max(batch.num_tokens, at_least),
        _LEVEL[highest],
        max_padding,
    )


def checked_ratio(max_padding: float | None) -> float | None:
    """`max_padding` itself; raises `InvalidOptionError` unless it is None or at least 1."""
    if max_padding is not None:
        padding_ratio("max_padding", max_padding)
    return max_padding


def _excluded(*given: Collection[GraphMode | str]) -> frozenset[GraphMode]:
    """The runtime modes in all of `given`; raises `InvalidModeError` for what is no set of them."""
    found: set[GraphMode] = set()
    for modes in given:
        if type(modes) is frozenset and not modes:
            continue
        if isinstance(modes, (str, GraphMode)) or not isinstance(modes, Collection):
            raise InvalidModeError(
                "modes are excluded as a set of them",
                got=repr(modes)[:200],
                expected="a set of runtime modes",
                advice="exclude=frozenset({GraphMode.FULL})",
            )
        for mode in modes:
            found.add(GraphMode.parse_runtime(mode, "a step runs in no such mode to exclude"))
    return frozenset(found)
