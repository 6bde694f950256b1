"""Attention by PyTorch's scaled_dot_product_attention: slow, and the same on every device."""

from __future__ import annotations

from typing import ClassVar

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep
from graphrt.attention.prefill.query_tiles import with_tiles
from graphrt.attention.prefill.varlen import CHUNK_BYTES, varlen_attention
from graphrt.attention.shapes import AttentionShape
from graphrt.core.batch.modes import AttentionSupport


class SdpaAttention(AttentionBackend):
    """For every device, shape and batch; any batch can be one graph.

    A step moves `max_context` keys of every request three times, so pass it to `begin` where the
    block table is much wider than the longest request. Caches must hold finite numbers everywhere:
    allocate them with zeros.
    """

    name: ClassVar[str] = "graphrt-sdpa"

    def __init__(self, shape: AttentionShape, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`chunk_bytes` is about how much memory is used at once."""
        super().__init__(shape)
        self.chunk_bytes = chunk_bytes

    def get_cudagraph_support(self) -> AttentionSupport:
        return AttentionSupport.ALWAYS

    def begin(
        self,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        query_start_loc: torch.Tensor | None = None,
        query_len: int | None = None,
        max_context: int | None = None,
    ) -> AttentionStep:
        step = super().begin(
            block_table,
            context_lens,
            query_start_loc=query_start_loc,
            query_len=query_len,
            max_context=max_context,
        )
        return with_tiles(self.shape, step)

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        varlen_attention(self.shape, step, query, caches, out, chunk_bytes=self.chunk_bytes)
