"""The largest batch of a host, and what is larger."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.core.base.errors import InvalidBatchError, InvalidOptionError
from graphrt.core.plan.sizes import check_sizes


def largest_batch(
    max_num_tokens: int | None, max_num_reqs: int | None, sizes: Sequence[int] | None
) -> dict[str, int]:
    """The host's limits; what it leaves out follows from its sizes, or from the other limit."""
    tokens = max_num_tokens or (max(check_sizes(sizes)) if sizes is not None else max_num_reqs)
    if tokens is None:
        raise InvalidOptionError(
            "the largest batch is unknown",
            expected="max_num_tokens, max_num_reqs or sizes",
            advice="sizes=[1, 2, 4, 8]",
        )
    return {"max_num_tokens": tokens, "max_num_reqs": max_num_reqs or tokens}


def wrong_requests(reqs: int, most: int) -> InvalidBatchError:
    """The error for a batch of no requests, or of more than there are rows for."""
    return InvalidBatchError(
        "the batch has more requests than the runner has rows for, or none",
        got=reqs,
        expected=f"1 to {most}",
        advice=f"max_num_reqs={max(reqs, 1)}",
    )
