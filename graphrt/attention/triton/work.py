"""How decode attention is cut along its keys: on the host, and in the same way in kernels.

A request of n tokens is cut into equal spans of a multiple of `UNIT` tokens, each about as long as
the `chunk` of the step. A kernel's program takes one span of one request for one block of query
rows. What bounds the work is the number of spans, so that a grid fixed at capture fits any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

UNIT = 64
"""Tokens by which spans are rounded: a multiple of every block of keys that the kernels load."""
MIN_CHUNK = 256
"""Tokens below which splitting costs more than it gains."""


@dataclass(frozen=True)
class Splits:
    """How a launch is cut: every request into at most `num_splits` spans of `chunk` tokens.

    With `planned`, the spans of all requests are one list of `num_splits` entries instead, which
    `plan_spans` wrote on the device.
    """

    num_splits: int
    chunk: int
    planned: bool = False

    def grid(self, reqs: int) -> int:
        """Spans that the launch has programs for."""
        return self.num_splits if self.planned else reqs * self.num_splits


def span_limit(reqs: int, blocks: int, programs: float) -> int:
    """Spans that a step of `reqs` requests may have: enough for `programs` programs, where every
    span has one for each of `blocks` blocks of query rows; at least 2 a request."""
    return reqs + max(reqs, int(programs) // blocks)


def planned_splits(reqs: int, limit: int) -> Splits:
    """A launch over the list of spans that `plan_spans` writes for the lengths of the step."""
    return Splits(max(limit, reqs + 1), 0, planned=True)


def fixed_splits(reqs: int, limit: int, longest: int) -> Splits:
    """The same number of spans for each request, for keys of at most `longest` tokens."""
    most = max(1, limit // reqs)
    num_splits = min(most, max(1, -(-longest // MIN_CHUNK)))
    return Splits(num_splits, _chunk(longest, num_splits))


def with_count(num_splits: int, longest: int) -> Splits:
    """Exactly `num_splits` spans where a request has enough tokens."""
    return Splits(num_splits, _chunk(longest, num_splits))


def _chunk(longest: int, num_splits: int) -> int:
    each = max(1, -(-longest // num_splits))
    return max(UNIT, -(-each // UNIT) * UNIT)


@triton.jit
def span_of(length, chunk, most, UNIT: tl.constexpr):
    """Tokens of each span of a request, and how many spans it has: 1 where it is empty."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(length, chunk), 1), most)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, wanted), UNIT), 1) * UNIT
    return span, tl.maximum(tl.cdiv(length, span), 1)


@triton.jit(do_not_specialize=["reqs", "limit"])
def plan_spans(
    context_lens,
    plan,
    reqs,
    limit,
    MIN_CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    REQS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Write the spans of a step: int32 plan = [chunk, first span of each request,
    request of each span or -1]. One program.

    chunk = ceil(sum of lengths / (limit - reqs)), so that there are at most `limit` spans:
    sum(ceil(n / chunk)) <= sum(n) / chunk + reqs.
    """
    rows = tl.arange(0, REQS)
    lengths = tl.load(context_lens + rows, mask=rows < reqs, other=0).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(tl.sum(lengths, 0), limit - reqs), MIN_CHUNK)
    chunk = tl.cdiv(chunk, UNIT) * UNIT
    wanted = tl.maximum(tl.cdiv(lengths, chunk), 1)
    span = tl.maximum(tl.cdiv(tl.cdiv(lengths, wanted), UNIT), 1) * UNIT
    count = tl.where(rows < reqs, tl.maximum(tl.cdiv(lengths, span), 1), 0)
    ends = tl.cumsum(count, 0)
    tl.store(plan, chunk)
    tl.store(plan + 1 + rows, ends - count, mask=rows < reqs)
    total = tl.sum(count, 0)
    for start in range(0, limit, ITEMS):
        items = start + tl.arange(0, ITEMS)
        request = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), 1)
        request = tl.where(items < total, request, -1)
        tl.store(plan + 1 + reqs + items, request, mask=items < limit)
