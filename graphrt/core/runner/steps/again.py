"""Whether a batch is the last one again: most steps of a decode are, and need no dispatch."""

from __future__ import annotations

from collections.abc import Callable

from graphrt.core.base import NativeSame
from graphrt.core.batch import Batch
from graphrt.core.dispatch import NOT_FOUND

_PLAIN = Batch(1)
_COUNT = (int, type(None))


def is_plain(batch: Batch) -> bool:
    """Whether a batch is nothing but its counts, as ints, which nobody can change in place."""
    tokens, reqs, query_len, bounds, loras, variant, exclude = batch
    return (
        batch.__class__ is Batch
        and bounds is _PLAIN.bounds
        and variant is None
        and exclude is _PLAIN.exclude
        and tokens.__class__ is reqs.__class__ is loras.__class__ is int
        and (query_len is None or query_len.__class__ is int)
    )


def same_in_python(batch: Batch, last: Batch | None) -> bool:
    """Whether a batch is told what the last one was, a plain one. What cannot be compared, or only
    compares like ints, is left to `dispatch`, which names it."""
    try:
        # Its class first: a class of the host's own may call everything equal.
        return batch.__class__ is Batch and (
            batch is last
            or (
                batch == last
                and batch[0].__class__ is batch[1].__class__ is batch[4].__class__ is int
                and batch[2].__class__ in _COUNT
                # What a host compares in its own way may equal everything.
                and batch[3] is _PLAIN.bounds
                and batch[5] is None
                and batch[6] is _PLAIN.exclude
            )
        )
    except NOT_FOUND:
        return False


same: Callable[[Batch, Batch | None], bool] = (
    same_in_python if NativeSame is None else NativeSame(Batch, _PLAIN.bounds, _PLAIN.exclude)
)
