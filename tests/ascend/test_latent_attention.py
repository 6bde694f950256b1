"""MLA by the fused operator: `query_rope` and `key_rope` beside the latent part, in a graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_models import HEADS, LATENT, MAX_KV, PAGES, ROPE, LatentDecoder
from schedules import need_simulator, scheduled

from graphrt import Batch, GraphRunner, InputSpec

pytestmark = pytest.mark.npu

WIDTH = LATENT + ROPE


def steps(decoder: LatentDecoder, count: int) -> list[tuple[Batch, dict[str, Any], dict[str, Any]]]:
    """Decode steps whose lengths and block tables all differ."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    queries, keys = decoder.task.queries, decoder.task.keys
    drawn = []
    for _ in range(count):
        reqs = rng.randint(1, 4)
        table = torch.randint(0, PAGES * 8, (reqs, PAGES), generator=generator, dtype=torch.int32)
        x = torch.randn((reqs, HEADS, WIDTH), generator=generator).bfloat16()
        lengths = [rng.randint(1, MAX_KV) for _ in range(reqs)]
        updates = {"attention": {queries: list(range(1, reqs + 1)), keys: lengths}}
        drawn.append((Batch(reqs, reqs, 1), {"x": x, "block_table": table}, updates))
    return drawn


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:1"])
def test_latent_attention_with_rope_replays_equal_eager_steps(schedule, v2):
    need_simulator()
    decoder = LatentDecoder(2, v2)
    with (
        scheduled(schedule),
        GraphRunner(
            decoder,
            mode="FULL_DECODE_ONLY",
            sizes=(2, 4),
            inputs={
                "x": InputSpec(torch.bfloat16, ("tokens", HEADS, WIDTH)),
                "block_table": InputSpec(torch.int32, ("reqs", PAGES), pad=0, index=True),
            },
            outputs=("tokens", HEADS, WIDTH),
            platform="ascend",
            max_num_reqs=4,
            max_num_tokens=4,
        ) as run,
    ):
        run.capture()
        todo = steps(decoder, 6)
        expected = [
            run.run_padded_eagerly(batch, run.dispatcher.dispatch(batch), values, updates).cpu()
            for batch, values, updates in todo
        ]
        outputs = []
        for batch, values, updates in todo:
            outputs.append(run(batch, updates=updates, **values).clone())
            assert run.last_dispatch is not None and run.last_dispatch.slot >= 0
        for ours, theirs in zip(outputs, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        assert not torch.equal(expected[0][:1], expected[1][:1])
