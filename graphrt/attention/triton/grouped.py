"""Decode attention of grouped heads (MHA, GQA, MQA): the first stage, one span a program."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.attention.triton.work import span_at


@triton.jit(do_not_specialize=["num_splits", "reqs"])
def attend_grouped(
    query,
    key_cache,
    value_cache,
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
    key_page,
    key_slot,
    key_head,
    value_page,
    value_slot,
    value_head,
    table_request,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    SCHEDULED: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: KV heads x blocks of query rows (tokens x heads of a group), spans.

    `scale` is the softmax scale times log2(e). `OPERAND` is the dtype of the products: that of the
    cache, or float32 in the interpreter, which cannot multiply bfloat16.
    """
    kv_head = tl.program_id(0) // ROW_BLOCKS
    block = tl.program_id(0) % ROW_BLOCKS
    span = tl.program_id(1)
    request, begin, end, length, count = span_at(
        span, context_lens, schedule, num_splits, reqs, UNIT, SCHEDULED
    )
    if end < 0:
        return

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = rows < GROUP * QUERY_LEN
    visible = length - QUERY_LEN + token + 1
    dims = tl.arange(0, BLOCK_DIM)
    query_at = (request * QUERY_LEN + token).to(tl.int64) * query_token + head * query_head
    row_mask = live[:, None] & (dims < DIM)[None, :]
    queries = tl.load(query + query_at[:, None] + dims[None, :], mask=row_mask, other=0.0).to(
        OPERAND
    )
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    table = block_table + request.to(tl.int64) * table_request
    offsets = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        columns = start + offsets
        in_span = columns < end
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            slots = start % PAGE_SIZE + offsets
            key_at = page * key_page + slots * key_slot + kv_head * key_head
            value_at = page * value_page + slots * value_slot + kv_head * value_head
        else:
            pages = tl.load(table + columns // PAGE_SIZE, mask=in_span, other=0).to(tl.int64)
            slots = columns % PAGE_SIZE
            key_at = pages * key_page + slots * key_slot + kv_head * key_head
            value_at = pages * value_page + slots * value_slot + kv_head * value_head
        key_mask = in_span[:, None] & (dims < DIM)[None, :]
        keys = tl.load(key_cache + key_at[:, None] + dims[None, :], mask=key_mask, other=0.0)
        keys = keys.to(OPERAND)
        values = tl.load(value_cache + value_at[:, None] + dims[None, :], mask=key_mask, other=0.0)
        values = values.to(OPERAND)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        is_visible = in_span[None, :] & (columns[None, :] < visible[:, None])
        scores = tl.where(is_visible, scores * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        exp_sum = exp_sum * rescale + tl.sum(weights, 1)
        probs = weights.to(value_cache.dtype.element_ty).to(OPERAND)
        acc = acc * rescale[:, None]
        acc = tl.dot(probs, values, acc, input_precision=PRECISION)
        row_max = new_max

    acc = acc / tl.where(exp_sum == 0.0, 1.0, exp_sum)[:, None]
    if count == 1:
        out_at = (request * QUERY_LEN + token).to(tl.int64) * out_token + head * out_head
        tl.store(out + out_at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=row_mask)
    else:
        part_at = span.to(tl.int64) * (HEADS * QUERY_LEN) + token * HEADS + head
        tl.store(partial + part_at[:, None] * DIM + dims[None, :], acc, mask=row_mask)
        tl.store(sums + part_at, row_max + tl.log2(exp_sum), mask=live)
