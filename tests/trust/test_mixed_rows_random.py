"""Forwards that mix live rows with padding, under random traffic: no step returns what is wrong.

What is found by chance alone, such as a maximum that padding rarely is, is left out.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.errors import GraphQuarantinedWarning

WIDTH, LARGEST, STEPS, PROGRAMS = 2, 8, 14, 12

FORWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean of tokens": lambda x, bias, ends: x + x.mean(0),
    "last token": lambda x, bias, ends: x + x[-1],
    "number of tokens": lambda x, bias, ends: x + x.shape[0],
    "sums from the end": lambda x, bias, ends: x - x.flip(0).cumsum(0).flip(0),
    "mean of requests": lambda x, bias, ends: x + bias.mean(0),
    "last request": lambda x, bias, ends: x + bias[-1],
    "number of requests": lambda x, bias, ends: x + bias.shape[0],
    "last end": lambda x, bias, ends: x + (ends[-1] - ends[0]),
    "nothing": lambda x, bias, ends: x * 2 + bias[:1] + ends[1],
}


def runner_of(forward: Callable[..., torch.Tensor], rng: random.Random) -> GraphRunner:
    def spec(dtype: torch.dtype, *shape: int | str) -> InputSpec:
        return InputSpec(dtype, shape, pad=rng.choice((0, "repeat")))

    mode = rng.choice(("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"))
    more: dict[str, Any] = {} if mode == "FULL" else {"pieces": "breakable"}
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=rng.choice(([8], [4, 8], [1, 2, 4, 8])),
        max_num_reqs=rng.choice((4, LARGEST)),
        inputs={
            "x": spec(torch.float32, "tokens", WIDTH),
            "bias": spec(torch.float32, "reqs", WIDTH),
            "ends": spec(torch.int32, "reqs+1"),
        },
        outputs=("tokens", WIDTH),
        platform="cpu",
        options=GraphOptions(lazy=rng.random() < 0.2),
        **more,
    )
    if not runner.options.lazy:
        runner.capture()
    return runner


def batch_of(rng: random.Random, most_reqs: int, often: float) -> Batch:
    """As often as that with all tokens: prompts are cut to fill a step."""
    tokens = LARGEST if rng.random() < often else rng.randint(1, LARGEST)
    reqs = rng.choice((1, rng.randint(1, min(tokens, most_reqs)), min(tokens, most_reqs)))
    return Batch(tokens, reqs, 1 if tokens == reqs and rng.random() < 0.7 else None)


@pytest.mark.parametrize("name", FORWARDS)
def test_random_traffic_never_returns_rows_mixed_with_padding(name: str) -> None:
    forward, quarantined = FORWARDS[name], 0
    for seed in range(PROGRAMS):
        rng = random.Random(f"{name} {seed}")
        torch.manual_seed(seed)
        runner, often = runner_of(forward, rng), rng.random()
        for _ in range(STEPS):
            batch = batch_of(rng, runner.inputs.reqs, often)
            assert batch.num_reqs is not None
            x, bias = torch.randn(batch.num_tokens, WIDTH), torch.randn(batch.num_reqs, WIDTH)
            ends = torch.arange(batch.num_reqs + 1, dtype=torch.int32) * 2
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GraphQuarantinedWarning)
                out = runner(batch, x=x, bias=bias, ends=ends)
            assert torch.allclose(out, forward(x, bias, ends), atol=1e-5), (seed, batch)
        quarantined += runner.dispatcher.counts()[Reason.QUARANTINED] > 0
    assert (quarantined == 0) is (name == "nothing")
