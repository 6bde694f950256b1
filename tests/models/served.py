"""The demo's decoder, small and seeded, in a runner, and steps that prove themselves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from graphrt import Batch, Dispatch, GraphMode, GraphOptions, GraphRunner, Platform, Reason
from graphrt.core.plan.plan import PlanArguments
from graphrt.demo import (
    Decoder,
    DecoderConfig,
    Engine,
    EngineLimits,
    Setup,
    make_runner,
    tensor_shapes,
)

CONFIG = DecoderConfig(
    512, 256, 768, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32, rms_eps=1e-5
)

Span = tuple[int, int, int]
"""A request of a step: its number, its first token to compute, and how many of them."""


def llama_runner(
    platform: Platform, limits: EngineLimits, sizes: Sequence[int] | None = None
) -> GraphRunner:
    """A runner of the demo's decoder in bfloat16, FULL_AND_PIECEWISE, over an empty cache."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(CONFIG).items():
        weight = torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)
        weight = weight if len(shape) > 1 else torch.ones(shape)
        weights[name] = weight.to(platform.device_type, torch.bfloat16)
    decoder = Decoder(CONFIG, weights, limits.pages(limits.context) * limits.page_size)
    graphs: PlanArguments = {"mode": "FULL_AND_PIECEWISE", "sizes": sizes}
    setup = Setup(decoder, platform, limits, [], 0, frozenset(), graphs)
    return make_runner(setup, GraphOptions())


class ProvingRunner:
    """Runs each step by its graph and again eagerly on the same padding; both must be equal."""

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.hits: Counter[GraphMode] = Counter()

    @property
    def last_dispatch(self) -> Dispatch | None:
        return self.runner.last_dispatch

    def __call__(self, batch: Batch, **inputs: torch.Tensor) -> torch.Tensor:
        replayed = self.runner(batch, **inputs).clone()
        found = self.runner.last_dispatch
        assert found is not None and found.reason is Reason.HIT, f"{batch}: {found}"
        eager = self.runner.run_padded_eagerly(batch, found, inputs)
        where = f"{batch} by {found.mode.name} [{found.descriptor}]"
        assert torch.equal(replayed, eager), f"{where}: {(replayed != eager).sum()} logits differ"
        self.hits[found.mode] += 1
        return replayed


def paged_step(spans: list[Span], limits: EngineLimits, generator: torch.Generator) -> Any:
    """The batch of `spans` and its inputs, with random tokens.

    Request r owns the pages that its whole context needs, the first of them 1 + r * that many.
    """
    size, width = limits.page_size, limits.pages(limits.context)
    positions, slots, starts = list[int](), list[int](), [0]
    for request, first, count in spans:
        span = range(first, first + count)
        positions += span
        slots += [(1 + request * width) * size + position for position in span]
        starts.append(len(positions))
    pages = torch.tensor([request for request, _, _ in spans])[:, None] * width
    inputs = {
        "input_ids": torch.randint(CONFIG.vocab_size, (len(positions),), generator=generator),
        "positions": torch.tensor(positions),
        "slot_mapping": torch.tensor(slots),
        "block_table": 1 + pages + torch.arange(width),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
    }
    counts = {count for _, _, count in spans}
    query_len = counts.pop() if len(counts) == 1 else None
    return Batch(len(positions), len(spans), query_len), inputs


def random_load(runner: Any, limits: EngineLimits, steps: int, seed: int) -> Engine:
    """An engine after so many steps, with prompts that arrive at random."""
    rng = random.Random(seed)
    engine = Engine(runner, limits)
    while len(engine.steps) < steps:
        idle = not engine.waiting and not engine.running
        if idle or rng.random() < 0.3:
            length = rng.randint(1, limits.context // 2)
            prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(length)]
            engine.submit(prompt, rng.randint(1, limits.context // 4))
        engine.step()
    return engine
