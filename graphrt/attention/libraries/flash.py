"""Attention by the flash-attn library: version 2, or 3 on Hopper."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep
from graphrt.attention.levels.lookup import get_cudagraph_support
from graphrt.attention.libraries.optional import load
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.batch.modes import AttentionSupport

PAGE_SIZE_2 = 256


class FlashAttention(AttentionBackend):
    """`flash_attn`: grouped attention over pages of a multiple of 256 tokens.

    Written against the library's interface; it has not run on hardware yet.
    """

    name: ClassVar[str] = "flash-attention-2"

    def __init__(self, shape: GroupedShape, *, num_splits: int = 8) -> None:
        """`num_splits` parts of each context are attended to in parallel.

        The library's own choice (0) depends on the width of the block table, so the same rows would
        differ in their last bits from graph to graph.
        """
        if not isinstance(shape, GroupedShape):
            raise InvalidInputError(
                "flash-attn 2 needs keys and values of one size",
                got=type(shape).__name__,
                expected="GroupedShape",
                advice="use FlashAttention3",
            )
        if shape.page_size % PAGE_SIZE_2:
            raise InvalidInputError(
                "flash-attn 2 cannot read pages of this size",
                got=shape.page_size,
                expected=f"a multiple of {PAGE_SIZE_2}",
                advice="use larger pages, or FlashAttention3",
            )
        super().__init__(shape)
        self.num_splits = num_splits
        self._library = load("flash_attn", "flash-attn")

    def get_cudagraph_support(self) -> AttentionSupport:
        return get_cudagraph_support(self.name)

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        common: dict[str, Any] = {
            "block_table": int32(step.block_table),
            "causal": True,
            "softmax_scale": self.shape.softmax_scale,
        }
        if step.query_len is not None:
            result = self._library.flash_attn_with_kvcache(
                query.view(-1, step.query_len, *query.shape[1:]),
                *caches,
                cache_seqlens=int32(step.context_lens),
                num_splits=self.num_splits,
                **common,
            )
            out.copy_(result.flatten(0, 1))
            return
        assert step.query_start_loc is not None
        result = self._library.flash_attn_varlen_func(
            query,
            *caches,
            cu_seqlens_q=int32(step.query_start_loc),
            cu_seqlens_k=key_starts(step.context_lens),
            # Upper bounds: they set the size of the launch, and no host knows the lengths here.
            max_seqlen_q=len(query),
            max_seqlen_k=step.max_context,
            **common,
        )
        copy_live(out, result, step.query_start_loc)


class FlashAttention3(AttentionBackend):
    """`flash_attn_interface`, the library's build for Hopper: any page size, both shapes.

    Written against the library's interface; it has not run on hardware yet.
    """

    name: ClassVar[str] = "flash-attention-3"

    def __init__(self, shape: AttentionShape, *, num_splits: int = 32) -> None:
        """`num_splits` is the most parts of a context that are attended to in parallel; 0, the
        library's own choice, must not be captured, as it sets the size of a buffer."""
        super().__init__(shape)
        self.num_splits = num_splits
        self._library = load("flash_attn_interface", "flash-attn 3")

    def get_cudagraph_support(self) -> AttentionSupport:
        return get_cudagraph_support(self.name)

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        ragged: dict[str, Any] = {}
        if step.query_len is None:
            assert step.query_start_loc is not None
            ragged["cu_seqlens_q"] = int32(step.query_start_loc)
            ragged["max_seqlen_q"] = len(query)
        else:
            query = query.view(-1, step.query_len, *query.shape[1:])
        result = self._library.flash_attn_with_kvcache(
            **operands(self.shape, query, caches),
            cache_seqlens=int32(step.context_lens),
            page_table=int32(step.block_table),
            causal=True,
            softmax_scale=self.shape.softmax_scale,
            num_splits=self.num_splits,
            **ragged,
        )
        if step.query_len is not None:
            out.copy_(result.flatten(0, 1))
        else:
            copy_live(out, result, ragged["cu_seqlens_q"])


def operands(
    shape: AttentionShape, query: torch.Tensor, caches: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """The tensors of `flash_attn_with_kvcache`; for latents, the rope part is the key."""
    if not isinstance(shape, LatentShape):
        return {"q": query, "k_cache": caches[0], "v_cache": caches[1]}
    latents = caches[0].unsqueeze(2)
    return {
        "q": query[..., shape.rank :],
        "qv": query[..., : shape.rank],
        "k_cache": latents[..., shape.rank :],
        "v_cache": latents[..., : shape.rank],
    }


def key_starts(context_lens: torch.Tensor) -> torch.Tensor:
    """int32 [reqs + 1]: where the keys of each request begin if all keys are concatenated."""
    starts = context_lens.new_zeros(len(context_lens) + 1, dtype=torch.int32)
    starts[1:] = context_lens.cumsum(0)
    return starts


def copy_live(out: torch.Tensor, result: torch.Tensor, query_start_loc: torch.Tensor) -> None:
    """Copy the rows of requests to `out`, and zeros to rows after them, which have no result."""
    token = torch.arange(len(out), dtype=query_start_loc.dtype, device=out.device)
    padding = token >= query_start_loc[-1]
    out.copy_(result.masked_fill(padding[:, None, None], 0))


def int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32)
