"""What paged attention should give: float64, one token at a time, on the host."""

from __future__ import annotations

import torch

from graphrt.attention.backend import AttentionStep
from graphrt.attention.shapes import AttentionShape, GroupedShape


def reference_attention(
    shape: AttentionShape, step: AttentionStep, query: torch.Tensor, *caches: torch.Tensor
) -> torch.Tensor:
    """float64 [tokens, heads, value_dim] on the CPU; zeros for tokens that see nothing.

    Made to be read, not to be fast: tests and benchmarks compare backends with it.
    """
    query = query.detach().cpu().double()
    out = torch.zeros(*query.shape[:2], shape.value_dim, dtype=torch.float64, device="cpu")
    starts = query_starts(step)
    for request, context_len in enumerate(step.context_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        if context_len <= 0 or start == end:
            continue
        pages = step.block_table[request, : -(-context_len // shape.page_size)].long()
        keys, values = _keys_and_values(shape, pages, caches)
        for token in range(start, end):
            visible = context_len - (end - token) + 1
            if visible > 0:
                out[token] = _attend(shape, query[token], keys[:visible], values[:visible])
    return out


def query_starts(step: AttentionStep) -> list[int]:
    """Where the tokens of each request begin, and the last one's end; reads the device."""
    if step.query_len is not None:
        return [step.query_len * request for request in range(len(step.context_lens) + 1)]
    assert step.query_start_loc is not None
    query_start_loc: list[int] = step.query_start_loc.tolist()
    return query_start_loc


def _keys_and_values(
    shape: AttentionShape, pages: torch.Tensor, caches: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached tokens of some pages in order: [tokens, kv_heads, dim] each."""
    gathered = [cache[pages.to(cache.device)].cpu().double().flatten(0, 1) for cache in caches]
    if isinstance(shape, GroupedShape):
        return gathered[0], gathered[1]
    latent = gathered[0].unsqueeze(1)
    return latent, latent[..., : shape.value_dim]


def _attend(
    shape: AttentionShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """One token: [heads, value_dim] from [heads, dim] and [visible, kv_heads, dim]."""
    keys = keys.repeat_interleave(shape.group, dim=1)
    values = values.repeat_interleave(shape.group, dim=1)
    scores = torch.einsum("hd,thd->ht", query, keys) * shape.softmax_scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)
