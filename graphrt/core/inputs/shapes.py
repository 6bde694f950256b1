"""What the shapes of a step's inputs say of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrt.core.base import InvalidBatchError
from graphrt.core.batch import Batch
from graphrt.core.inputs.buffers import StaticInputs


def batch_of(inputs: StaticInputs, values: Mapping[str, Any]) -> Batch:
    """The batch that the shapes of a step's inputs describe."""
    tokens, reqs = inputs.infer(values)
    # Only this much is certain: with as many tokens as requests, each has exactly one.
    return Batch(tokens, reqs, 1 if reqs is not None and tokens == reqs else None)


def reqs_of(inputs: StaticInputs, batch: Batch, values: Mapping[str, Any]) -> int:
    """The requests of a batch that does not say how many it has."""
    if batch.num_reqs is not None:
        return batch.num_reqs
    if batch.query_len:
        return batch.num_tokens // batch.query_len
    reqs = inputs.infer(values)[1]
    return min(batch.num_tokens, inputs.reqs) if reqs is None else reqs


def wrong_requests(reqs: int, most: int) -> InvalidBatchError:
    """The error for a batch of no requests, or of more than there are rows for."""
    return InvalidBatchError(
        "the batch has more requests than the runner has rows for, or none",
        got=reqs,
        expected=f"1 to {most}",
        advice=f"max_num_reqs={max(reqs, 1)}",
    )
