"""Whether a batch is what it calls itself: its numbers, and one query length for all requests."""

from __future__ import annotations

from graphrt.core.base import InvalidBatchError, count_of
from graphrt.core.batch import (
    Batch,
    BatchDescriptor,
    checked_bounds,
    checked_count,
    checked_variant,
    plain_bounds,
)


def live_query_len(batch: Batch) -> int | None:
    """How many tokens each request has where that is one number."""
    tokens, reqs, query_len = batch[:3]
    if query_len is None or query_len < 1:
        return None
    if tokens % query_len if reqs is None else reqs * query_len != tokens:
        return None
    return query_len


def checked_uniform(
    num_tokens: int, num_reqs: int | None, query_len: int
) -> tuple[int | None, int | None]:
    """Requests and query length of a batch that calls itself uniform; not so if it is not."""
    if num_reqs is None and query_len > 0 and num_tokens % query_len == 0:
        return num_tokens // query_len, query_len
    if num_reqs is not None and num_reqs * query_len == num_tokens:
        return num_reqs, query_len
    if type(query_len) is not int:
        # Not merely a batch that contradicts itself; see `checked_batch`.
        raise TypeError(query_len)
    return num_reqs, None


def unpadded(batch: Batch) -> BatchDescriptor:
    """The descriptor of a batch that no graph serves."""
    reqs = batch.num_reqs if batch.num_reqs is None or batch.num_reqs >= 1 else None
    reqs, query_len = (
        (reqs, None)
        if batch.query_len is None
        else checked_uniform(batch.num_tokens, reqs, batch.query_len)
    )
    return BatchDescriptor(
        batch.num_tokens,
        reqs,
        uniform=query_len is not None,
        num_active_loras=max(batch.num_active_loras, 0),
        query_len=query_len,
        bounds=batch.bounds,
        variant=batch.variant,
    )


def checked_batch(batch: object) -> Batch:
    """`batch` with ints for its numbers; raises `InvalidBatchError` for what is none, or empty."""
    if not isinstance(batch, Batch):
        raise InvalidBatchError(
            "a step's batch is no Batch",
            got=type(batch).__name__,
            expected="a Batch, or nothing where the inputs' shapes say everything",
            advice="runner(Batch(num_tokens, num_reqs), input_ids=...): inputs are passed by name",
        )
    tokens, reqs, query_len, bounds, loras, variant, _ = batch
    plain = (
        type(tokens) is int
        and (reqs is None or type(reqs) is int)
        and (query_len is None or type(query_len) is int)
        and type(loras) is int
        and plain_bounds(bounds)
        and (variant is None or type(variant) is str)
    )
    if not plain:
        batch = batch._replace(
            num_tokens=count_of("num_tokens", tokens, error=InvalidBatchError),
            num_reqs=checked_count("num_reqs", reqs),
            query_len=checked_count("query_len", query_len),
            bounds=checked_bounds(bounds),
            num_active_loras=count_of("num_active_loras", loras, error=InvalidBatchError),
            variant=checked_variant(variant),
        )
    if batch.num_tokens < 1:
        raise InvalidBatchError(
            "a batch needs at least one token",
            got=batch.num_tokens,
            expected="num_tokens >= 1",
            advice="skip the step when nothing is scheduled"
            if batch.num_tokens == 0
            else "Batch(num_tokens) with the live tokens of the step",
        )
    return batch
