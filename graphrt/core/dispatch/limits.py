"""What one batch may have: which modes, how many tokens at least, how much padding."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from graphrt.core.base import (
    MOST,
    InvalidBatchError,
    InvalidModeError,
    count_of,
    items_of,
    padding_ratio,
    shown,
)
from graphrt.core.batch import Batch, GraphMode
from graphrt.core.dispatch.tables import (
    FULL_DISAGREED,
    NO_FULL,
    NO_PIECEWISE,
    PIECEWISE_DISAGREED,
)

NO_MODES: frozenset[GraphMode] = frozenset()
_FULL, _PIECEWISE, _NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE

# Dicts, because a look into one costs less than comparisons. No graph runs in NONE.
EXCLUDED_BIT: dict[Any, int] = {_FULL: NO_FULL, _PIECEWISE: NO_PIECEWISE, _NONE: 0}
EXCLUDED_BITS: dict[Any, int] = {
    modes | none: bits
    for modes, bits in (
        (NO_MODES, 0),
        (frozenset({_FULL}), NO_FULL),
        (frozenset({_PIECEWISE}), NO_PIECEWISE),
        (frozenset({_FULL, _PIECEWISE}), NO_FULL | NO_PIECEWISE),
    )
    for none in (NO_MODES, frozenset({_NONE}))
}
DISAGREED_BITS: dict[Any, int] = {
    None: 0,
    _FULL: 0,
    _PIECEWISE: FULL_DISAGREED,
    _NONE: FULL_DISAGREED | PIECEWISE_DISAGREED,
}


COLLECTIONS = frozenset({set, frozenset, list, tuple})
"""What modes are excluded by, as a rule."""
MOST_PADDING = 2.0**63
"""No ratio is as large; a float, because comparing it with the largest int takes longer."""


class Limits(NamedTuple):
    """What one batch may have: the bits of modes that are taken out, at least so many tokens, at
    most so many times its own."""

    narrowed: int
    tokens: int
    max_padding: float | None

    @property
    def most_tokens(self) -> float | None:
        """The most tokens that a graph may have; None for any number."""
        return None if self.max_padding is None else self.tokens * self.max_padding


def narrowed_by(
    excluded: frozenset[GraphMode],
    at_most_mode: GraphMode | str | None = None,
) -> int:
    """The bits of what is excluded and disagreed on.

    Raises `KeyError` or `TypeError` for all but sets of modes and modes: `limits_of` has to look.
    """
    return EXCLUDED_BITS[excluded] | DISAGREED_BITS[at_most_mode]


def plain_ratio(value: float) -> float:
    """The value itself; raises `TypeError` for what may be no ratio of padding."""
    if (value.__class__ is not float and value.__class__ is not int) or not 1 <= value <= MOST:
        raise TypeError(value)
    return value


def limits_of(
    batch: Batch,
    exclude: Collection[GraphMode | str],
    at_least: int,
    at_most_mode: GraphMode | str | None,
    max_padding: float | None,
) -> Limits:
    """The limits of a batch; raises `InvalidModeError` and `InvalidBatchError` for what is none."""
    if at_most_mode is not None:
        what = "ranks agree on a mode that steps run in"
        at_most_mode = GraphMode.parse_runtime(at_most_mode, what)
    if type(at_least) is not int:
        at_least = count_of("at_least", at_least, error=InvalidBatchError)
    return Limits(
        narrowed_by(_modes(exclude, batch.exclude), at_most_mode),
        max(batch.num_tokens, at_least),
        max_padding,
    )


def checked_ratio(max_padding: float | None) -> float | None:
    """`max_padding` itself; raises `InvalidOptionError` unless it is None or at least 1."""
    if max_padding is not None:
        padding_ratio("max_padding", max_padding)
    return max_padding


def _modes(*given: Collection[GraphMode | str]) -> frozenset[GraphMode]:
    """The runtime modes in all of `given`; raises `InvalidModeError` for what is no set of them."""
    found: set[GraphMode] = set()
    for modes in given:
        if type(modes) is frozenset and not modes:
            continue
        if isinstance(modes, (str, GraphMode)) or not isinstance(modes, Collection):
            raise InvalidModeError(
                "modes are excluded as a set of them",
                got=shown(modes),
                expected="a set of runtime modes",
                advice="exclude=frozenset({GraphMode.FULL})",
            )
        for mode in items_of("exclude", modes, "{GraphMode.FULL}", InvalidModeError):
            found.add(GraphMode.parse_runtime(mode, "a step runs in no such mode to exclude"))
    return frozenset(found)
