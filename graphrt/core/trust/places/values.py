"""Plain values: when two of them are the same."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.trust.places.slots import bases_of, members_of

_COMPARED = frozenset(
    (bool, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range)
)
_NUMBERS: tuple[Any, ...] = (int, float, complex, str, bytes)


def same_value(before: object, after: object) -> bool:
    """Whether two plain values are equal, NaN to itself and 1 not to True or 1.0; objects of
    types that are not torch's or Python's own are compared by identity."""
    if before is after:
        return True
    kind = type(before)
    if kind is not type(after):
        return False
    if kind in _COMPARED:
        return before == after
    for base in _NUMBERS:
        if issubclass(kind, base):
            # As text: NaN is NaN, and 0.0 is not -0.0.
            show = base.__repr__ if base in (float, complex) else None
            return show(before) == show(after) if show else base.__eq__(before, after) is True
    if is_numpy_number(kind):
        return repr(before) == repr(after)
    if issubclass(kind, tuple):
        mine, others = members_of(before, tuple) or (), members_of(after, tuple) or ()
        return len(mine) == len(others) and all(map(same_value, mine, others))
    if kind is slice:
        return all(
            same_value(getattr(before, end), getattr(after, end))
            for end in ("start", "stop", "step")
        )
    if kind is frozenset:
        # Only those of plain values are kept as values.
        return before == after
    return False


def is_numpy_number(kind: type) -> bool:
    """Whether `kind` is a scalar type of NumPy, which need not be installed."""
    return any((c.__module__, c.__name__) == ("numpy", "generic") for c in bases_of(kind))
