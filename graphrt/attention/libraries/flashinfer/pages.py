"""The pages of a step as FlashInfer takes them: lists without gaps, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.core.base.errors import InvalidInputError


@dataclass(frozen=True)
class PageLists:
    """int32 tensors on the host. `entries` are the indices of pages in a flattened block table.

    `key_lens` are the context lengths, `indptr` where the pages of each request begin and the last
    one's end, and `last_page_len` how many tokens its last page holds.
    """

    key_lens: torch.Tensor
    indptr: torch.Tensor
    last_page_len: torch.Tensor
    entries: torch.Tensor

    def indices(self, block_table: torch.Tensor) -> torch.Tensor:
        """The pages themselves: int32, on the device of the block table."""
        entries = self.entries.to(block_table.device, non_blocking=True)
        return block_table.flatten().index_select(0, entries).to(torch.int32)


def page_lists(context_lens: Sequence[int], page_size: int, max_blocks: int) -> PageLists:
    """Pages of requests with these lengths in a block table of `max_blocks` columns.

    A padding request gets one token of its first page: the kernels want at least one, and that
    page belongs to no request. Raises `InvalidInputError`.
    """
    longest = max(context_lens, default=0)
    if longest > max_blocks * page_size:
        raise InvalidInputError(
            "a context is longer than its row of the block table",
            got=f"{longest} tokens",
            expected=f"at most {max_blocks} pages of {page_size}",
            advice="give lengths() those of the same step as the block table",
        )
    lengths = torch.tensor(context_lens, dtype=torch.int32, device="cpu").clamp(min=1)
    counts = (lengths + (page_size - 1)) // page_size
    indptr = starts(counts)
    # The entries of a request are consecutive, in the block table as in the list.
    shifts = torch.arange(len(lengths), dtype=torch.int32, device="cpu") * max_blocks - indptr[:-1]
    entries = torch.arange(int(indptr[-1]), dtype=torch.int32, device="cpu")
    entries += shifts.repeat_interleave(counts)
    return PageLists(lengths, indptr, (lengths - 1) % page_size + 1, entries)


def starts(counts: torch.Tensor) -> torch.Tensor:
    """int32 [len + 1]: the sum of the counts before each, and the sum of all."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
