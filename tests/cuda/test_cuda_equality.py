"""A Llama's replays equal the same padded steps run eagerly, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import GraphMode, get_platform

pytestmark = pytest.mark.cuda

PLATFORM = "cuda"
MAX_REQS = 300


@pytest.fixture(scope="module")
def llama() -> Any:
    from tests.models import served

    return served


def test_every_llama_decode_batch_equals_padded_eager_bit_for_bit(llama):
    limits = llama.EngineLimits(MAX_REQS, 512, context=64, page_size=16, num_pages=1201)
    generator = torch.Generator().manual_seed(1)
    with llama.llama_runner(get_platform(PLATFORM), limits) as runner:
        runner.capture()
        proven = llama.ProvingRunner(runner)
        # Whatever a decode step attends to has been written by a prompt.
        for first in range(0, MAX_REQS, 8):
            group = range(first, min(first + 8, MAX_REQS))
            batch, inputs = llama.paged_step([(r, 0, 64) for r in group], limits, generator)
            proven(batch, **inputs)
        assert set(proven.hits) == {GraphMode.PIECEWISE}
        for reqs in range(1, MAX_REQS + 1):
            requests = torch.randperm(MAX_REQS, generator=generator)[:reqs].tolist()
            positions = torch.randint(64, (reqs,), generator=generator).tolist()
            spans = [(r, at, 1) for r, at in zip(requests, positions, strict=True)]
            batch, inputs = llama.paged_step(spans, limits, generator)
            proven(batch, **inputs)
            assert runner.last_dispatch.mode is GraphMode.FULL
        assert proven.hits[GraphMode.FULL] == MAX_REQS


@pytest.mark.parametrize("seed", [0, 1])
def test_200_llama_prompt_and_decode_steps_equal_padded_eager_bit_for_bit(llama, seed):
    limits = llama.EngineLimits(16, 64, context=128, page_size=16, num_pages=129)
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    with llama.llama_runner(get_platform(PLATFORM), limits, sizes=sizes) as runner:
        runner.capture()
        proven = llama.ProvingRunner(runner)
        engine = llama.random_load(proven, limits, steps=200, seed=seed)
    assert sum(proven.hits.values()) == 200
    assert min(proven.hits[GraphMode.FULL], proven.hits[GraphMode.PIECEWISE]) > 20
    assert any(1 < step.num_reqs < step.num_tokens for step in engine.steps)
