"""Launches of the decode kernels: their grids, tile sizes and workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.attention.backend import AttentionStep
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape
from graphrt.attention.triton.grouped import attend_grouped
from graphrt.attention.triton.latent import attend_latent
from graphrt.attention.triton.merge import merge_spans
from graphrt.attention.triton.work import AIM, UNIT, Room, Splits, schedule_spans

_MERGE_PROGRAMS = 512
"""Programs that the merge aims at."""
_MOST_ROWS = 64
"""The most query rows of one program: more rows of a KV head take several programs."""


@dataclass(frozen=True)
class Tiles:
    """How a kernel is built: keys of a block, warps, and stages of its pipeline. `residents` is how
    many of its programs fit on a multiprocessor at once, by their shared memory."""

    block_n: int
    warps: int
    stages: int
    residents: int = 1


def tiles_for(shape: AttentionShape, dtype: torch.dtype, rows: int) -> Tiles:
    """The tiles that were fastest on an H200 (benchmarks/gpu/attention/tiles.py)."""
    if dtype == torch.float32:
        return Tiles(16, 4, 1) if isinstance(shape, LatentShape) else Tiles(32, 4, 2)
    if isinstance(shape, LatentShape):
        return Tiles(64, 4 if rows <= 16 else 8, 2)
    return Tiles(64, 2, 3, residents=2) if shape.head_dim <= 128 else Tiles(64, 4, 2)


def room_for(shape: AttentionShape, dtype: torch.dtype, query_len: int, processors: int) -> Room:
    """The room that a device has for the spans of such a step."""
    blocks, block_m = row_blocks(shape, query_len), row_block(shape, query_len)
    tiles = tiles_for(shape, dtype, block_m)
    key_bytes = sum(torch.Size(each[1:]).numel() for each in shape.cache_shapes) * dtype.itemsize
    # A span's float32 output is written, and read again, for every row.
    merge_bytes = 8 * shape.num_heads * query_len * shape.value_dim
    return Room(
        tiles.residents * processors / (shape.kv_heads * blocks),
        processors,
        merge_bytes / key_bytes,
    )


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, as TRITON_INTERPRET=1 asks for."""
    return not isinstance(attend_latent, triton.runtime.JITFunction)


def row_block(shape: AttentionShape, query_len: int) -> int:
    """Query rows of one program."""
    rows: int = triton.next_power_of_2(shape.group * query_len)
    return min(_MOST_ROWS, max(16, rows))


def row_blocks(shape: AttentionShape, query_len: int) -> int:
    """Blocks of query rows that share a KV head."""
    return -(-shape.group * query_len // row_block(shape, query_len))


@dataclass(frozen=True)
class Workspace:
    """Buffers of a step: `schedule` int32 as `schedule_spans` writes it, and the outputs of spans,
    `partial` [spans * rows * value_dim] and `sums` [spans * rows], float32, which all steps share.
    """

    schedule: torch.Tensor
    partial: torch.Tensor
    sums: torch.Tensor


def schedule(
    context_lens: torch.Tensor, schedule_out: torch.Tensor, room: Room, longest: int
) -> None:
    """Write the spans of the lengths, which are at most `longest`, to `schedule_out`: one small
    kernel, once a step."""
    reqs = len(context_lens)
    padded: int = triton.next_power_of_2(reqs)
    schedule_spans[(1,)](
        context_lens,
        schedule_out,
        reqs,
        room.limit(reqs, longest),
        room.coarse(reqs),
        room.shortest_span(reqs),
        AIM=AIM,
        UNIT=UNIT,
        REQS=padded,
        ITEMS=max(16, 8192 // padded),
        SORTED=padded <= 128,
    )


def decode(
    shape: AttentionShape,
    step: AttentionStep,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    splits: Splits,
    workspace: Workspace,
    tiles: Tiles | None = None,
) -> None:
    """Both stages of decode attention for one layer; without splits the second is left out."""
    assert step.query_len is not None
    reqs, query_len = len(step.context_lens), step.query_len
    block_m = row_block(shape, query_len)
    tiles = tiles or tiles_for(shape, query.dtype, block_m)
    scale = shape.softmax_scale * math.log2(math.e)
    blocks = row_blocks(shape, query_len)
    # The interpreter cannot multiply bfloat16.
    operand = torch.float32 if interpreted() else query.dtype
    shared: dict[str, Any] = {
        "PAGE_SIZE": shape.page_size,
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "UNIT": UNIT,
        "SCHEDULED": splits.scheduled,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "OPERAND": getattr(tl, str(operand).removeprefix("torch.")),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    grid = (shape.kv_heads * blocks, splits.grid(reqs))
    tables = (step.block_table, step.context_lens, workspace.schedule, out)
    split = (workspace.partial, workspace.sums, scale, splits.num_splits, reqs)
    if isinstance(shape, GroupedShape):
        keys, values = caches
        attend_grouped[grid](
            query,
            keys,
            values,
            *tables,
            *split,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            step.block_table.stride(0),
            *out.stride()[:2],
            HEADS=shape.num_heads,
            GROUP=shape.group,
            QUERY_LEN=query_len,
            DIM=shape.head_dim,
            BLOCK_DIM=_block_of(shape.head_dim),
            ROW_BLOCKS=blocks,
            **shared,
        )
    else:
        (cache,) = caches
        attend_latent[grid](
            query,
            cache,
            *tables,
            *split,
            *query.stride()[:2],
            *cache.stride()[:2],
            step.block_table.stride(0),
            *out.stride()[:2],
            HEADS=shape.num_heads,
            QUERY_LEN=query_len,
            RANK=shape.rank,
            ROPE=shape.rope_dim,
            BLOCK_RANK=_block_of(shape.rank),
            BLOCK_ROPE=_block_of(shape.rope_dim),
            **shared,
        )
    if splits.num_splits > 1:
        _merge(shape, step, out, splits, workspace)


def _block_of(dim: int) -> int:
    """A block that holds `dim` values. `tl.dot` multiplies no fewer than 16 of them on a GPU."""
    block: int = triton.next_power_of_2(dim)
    return max(16, block)


def _merge(
    shape: AttentionShape,
    step: AttentionStep,
    out: torch.Tensor,
    splits: Splits,
    workspace: Workspace,
) -> None:
    """The second stage: the outputs of a request's spans become its output."""
    assert step.query_len is not None
    reqs, rows = len(step.context_lens), step.query_len * shape.num_heads
    value_dim: int = triton.next_power_of_2(shape.value_dim)
    # Few rows are spread over many programs. Many rows take few, as empty programs cost time.
    few = reqs * rows * max(1, value_dim // 128) <= _MERGE_PROGRAMS
    block_dim, block_splits = min(128 if few else 512, value_dim), 64 if few else 16
    block_rows = max(1, reqs * rows // _MERGE_PROGRAMS)
    grid = (reqs, -(-rows // block_rows), -(-shape.value_dim // block_dim))
    merge_spans[grid](
        workspace.partial,
        workspace.sums,
        out,
        step.context_lens,
        workspace.schedule,
        splits.num_splits,
        block_rows,
        *out.stride()[:2],
        HEADS=shape.num_heads,
        QUERY_LEN=step.query_len,
        VALUE_DIM=shape.value_dim,
        BLOCK_DIM=block_dim,
        BLOCK_SPLITS=block_splits,
        UNIT=UNIT,
        SCHEDULED=splits.scheduled,
        num_warps=4,
    )
