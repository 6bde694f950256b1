"""Decoders whose attention is ATB's, which takes lengths from the host: paged, and of latents."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_models import Step

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.ascend import AscendPlatform
from graphrt.ascend.attention import AttentionTask, mla_attention, paged_attention

HEADS, LATENT, ROPE, PAGE, PAGES, BLOCKS = 8, 512, 64, 16, 3, 24
MAX_KV = PAGE * PAGES


@dataclass
class PagedDecoder:
    """Layers of `_npu_paged_attention`."""

    layers: int
    width: int = 16
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.task = self.new_task()
        generator = torch.Generator().manual_seed(self.layers)

        def cache(width: int) -> torch.Tensor:
            return torch.randn((BLOCKS, PAGE, 1, width), generator=generator).half().npu()

        self.caches = [self.caches_of(cache) for _ in range(self.layers)]

    def new_task(self) -> AttentionTask:
        return paged_attention(max_kv_len=MAX_KV)

    def caches_of(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return cache(self.width), cache(self.width)

    def __call__(self, x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        for layer, caches in enumerate(self.caches):
            query = x + 0
            output = torch.empty_like(query)
            self.attend(query, caches, block_table, output, f"layers.{layer}")
            x = query + output
        return x

    def attend(
        self, query: torch.Tensor, caches: Any, table: torch.Tensor, output: torch.Tensor, name: str
    ) -> None:
        call = (query, *caches, 1, HEADS, 0.2, table)
        self.task(*call, out=output, task=name, **self.given)


@dataclass
class LatentDecoder(PagedDecoder):
    """Layers of `npu_multi_head_latent_attention`; with several queries a request, or the sums of
    the softmax, which are added to what it returns."""

    width: int = LATENT
    queries: int = 1
    sums: bool = False

    def new_task(self) -> AttentionTask:
        return mla_attention(max_kv_len=MAX_KV, query_lens=self.queries > 1)

    def caches_of(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return cache(LATENT), cache(ROPE)

    def attend(
        self, query: torch.Tensor, caches: Any, table: torch.Tensor, output: torch.Tensor, name: str
    ) -> None:
        rope = query[..., :ROPE] + 1
        call = (query, rope, *caches, table, HEADS, 0.04, 1)
        if not self.sums:
            self.task(*call, output=output, task=name, **self.given)
            return
        lse = torch.empty((*query.shape[:2], 1), dtype=query.dtype, device=query.device)
        ring = {"lse": lse, "calc_type": "calc_type_ring", **self.given}
        self.task(*call, output=output, task=name, **ring)
        output += lse


def runner(decoder: Any, platform: AscendPlatform, *, most: int = 6) -> GraphRunner:
    queries = getattr(decoder, "queries", 1)
    return GraphRunner(
        decoder,
        mode="FULL_DECODE_ONLY",
        sizes=(2 * queries, most * queries),
        query_lens=[queries],
        inputs={
            "x": InputSpec(torch.float16, ("tokens", HEADS, decoder.width)),
            "block_table": InputSpec(torch.int32, ("reqs", PAGES), pad=0, index=True),
        },
        outputs=("tokens", HEADS, decoder.width),
        max_num_reqs=most,
        max_num_tokens=most * queries,
        platform=platform,
    )


def steps(decoder: Any, count: int, *, most: int = 6, seed: int = 0) -> list[Step]:
    """Decode steps of 1 to `most` requests with other lengths at every step."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    queries, drawn = getattr(decoder, "queries", 1), []
    for _ in range(count):
        reqs = rng.randint(1, most)
        shape = (reqs * queries, HEADS, decoder.width)
        values = {
            "x": torch.randn(shape, generator=generator).half(),
            "block_table": torch.randint(0, BLOCKS, (reqs, PAGES), generator=generator).int(),
        }
        lengths = {"context_lens": [rng.randint(queries, MAX_KV) for _ in range(reqs)]}
        if queries > 1:
            lengths["qseqlen"] = [queries] * reqs
        drawn.append(Step(Batch(reqs * queries, reqs, queries), values, {"attention": lengths}))
    return drawn
