"""Attention inside of FULL graphs on a GPU: many steps in flight, with lengths that change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.core.batch.modes import GraphMode

pytestmark = pytest.mark.cuda
pytest.importorskip("triton", reason="the kernels are written in Triton")

from graphrt.attention import GroupedShape, LatentShape, TritonAttention, supports_of  # noqa: E402

LAYERS, PAGES, BLOCKS = 4, 700, 64
SHAPES = [GroupedShape(16, 4, 64, 16), LatentShape(16, 128, 32, 64, 0.1)]


def _runner(backend: TritonAttention, caches: list[tuple[torch.Tensor, ...]]) -> GraphRunner:
    shape = backend.shape

    def forward(
        query: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        step = backend.begin(block_table, context_lens)
        for of_layer in caches:
            out = backend.attend(step, query, *of_layer)
            query = query + torch.nn.functional.pad(out, (0, shape.query_dim - shape.value_dim))
        return query

    runner = GraphRunner(
        forward,
        mode="FULL_DECODE_ONLY",
        sizes=[2, 4, 8],
        max_num_reqs=8,
        query_lens=(1, 2),
        inputs={
            "query": InputSpec(torch.bfloat16, ("tokens", shape.num_heads, shape.query_dim)),
            "block_table": InputSpec(torch.int32, ("reqs", BLOCKS), pad=0, index=True),
            "context_lens": InputSpec(torch.int32, ("reqs",), pad=0),
        },
        outputs=("tokens",),
        attention=supports_of(backend),
        platform="cuda",
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("shape", SHAPES, ids=["GQA", "MLA"])
def test_500_steps_in_flight_with_random_lengths_equal_eager(shape: Any) -> None:
    chosen = random.Random(0)
    caches = [
        tuple(
            torch.randn(PAGES, *each, dtype=torch.bfloat16, device="cuda")
            for each in shape.cache_shapes
        )
        for _ in range(LAYERS)
    ]
    longest = BLOCKS * shape.page_size
    backend = TritonAttention(shape, max_num_reqs=8, max_query_len=2, max_context=longest)
    runner = _runner(backend, caches)
    queries = torch.randn(16, shape.num_heads, shape.query_dim, device="cuda").bfloat16()
    steps = []
    for _ in range(500):
        reqs, query_len = chosen.randint(1, 8), chosen.choice([1, 1, 2])
        if reqs * query_len > 8:
            reqs = 8 // query_len
        top = chosen.choice([100, 1000, longest])
        lengths = [chosen.randint(1, top) for _ in range(reqs)]
        inputs = {
            "query": queries[: reqs * query_len],
            # From the host, so that steps that wait in the stream need buffers of their own.
            "block_table": torch.randint(0, PAGES, (reqs, BLOCKS), dtype=torch.int32),
            "context_lens": torch.tensor(lengths, dtype=torch.int32),
        }
        batch = Batch(reqs * query_len, reqs, query_len)
        out = runner(batch, **inputs).clone()
        assert runner.last_dispatch is not None and runner.last_dispatch.mode is GraphMode.FULL
        steps.append((batch, inputs, out))
    for batch, inputs, out in steps:
        dispatch = runner.dispatcher.dispatch(batch)
        expected = runner.run_padded_eagerly(batch, dispatch, inputs, None)
        assert torch.equal(out, expected)
