"""The second stage of split attention: merges the spans of each row by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.attention.triton.work import span_of


@triton.jit(do_not_specialize=["num_splits", "block_rows"])
def merge_spans(
    partial,
    sums,
    out,
    context_lens,
    schedule,
    num_splits,
    block_rows,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    SCHEDULED: tl.constexpr,
):
    """Grid: requests, blocks of `block_rows` rows (tokens x heads) of each, blocks of the value
    dimension.

    `partial` [spans, rows, VALUE_DIM] and `sums` [spans, rows] (log2 of the sum of exponentials)
    are float32. The first stage has written requests of one span.
    """
    request = tl.program_id(0)
    length = tl.load(context_lens + request)
    if SCHEDULED:
        chunk = tl.load(schedule)
        most = 1 << 30
        first = tl.load(schedule + 1 + request)
    else:
        chunk = UNIT
        most = num_splits
        first = request * num_splits
    _, count = span_of(length, chunk, most, UNIT)
    if count == 1:
        return
    rows: tl.constexpr = HEADS * QUERY_LEN
    dims = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    begin = tl.program_id(1) * block_rows
    for row in range(begin, tl.minimum(begin + block_rows, rows)):
        row_max = -float("inf")
        exp_sum = 0.0
        merged = tl.zeros([BLOCK_DIM], tl.float32)
        for start in range(0, count, BLOCK_SPLITS):
            splits = start + tl.arange(0, BLOCK_SPLITS)
            rows_at = (first + splits).to(tl.int64) * rows + row
            span_sums = tl.load(sums + rows_at, mask=splits < count, other=-float("inf"))
            values = tl.load(
                partial + rows_at[:, None] * VALUE_DIM + dims[None, :],
                mask=(splits < count)[:, None] & (dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(row_max, tl.max(span_sums, 0))
            # A row that sees nothing has no sum: its weights are 0, not NaN.
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
            weights = tl.exp2(span_sums - shift)
            rescale = tl.exp2(row_max - shift)
            merged = merged * rescale + tl.sum(weights[:, None] * values, 0)
            exp_sum = exp_sum * rescale + tl.sum(weights, 0)
            row_max = new_max
        merged = merged / tl.where(exp_sum == 0.0, 1.0, exp_sum)
        token, head = row // HEADS, row % HEADS
        out_at = (request * QUERY_LEN + token).to(tl.int64) * out_token + head * out_head
        tl.store(out + out_at + dims, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
