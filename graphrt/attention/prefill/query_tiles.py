"""The tokens of a step in tiles of equal size, each of one request: static shapes for any batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graphrt.attention.backend import AttentionStep
from graphrt.attention.shapes import AttentionShape, GroupedShape
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.batch.context import current_context

LARGEST_TILE = 256


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of `size` query slots. A slot without a live token sees no key.

    `pages` [tiles, blocks] are the pages of the tile's request, `visible` int32 [tiles, size] how
    many keys each slot sees. `token` [tiles * size] says which token is in each slot, and `slot`
    [tokens] in which slot each token is; both are None where slots are the tokens in order.
    `dead` bool [tokens] marks tokens that see nothing.
    """

    tokens: int
    size: int
    pages: torch.Tensor
    visible: torch.Tensor
    dead: torch.Tensor
    token: torch.Tensor | None = None
    slot: torch.Tensor | None = None


def tiles_of(shape: AttentionShape, step: AttentionStep, tokens: int) -> QueryTiles:
    """The tiles of the `tokens` queries of a step; reads nothing on the host.

    Raises `InvalidInputError`.
    """
    if step.query_len is None:
        assert step.query_start_loc is not None
        return _ragged(shape, step, tokens, step.query_start_loc)
    reqs = len(step.context_lens)
    if reqs * step.query_len != tokens:
        raise InvalidInputError(
            "the query has another number of tokens than its requests",
            got=f"{tokens} tokens",
            expected=f"{reqs} requests of {step.query_len} tokens",
            advice="give begin() the rows of this step's padded batch",
        )
    if step.query_len <= LARGEST_TILE:
        return _uniform(shape, step, step.query_len)
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=step.context_lens.device)
    return _ragged(shape, step, tokens, starts * step.query_len)


def with_tiles(shape: AttentionShape, step: AttentionStep) -> AttentionStep:
    """`step` with its tiles prepared, if the number of tokens is known. Otherwise each layer makes
    them, from the length of its query."""
    if step.query_len is not None:
        tokens = step.query_len * len(step.context_lens)
    else:
        context = current_context()
        if context is None or context.descriptor is None:
            return step
        tokens = context.descriptor.num_tokens
    return replace(step, prepared=tiles_of(shape, step, tokens))


def tile_size(shape: AttentionShape, tokens: int, reqs: int) -> int:
    """The size that costs least for any way in which `tokens` belong to `reqs` requests.

    Every tile gathers all keys of its request once, and every slot, live or not, attends to them:
    large tiles gather less, and have more slots without a token.
    """
    sizes = [1]
    while sizes[-1] < min(tokens, LARGEST_TILE):
        sizes.append(sizes[-1] * 2)
    gather, attend = _key_costs(shape)
    return min(sizes, key=lambda size: _most_tiles(tokens, reqs, size) * (gather + size * attend))


def key_dims(shape: AttentionShape) -> int:
    """Numbers that are cached for one token."""
    dims = shape.kv_heads * shape.query_dim
    return 2 * dims if isinstance(shape, GroupedShape) else dims


def _key_costs(shape: AttentionShape) -> tuple[float, float]:
    """The costs of one key, in bytes moved: of gathering it, and of one slot's attention to it.

    A gathered number is read, written and read again. A device multiplies and adds about 64 times
    in the time of a byte, and a mask is a few bytes of each head of a group.
    """
    gather = 3 * 2 * key_dims(shape)
    attend = shape.num_heads * (shape.query_dim + shape.value_dim) / 64 + 6 * shape.group
    return gather, attend


def _most_tiles(tokens: int, reqs: int, size: int) -> int:
    """The most tiles: only the last one of each request can have empty slots, and none is empty."""
    return min(tokens, (tokens + reqs * (size - 1)) // size)


def _pages(shape: AttentionShape, step: AttentionStep) -> torch.Tensor:
    return step.block_table[:, : -(-step.max_context // shape.page_size)]


def _uniform(shape: AttentionShape, step: AttentionStep, size: int) -> QueryTiles:
    row = torch.arange(size, dtype=torch.int32, device=step.context_lens.device)
    visible = step.context_lens[:, None] + (row + 1 - size)
    return QueryTiles(
        size * len(visible), size, _pages(shape, step), visible, visible.flatten() <= 0
    )


def _ragged(
    shape: AttentionShape, step: AttentionStep, tokens: int, query_starts: torch.Tensor
) -> QueryTiles:
    """The tiles of requests with any number of tokens each: request r has the tokens from
    `query_starts[r]` up to `query_starts[r + 1]`."""
    reqs = len(step.context_lens)
    size = tile_size(shape, tokens, reqs)
    num_tiles = _most_tiles(tokens, reqs, size)
    device, kind = query_starts.device, query_starts.dtype
    starts, ends = query_starts[:-1], query_starts[1:]
    tile_counts = (ends - starts + (size - 1)) // size
    tile_ends = tile_counts.cumsum(0, dtype=kind)
    tile_starts = tile_ends - tile_counts
    # Tiles that no request needs count as tiles of the last one, after its end.
    tile = torch.arange(num_tiles, dtype=kind, device=device)
    owner = torch.searchsorted(tile_ends, tile, right=True).clamp(max=reqs - 1)
    row = torch.arange(size, dtype=kind, device=device)
    token = (tile - tile_starts[owner])[:, None] * size + row + starts[owner][:, None]
    end = ends[owner][:, None]
    visible = (step.context_lens[owner][:, None] - end + token + 1).masked_fill(token >= end, 0)
    slot, dead = _slots(step, query_starts, tile_starts, tokens, size)
    return QueryTiles(
        tokens,
        size,
        _pages(shape, step).index_select(0, owner),
        visible,
        dead,
        token.clamp(max=tokens - 1).flatten(),
        slot.clamp(max=num_tiles * size - 1),
    )


def _slots(
    step: AttentionStep,
    query_starts: torch.Tensor,
    tile_starts: torch.Tensor,
    tokens: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the slot in which it is, and whether it sees nothing."""
    starts, ends = query_starts[:-1], query_starts[1:]
    token = torch.arange(tokens, dtype=query_starts.dtype, device=query_starts.device)
    owner = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    slot = tile_starts[owner] * size + token - starts[owner]
    hidden = step.context_lens[owner] - ends[owner] + token < 0
    return slot, hidden | (token >= ends[-1])
