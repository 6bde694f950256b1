"""Attention of requests with any number of tokens each, out of PyTorch's own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphrt.attention.backend import AttentionStep
from graphrt.attention.prefill.query_tiles import QueryTiles, key_dims, tiles_of
from graphrt.attention.shapes import AttentionShape, GroupedShape

CHUNK_BYTES = 256 * 2**20


def varlen_attention(
    shape: AttentionShape,
    step: AttentionStep,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write the attention of `query` over `caches` to `out`: right on every device.

    Shapes are static and nothing is read on the host, so that any graph may hold it. It gathers up
    to `step.max_context` keys for every tile of tokens, however few of them are live, in chunks of
    about `chunk_bytes`; rows of padding tokens become zeros. The numbers in unused parts of pages
    must be finite, since masks do not stop a NaN.

    The tiles are those of `step.prepared` if they are for as many tokens, else made here.
    """
    tiles = step.prepared
    if not isinstance(tiles, QueryTiles) or tiles.tokens != len(query):
        tiles = tiles_of(shape, step, len(query))
    tiled = query if tiles.token is None else query.index_select(0, tiles.token)
    tiled = tiled.view(-1, tiles.size, *query.shape[1:])
    context = tiles.pages.shape[1] * shape.page_size
    rows = max(1, chunk_bytes // _tile_bytes(shape, tiles.size, context, query.element_size()))
    split = zip(
        torch.split(tiled, rows),
        torch.split(tiles.pages, rows),
        torch.split(tiles.visible, rows),
        strict=True,
    )
    chunks = [_attend(shape, *chunk, caches=caches) for chunk in split]
    attended = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    if tiles.slot is not None:
        attended = attended.index_select(0, tiles.slot)
    out.copy_(attended.masked_fill(tiles.dead[:, None, None], 0))


def _tile_bytes(shape: AttentionShape, size: int, context: int, item: int) -> int:
    """Bytes that a tile needs at once: its keys, and its mask as bools and as numbers."""
    masks = 1 if size == 1 else size * shape.group
    return context * (key_dims(shape) * item + masks * (1 + item))


def _attend(
    shape: AttentionShape,
    query: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """[tiles * size, heads, value_dim] of some tiles [tiles, size, heads, dim]."""
    tiles, size = visible.shape
    kv_heads, group = shape.kv_heads, shape.group
    keys, values = _gather(shape, pages, caches)
    # Heads of a group become queries of their KV head, whose keys need not be repeated then.
    grouped = query.view(tiles, size, kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    key = torch.arange(keys.shape[2], dtype=visible.dtype, device=visible.device)
    # One key even for a slot that sees none: the softmax of nothing is NaN on some devices.
    mask = key < visible.clamp(min=1)[:, None, :, None]
    if size > 1:
        mask = mask[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
    result = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=shape.softmax_scale
    )
    by_slot = result.view(tiles, kv_heads, size, group, -1).transpose(1, 2)
    return by_slot[..., : shape.value_dim].reshape(tiles * size, shape.num_heads, -1)


def _gather(
    shape: AttentionShape, pages: torch.Tensor, caches: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of some tiles: [tiles, kv_heads, context, dim] each."""
    flat = pages.flatten()
    gathered = [
        cache.index_select(0, flat).view(len(pages), -1, shape.kv_heads, shape.query_dim)
        for cache in caches
    ]
    # Kernels that need keys and values of one size take the whole latents as both.
    keys, values = gathered if isinstance(shape, GroupedShape) else gathered * 2
    return keys.transpose(1, 2), values.transpose(1, 2)
