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

    `scale` is the softmax scale times log2(e). `OPERAND` is the dtype of
    the products: that of the cache, or float32 in the interpreter, which cannot multiply bfloat16.
    """
    block = tl.program_id(0)
    item = tl.program_id(1)
    request, begin, end, length, count = span_at(
        item, context_lens, schedule, num_splits, reqs, UNIT, SCHEDULED
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
    row_at = (request * QUERY_LEN + token).to(tl.int64) * query_token + head * query_head
    nope = tl.load(
        query + row_at[:, None] + dims[None, :],
        mask=live[:, None] & (dims < RANK)[None, :],
        other=0.0,
    ).to(OPERAND)
    rope = tl.load(
        query + row_at[:, None] + RANK + rope_dims[None, :],
        mask=live[:, None] & (rope_dims < ROPE)[None, :],
        other=0.0,
    ).to(OPERAND)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    table = block_table + request.to(tl.int64) * table_request
    offsets = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        columns = start + offsets
        held = columns < end
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            at = page * cache_page + (start % PAGE_SIZE + offsets) * cache_slot
        else:
            pages = tl.load(table + columns // PAGE_SIZE, mask=held, other=0).to(tl.int64)
            at = pages * cache_page + columns % PAGE_SIZE * cache_slot
        latent = tl.load(
            cache + at[:, None] + dims[None, :],
            mask=held[:, None] & (dims < RANK)[None, :],
            other=0.0,
        ).to(OPERAND)
        key_rope = tl.load(
            cache + at[:, None] + RANK + rope_dims[None, :],
            mask=held[:, None] & (rope_dims < ROPE)[None, :],
            other=0.0,
        ).to(OPERAND)
        scores = tl.dot(nope, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(rope, tl.trans(key_rope), scores, input_precision=PRECISION)
        seen = held[None, :] & (columns[None, :] < visible[:, None])
        scores = tl.where(seen, scores * scale, -float("inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(above == -float("inf"), 0.0, above)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(highest - shift)
        total = total * rescale + tl.sum(weights, 1)
        as_operand = weights.to(cache.dtype.element_ty).to(OPERAND)
        mixed = mixed * rescale[:, None]
        mixed = tl.dot(as_operand, latent, mixed, input_precision=PRECISION)
        highest = above

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = live[:, None] & (dims < RANK)[None, :]
    if count == 1:
        out_at = (request * QUERY_LEN + token).to(tl.int64) * out_token + head * out_head
        tl.store(out + out_at[:, None] + dims[None, :], mixed.to(out.dtype.element_ty), mask=kept)
    else:
        part_at = item.to(tl.int64) * (HEADS * QUERY_LEN) + rows
        tl.store(partial + part_at[:, None] * RANK + dims[None, :], mixed, mask=kept)
        tl.store(sums + part_at, highest + tl.log2(total), mask=live)
