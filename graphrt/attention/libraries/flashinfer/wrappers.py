"""FlashInfer's wrappers behind one interface, for grouped attention as for latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrt.attention.libraries.flashinfer.pages import PageLists
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape


@dataclass(frozen=True)
class Buffers:
    """Buffers that captured kernels read. All sizes share them: each step writes its
    own plan before its replay.

    `query_starts` and `page_starts` [requests + 1] say where each request's tokens and pages begin;
    `pages` are the pages of all requests. `lengths` are the tokens in each request's last page; for
    latents, in all of its pages.
    """

    workspace: torch.Tensor
    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def allocate(
        cls, max_reqs: int, max_blocks: int, workspace_bytes: int, device: torch.device | str
    ) -> Buffers:
        def int32(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            torch.zeros(workspace_bytes, dtype=torch.uint8, device=device),
            int32(max_reqs + 1),
            int32(max_reqs + 1),
            int32(max_reqs * max_blocks),
            int32(max_reqs),
        )


@dataclass(frozen=True)
class StepLists:
    """A step as the library plans it: everything on the host but the pages."""

    query_starts: torch.Tensor
    lists: PageLists
    pages: torch.Tensor


class Wrappers(Protocol):
    """Plans and calls the kernels of one shape."""

    def decode(self, reqs: int) -> Any:
        """A wrapper for graphs of so many requests with one token each."""

    def eager(self) -> Any:
        """A wrapper for eager steps of any kind."""

    def plan(self, wrapper: Any, step: StepLists, *, decode: bool) -> None:
        """Plan a step for `wrapper`."""

    def run(
        self, wrapper: Any, query: torch.Tensor, caches: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        """Launch the planned step."""


def wrappers_of(
    library: Any, shape: AttentionShape, dtype: torch.dtype, buffers: Buffers
) -> Wrappers:
    if isinstance(shape, GroupedShape):
        return GroupedWrappers(library, shape, dtype, buffers)
    return LatentWrappers(library, shape, dtype, buffers)


@dataclass(frozen=True)
class GroupedWrappers:
    """Batch decode for graphs, batch prefill for the rest."""

    library: Any
    shape: GroupedShape
    dtype: torch.dtype
    buffers: Buffers

    def decode(self, reqs: int) -> Any:
        buffers = self.buffers
        return self.library.BatchDecodeWithPagedKVCacheWrapper(
            buffers.workspace,
            "NHD",
            use_cuda_graph=True,
            # With fewer queries for each KV head, tensor cores are not faster.
            use_tensor_cores=self.shape.group >= 4,
            paged_kv_indptr_buffer=buffers.page_starts[: reqs + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.lengths[:reqs],
        )

    def eager(self) -> Any:
        return self.library.BatchPrefillWithPagedKVCacheWrapper(self.buffers.workspace, "NHD")

    def plan(self, wrapper: Any, step: StepLists, *, decode: bool) -> None:
        shape, lists = self.shape, step.lists
        ragged = () if decode else (step.query_starts,)
        causal = {} if decode else {"causal": True}
        wrapper.plan(
            *ragged,
            lists.indptr,
            step.pages,
            lists.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            sm_scale=shape.softmax_scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            **causal,
        )

    def run(
        self, wrapper: Any, query: torch.Tensor, caches: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        wrapper.run(query, caches, out=out)


@dataclass(frozen=True)
class LatentWrappers:
    """One wrapper class for all batches."""

    library: Any
    shape: LatentShape
    dtype: torch.dtype
    buffers: Buffers

    def decode(self, reqs: int) -> Any:
        buffers = self.buffers
        return self.library.mla.BatchMLAPagedAttentionWrapper(
            buffers.workspace,
            use_cuda_graph=True,
            qo_indptr=buffers.query_starts[: reqs + 1],
            kv_indptr=buffers.page_starts[: reqs + 1],
            kv_indices=buffers.pages,
            kv_len_arr=buffers.lengths[:reqs],
        )

    def eager(self) -> Any:
        return self.library.mla.BatchMLAPagedAttentionWrapper(self.buffers.workspace)

    def plan(self, wrapper: Any, step: StepLists, *, decode: bool) -> None:
        shape, lists = self.shape, step.lists
        wrapper.plan(
            step.query_starts,
            lists.indptr,
            step.pages,
            lists.key_lens,
            shape.num_heads,
            shape.rank,
            shape.rope_dim,
            shape.page_size,
            not decode,
            shape.softmax_scale,
            self.dtype,
            self.dtype,
        )

    def run(
        self, wrapper: Any, query: torch.Tensor, caches: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        rank, latents = self.shape.rank, caches[0]
        wrapper.run(
            query[..., :rank], query[..., rank:], latents[..., :rank], latents[..., rank:], out=out
        )
