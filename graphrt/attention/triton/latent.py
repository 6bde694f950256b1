"""Decode attention over a compressed cache (MLA): the first stage, one span a program."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.attention.triton.work import span_at


@triton.jit(do_not_specialize=["num_splits", "reqs"])
def attend_latent(
    query,
    cache,
    block_table,
    context_lens,
    schedule,
    out,
    partial,
    sums,
    scale,
    num_splits,
    reqs,
    query_token,
    query_head,
    cache_page,
    cache_slot,
    table_request,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    SCHEDULED: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: blocks of query rows (tokens x heads of one request), spans.

    `scale` is the softmax scale times log2(e). `OPERAND` is the dtype of the products: that of the
    cache, or float32 in the interpreter, which cannot multiply bfloat16.
    """
    block = tl.program_id(0)
    span = tl.program_id(1)
    request, begin, end, length, count = span_at(
        span, context_lens, schedule, num_splits, reqs, UNIT, SCHEDULED
    )
    if end < 0:
        return

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // HEADS
    head = rows % HEADS
    live = rows < HEADS * QUERY_LEN
    visible = length - QUERY_LEN + token + 1
    dims = tl.arange(0, BLOCK_RANK)
    rope_dims = tl.arange(0, BLOCK_ROPE)
    query_at = (request * QUERY_LEN + token).to(tl.int64) * query_token + head * query_head
    query_nope = tl.load(
        query + query_at[:, None] + dims[None, :],
        mask=live[:, None] & (dims < RANK)[None, :],
        other=0.0,
    ).to(OPERAND)
    query_rope = tl.load(
        query + query_at[:, None] + RANK + rope_dims[None, :],
        mask=live[:, None] & (rope_dims < ROPE)[None, :],
        other=0.0,
    ).to(OPERAND)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    table = block_table + request.to(tl.int64) * table_request
    offsets = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        columns = start + offsets
        in_span = columns < end
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            latent_at = page * cache_page + (start % PAGE_SIZE + offsets) * cache_slot
        else:
            pages = tl.load(table + columns // PAGE_SIZE, mask=in_span, other=0).to(tl.int64)
            latent_at = pages * cache_page + columns % PAGE_SIZE * cache_slot
        latent = tl.load(
            cache + latent_at[:, None] + dims[None, :],
            mask=in_span[:, None] & (dims < RANK)[None, :],
            other=0.0,
        ).to(OPERAND)
        key_rope = tl.load(
            cache + latent_at[:, None] + RANK + rope_dims[None, :],
            mask=in_span[:, None] & (rope_dims < ROPE)[None, :],
            other=0.0,
        ).to(OPERAND)
        scores = tl.dot(query_nope, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(query_rope, tl.trans(key_rope), scores, input_precision=PRECISION)
        is_visible = in_span[None, :] & (columns[None, :] < visible[:, None])
        scores = tl.where(is_visible, scores * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        exp_sum = exp_sum * rescale + tl.sum(weights, 1)
        probs = weights.to(cache.dtype.element_ty).to(OPERAND)
        acc = acc * rescale[:, None]
        acc = tl.dot(probs, latent, acc, input_precision=PRECISION)
        row_max = new_max

    acc = acc / tl.where(exp_sum == 0.0, 1.0, exp_sum)[:, None]
    row_mask = live[:, None] & (dims < RANK)[None, :]
    if count == 1:
        out_at = (request * QUERY_LEN + token).to(tl.int64) * out_token + head * out_head
        tl.store(out + out_at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=row_mask)
    else:
        part_at = span.to(tl.int64) * (HEADS * QUERY_LEN) + rows
        tl.store(partial + part_at[:, None] * RANK + dims[None, :], acc, mask=row_mask)
        tl.store(sums + part_at, row_max + tl.log2(exp_sum), mask=live)
