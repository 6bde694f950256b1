"""The host around the decoder: its cache, its requests, and greedy decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import graphrt
from examples.mla_decode.model import MlaConfig, MlaDecoder
from graphrt import Batch, GraphRunner
from graphrt.attention import AttentionBackend, bind_all, supports_of

Step = Callable[[Batch, dict[str, Tensor], int | None], Tensor]
"""Runs a batch with its inputs: logits [tokens, vocab]. The last argument is the query length."""


@dataclass(frozen=True)
class Workload:
    """`steps` decode steps of `query_len` tokens, for `batch` requests after their prompts.

    Each request has `context` tokens in the cache before its prompt, random ones; the prompts have
    different lengths, up to `prompt`, and go through in one mixed batch.
    """

    batch: int
    steps: int
    context: int
    prompt: int
    query_len: int
    page_size: int

    @property
    def prompt_lens(self) -> list[int]:
        return [max(1, self.prompt - request % 4) for request in range(self.batch)]

    @property
    def longest(self) -> int:
        return self.context + self.prompt + self.steps * self.query_len

    @property
    def max_blocks(self) -> int:
        return -(-self.longest // self.page_size)

    @property
    def num_pages(self) -> int:
        """The pages of all requests, and page 0 for padding."""
        return 1 + self.batch * self.max_blocks

    @property
    def max_num_reqs(self) -> int:
        return rounded(self.batch)

    @property
    def sizes(self) -> list[int]:
        """The sizes of a decode step and of the prompts; other batches are padded."""
        return sorted({self.max_num_reqs * self.query_len, rounded(sum(self.prompt_lens))})


def rounded(count: int) -> int:
    """The count rounded up to 1, 2, 4 or a multiple of 8, like capture sizes."""
    return next((size for size in (1, 2, 4) if size >= count), -(-count // 8) * 8)


class Host:
    """The model, its cache and its requests, shared by all ways of running it."""

    def __init__(self, config: MlaConfig, work: Workload, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.work, self.device = work, device
        self.model = MlaDecoder(config, work.max_blocks * work.page_size, device, dtype)
        self.cache = self.model.new_cache(work.num_pages, work.page_size)
        random = torch.Generator().manual_seed(0)
        pages = 1 + torch.randperm(work.num_pages - 1, generator=random)
        self.block_table = pages.view(work.batch, work.max_blocks).to(torch.int32)
        self.prompts = torch.randint(config.vocab, (sum(work.prompt_lens),), generator=random)

    def runner(self, mode: str, attention: AttentionBackend, hooks: Any) -> GraphRunner:
        work = self.work
        return GraphRunner(
            partial(self.model, attention, self.cache),
            mode=mode,
            platform=self.device,
            inputs=self.model.inputs(work.max_blocks),
            outputs=("tokens", self.model.config.vocab),
            sizes=work.sizes,
            max_num_reqs=work.max_num_reqs,
            query_lens=(work.query_len,),
            attention=supports_of(attention),
            host=graphrt.Host(bind=bind_all(attention), around_graph=hooks),
            # A trial would add launches of its own to the count.
            options=graphrt.GraphOptions(check="off"),
        )

    def generate(self, step: Step) -> Tensor:
        """Prompts, then greedy decoding: int64 [batch, steps * query_len] on the device.

        Of several tokens a step all are accepted, like drafts that are right.
        """
        work = self.work
        self.cache.normal_(generator=torch.Generator(self.device).manual_seed(1))
        lens, counts = [work.context] * work.batch, work.prompt_lens
        logits = step(*self._batch(self.prompts, lens, counts), None)
        ends = torch.tensor(counts, device=self.device).cumsum(0)
        tokens = logits[ends - 1].argmax(-1, keepdim=True).expand(-1, work.query_len)
        generated = []
        for _ in range(work.steps):
            lens = [length + count for length, count in zip(lens, counts, strict=True)]
            counts = [work.query_len] * work.batch
            # Tokens stay on the device, or the host would wait for them.
            batch, inputs = self._batch(tokens.flatten(), lens, counts)
            logits = step(batch._replace(query_len=work.query_len), inputs, work.query_len)
            tokens = logits.argmax(-1).view(work.batch, work.query_len)
            generated.append(tokens)
        return torch.cat(generated, dim=1)

    def _batch(
        self, ids: Tensor, lens: list[int], counts: list[int]
    ) -> tuple[Batch, dict[str, Tensor]]:
        """A step of `counts` new tokens after `lens` tokens of each request in the cache."""
        positions = torch.cat(
            [torch.arange(length, length + new) for length, new in zip(lens, counts, strict=True)]
        )
        request = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        pages = self.block_table[request, positions // self.work.page_size].long()
        starts = [0, *itertools.accumulate(counts)]
        return Batch(len(ids), len(counts)), {
            "input_ids": ids,
            "positions": positions,
            "slot_mapping": pages * self.work.page_size + positions % self.work.page_size,
            "block_table": self.block_table,
            "context_lens": torch.tensor(lens, dtype=torch.int32)
            + torch.tensor(counts, dtype=torch.int32),
            "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        }
