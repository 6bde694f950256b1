"""A decoder with its paged KV cache, and the `GraphRunner` that serves its steps.

This file is all that graphrt needs of an engine: the inputs with their axes and padding, the
attention's support, and an example step by which `capture()` tries the graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from examples.engine.config import EngineConfig
from examples.engine.model import Decoder, rotations
from examples.engine.requests import Chunk
from graphrt import Batch, Example, GraphPool, GraphRunner, Host, InputSpec
from graphrt.attention import (
    AttentionBackend,
    GroupedShape,
    SdpaAttention,
    bind_all,
    supports_of,
)


class PagedModel:
    def __init__(
        self, model: Decoder, config: EngineConfig, query_len: int, pool: GraphPool
    ) -> None:
        """`query_len` is how many tokens of each request a decode step has."""
        self.model, self.config = model, config
        weights, shape = model.lm_head.weight, model.config
        heads = GroupedShape(
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            page_size=config.page_size,
        )
        # A backend belongs to one runner: it keeps buffers of the step under way.
        self.attention: AttentionBackend = SdpaAttention(heads)
        if weights.is_cuda and find_spec("triton"):
            from graphrt.attention import TritonAttention

            self.attention = TritonAttention(
                heads,
                max_num_reqs=config.max_num_reqs,
                max_query_len=query_len,
                dtype=weights.dtype,
                device=weights.device,
            )
        pages = (config.num_pages, config.page_size, shape.num_key_value_heads, shape.head_dim)
        self.caches = [
            (weights.new_zeros(pages), weights.new_zeros(pages)) for _ in model.model.layers
        ]
        self.rope = rotations(shape, config.max_pages * config.page_size, weights)
        per_token = InputSpec(torch.int64, ("tokens",))
        self.runner = GraphRunner(
            self.forward,
            mode=config.mode,
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            query_lens=(query_len,),
            attention=supports_of(self.attention),
            inputs={
                "input_ids": per_token,
                "positions": per_token,
                # Padding writes to page 0, which belongs to no request.
                "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
                "block_table": InputSpec(
                    torch.int32, ("reqs", config.max_pages), pad=0, index=True
                ),
                "context_lens": InputSpec(torch.int32, ("reqs",)),
                "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
            },
            outputs=("tokens", shape.hidden_size),
            host=Host(bind=bind_all(self.attention), example=self.example),
            pool=pool,
        )

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden: Tensor = self.model(self.attention, self.caches, self.rope, **inputs)
        return hidden

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states of all tokens of the chunks. They are gone with the pool's next step."""
        counts = {len(chunk.ids) for chunk in chunks}
        query_len = counts.pop() if len(counts) == 1 else None
        batch = Batch(sum(len(chunk.ids) for chunk in chunks), len(chunks), query_len)
        hidden: Tensor = self.runner(batch, **self.inputs(chunks))
        return hidden

    def inputs(self, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """The inputs of a step, on the host: the runner copies and pads them."""
        size, width = self.config.page_size, self.config.max_pages
        ids, positions, slots = list[int](), list[int](), list[int]()
        for chunk in chunks:
            places = range(chunk.start, chunk.start + len(chunk.ids))
            ids += chunk.ids
            positions += places
            slots += [chunk.pages[p // size] * size + p % size for p in places]
        table = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks]
        starts = itertools.accumulate((len(chunk.ids) for chunk in chunks), initial=0)
        lens = [chunk.start + len(chunk.ids) for chunk in chunks]
        return {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "slot_mapping": torch.tensor(slots),
            "block_table": torch.tensor(table, dtype=torch.int32),
            "context_lens": torch.tensor(lens, dtype=torch.int32),
            "query_start_loc": torch.tensor(list(starts), dtype=torch.int32),
        }

    def example(self, batch: Batch, generator: torch.Generator) -> Example:
        """A random step. `capture()` runs it before anything is served: all pages are scratch."""
        config = self.config
        reqs = batch.num_reqs or min(batch.num_tokens, config.max_num_reqs)
        share = min((config.num_pages - 1) // reqs, config.max_pages)
        chunks = []
        for request in range(reqs):
            count = (batch.num_tokens + request) // reqs
            most = share * config.page_size - count
            start = int(torch.randint(most + 1, (), generator=generator))
            ids = torch.randint(self.model.config.vocab_size, (count,), generator=generator)
            if not request and batch.num_tokens > 1:
                # The values of padding in a live row: without them a served step is tried too.
                start = ids[0] = 0
            first = 1 + request * share
            used = config.pages(start + count)
            chunks.append(Chunk(ids.tolist(), start, range(first, first + used)))
        return Example(self.inputs(chunks))
