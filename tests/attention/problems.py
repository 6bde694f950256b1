"""Random problems of paged attention, shared by the tests of all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.attention import AttentionShape, AttentionStep

GARBAGE = 30.0


@dataclass(frozen=True)
class Problem:
    """The arguments of one layer's attention: `backend.run(step, query, caches, out)`."""

    shape: AttentionShape
    step: AttentionStep
    query: torch.Tensor
    caches: tuple[torch.Tensor, ...]

    @property
    def out(self) -> torch.Tensor:
        """A new buffer for the result, filled with NaN so that what is not written shows."""
        tokens, heads = self.query.shape[:2]
        return self.query.new_full((tokens, heads, self.shape.value_dim), float("nan"))


def random_problem(
    shape: AttentionShape,
    lengths: Sequence[int],
    query_len: int | None = None,
    *,
    query_lens: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spare_pages: int = 3,
    max_blocks: int | None = None,
    padding_tokens: int = 0,
    table_dtype: torch.dtype = torch.int32,
    poison: bool = False,
) -> Problem:
    """A problem whose pages lie scattered over the caches, the same for the same arguments.

    `lengths` are the context lengths, 0 for padding requests; either every request has `query_len`
    tokens or request r has `query_lens[r]`, and `padding_tokens` lie behind the last one. The block
    table has `max_blocks` columns (by default one more than the longest request needs); its unused
    entries are page 0, the dummy page, which belongs to nobody and is finite.

    What no token may see (spare pages, the rest of last pages) is large, or NaN with `poison`.
    """
    random = torch.Generator().manual_seed(seed)
    page_size = shape.page_size
    pages = [-(-length // page_size) for length in lengths]
    columns = max(pages, default=0) + 1 if max_blocks is None else max_blocks
    table, num_pages = _scatter(pages, columns, spare_pages, random)
    caches = tuple(
        _cache(kind, num_pages, table, lengths, poison, random).to(device, dtype)
        for kind in shape.cache_shapes
    )
    starts, tokens = _starts(query_lens, query_len, len(lengths))
    query = torch.randn(tokens + padding_tokens, shape.num_heads, shape.query_dim, generator=random)
    step = AttentionStep(
        table.to(device, table_dtype),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        query_len,
        None if starts is None else starts.to(device),
        columns * page_size,
    )
    return Problem(shape, step, query.to(device, dtype), caches)


def _scatter(
    pages: Sequence[int], columns: int, spare: int, random: torch.Generator
) -> tuple[torch.Tensor, int]:
    """The block table [reqs, columns], and how many pages there are."""
    used = sum(pages)
    order = 1 + torch.randperm(used + spare, generator=random)
    table = torch.zeros(len(pages), columns, dtype=torch.int64)
    for row, own in zip(table, order[:used].split(list(pages)), strict=True):
        row[: len(own)] = own
    return table, 1 + used + spare


def _cache(
    kind: tuple[int, ...],
    num_pages: int,
    table: torch.Tensor,
    lengths: Sequence[int],
    poison: bool,
    random: torch.Generator,
) -> torch.Tensor:
    cache = torch.full((num_pages, *kind), float("nan") if poison else GARBAGE)
    cache[0] = GARBAGE
    for row, length in zip(table, lengths, strict=True):
        for start in range(0, length, kind[0]):
            live = min(kind[0], length - start)
            rows = torch.randn(live, *kind[1:], generator=random)
            cache[row[start // kind[0]], :live] = rows
    return cache


def _starts(
    query_lens: Sequence[int] | None, query_len: int | None, reqs: int
) -> tuple[torch.Tensor | None, int]:
    """`query_start_loc`, None for uniform queries, and the number of tokens."""
    if query_lens is None:
        assert query_len is not None
        return None, reqs * query_len
    assert query_len is None
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return starts, int(starts[-1])
