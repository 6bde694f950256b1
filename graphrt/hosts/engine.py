"""For adapters of engines: how far two steps of one batch are apart."""

from __future__ import annotations

from typing import Any

from graphrt.core.base import tree

SPREADS = 4
"""A graph may differ from an eager run by this many times the difference of two eager runs."""


def rows_apart(ours: Any, theirs: Any, rows: slice) -> float:
    """The largest difference of two rows, as a part of the norm of the second one. By norms: an
    element of a large channel differs by more than a row's mean square if it is rounded once."""
    largest = 0.0
    for got, expected in zip(tree.tensors(ours), tree.tensors(theirs), strict=True):
        a, b = (each[rows].detach().flatten(1).double() for each in (got, expected))
        parts = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
        parts = parts.nan_to_num(nan=float("inf"))
        # NaN is itself.
        parts[((a == b) | (a.isnan() & b.isnan())).all(dim=1)] = 0.0
        largest = max(largest, *parts.tolist(), 0.0)
    return largest
