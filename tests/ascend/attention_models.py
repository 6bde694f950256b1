"""A decoder of attention layers only, as an engine would serve it on an NPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphrt import Batch, GraphPool, GraphRunner, InputSpec
from graphrt.ascend import AscendPlatform
from graphrt.ascend.attention import (
    AttentionTask,
    fused_infer_attention,
    fused_infer_attention_v2,
)

# As most models have them, and as the operator wants them in layout TND.
HEADS, WIDTH, BLOCK, PAGES = 2, 128, 128, 4
MAX_KV = BLOCK * PAGES


@dataclass
class Decoder:
    """Layers of paged attention whose host lengths change at every step."""

    layers: int
    seed: int = 0
    task: AttentionTask = field(default_factory=lambda: fused_infer_attention(max_kv_len=MAX_KV))
    before: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def cache() -> torch.Tensor:
            shape = (PAGES * 8, BLOCK, HEADS * WIDTH)
            return torch.randn(shape, generator=generator).bfloat16().to("npu")

        self.caches = [(cache(), cache()) for _ in range(self.layers)]

    def attention(self) -> Callable[..., Any]:
        """What a layer calls."""
        return self.task

    def __call__(self, x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        attention = self.attention()
        for layer, (keys, values) in enumerate(self.caches):
            query = x + 0
            output = torch.empty_like(query)
            lse = torch.empty(1, dtype=torch.float32, device=x.device)
            attention(
                query,
                keys,
                values,
                block_table=block_table,
                input_layout="TND",
                block_size=BLOCK,
                num_heads=HEADS,
                num_key_value_heads=HEADS,
                scale=WIDTH**-0.5,
                out=[output, lse],
                task=f"layers.{layer}",
            )
            x = query + output
        return x


def runner(
    decoder: Any,
    *,
    sizes: tuple[int, ...] = (4, 8),
    platform: AscendPlatform | str = "ascend",
    pool: GraphPool | None = None,
    **options: Any,
) -> GraphRunner:
    return GraphRunner(
        decoder,
        mode=options.pop("mode", "FULL_DECODE_ONLY"),
        sizes=sizes,
        inputs={
            "x": InputSpec(torch.bfloat16, ("tokens", HEADS, WIDTH)),
            "block_table": InputSpec(torch.int32, ("reqs", PAGES), pad=0, index=True),
        },
        outputs=("tokens", HEADS, WIDTH),
        platform=None if pool is not None else platform,
        pool=pool,
        max_num_reqs=max(sizes),
        max_num_tokens=max(sizes),
        **options,
    )


@dataclass(frozen=True)
class Step:
    """The inputs and the host lengths of one decode step."""

    batch: Batch
    values: dict[str, torch.Tensor]
    updates: dict[str, Any]


def steps(count: int, *, most: int, seed: int = 0, group: str = "attention") -> list[Step]:
    """Decode steps of 1 to `most` requests whose lengths all differ from step to step."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        reqs = rng.randint(1, most)
        table = torch.randint(0, PAGES * 8, (reqs, PAGES), generator=generator, dtype=torch.int32)
        lengths = {
            "actual_seq_lengths": list(range(1, reqs + 1)),
            "actual_seq_lengths_kv": [rng.randint(1, MAX_KV) for _ in range(reqs)],
        }
        x = torch.randn((reqs, HEADS, WIDTH), generator=generator).bfloat16()
        values = {"x": x, "block_table": table}
        drawn.append(Step(Batch(reqs, reqs, 1), values, {group: lengths}))
    return drawn


def eager_outputs(run: GraphRunner, todo: list[Step]) -> list[torch.Tensor]:
    """What each step gives if it is run eagerly with the padding of its graph."""
    outputs = []
    for step in todo:
        graph = run.dispatcher.dispatch(step.batch)
        out = run.run_padded_eagerly(step.batch, graph, step.values, step.updates)
        outputs.append(out.cpu())
    return outputs


def replayed(run: GraphRunner, step: Step, updates: Any = None) -> torch.Tensor:
    """The outputs of one replayed step, not synchronised."""
    out = run(step.batch, updates=step.updates if updates is None else updates, **step.values)
    assert run.last_dispatch is not None and run.last_dispatch.slot >= 0
    return out.clone()


def replay_all(run: GraphRunner, todo: list[Step], *, every: int = 5) -> list[torch.Tensor]:
    """The outputs of all steps on the host; the device is waited for after `every` steps only."""
    copies: list[torch.Tensor] = []
    for start in range(0, len(todo), every):
        outputs = [replayed(run, step) for step in todo[start : start + every]]
        copies += [out.cpu() for out in outputs]
    return copies


def differing(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    """The steps at which two lists of outputs differ in any bit."""
    pairs = enumerate(zip(outputs, expected, strict=True))
    return [place for place, (ours, theirs) in pairs if not torch.equal(ours, theirs)]


# Of DeepSeek's latent attention; the operator takes no others beside a query_rope.
LATENT, ROPE = 512, 64


@dataclass
class LatentDecoder:
    """Layers of latent attention over pages (MLA), the rotary part beside the latent one."""

    layers: int
    v2: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        make = fused_infer_attention_v2 if self.v2 else fused_infer_attention
        self.task = make(max_kv_len=MAX_KV)

        def cache(width: int) -> torch.Tensor:
            shape = (PAGES * 8, BLOCK, width)
            return torch.randn(shape, generator=generator).bfloat16().to("npu")

        self.caches = [(cache(LATENT), cache(ROPE)) for _ in range(self.layers)]
        heads, scale = ("num_query_heads", "softmax_scale") if self.v2 else ("num_heads", "scale")
        self.options = {heads: HEADS, scale: (LATENT + ROPE) ** -0.5}

    def __call__(self, x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        for layer, (latent, rope) in enumerate(self.caches):
            query = x[..., :LATENT].contiguous()
            output = torch.empty_like(query)
            self.task(
                query,
                latent,
                latent,
                query_rope=x[..., LATENT:].contiguous(),
                key_rope=rope,
                block_table=block_table,
                input_layout="TND",
                block_size=BLOCK,
                num_key_value_heads=1,
                out=[output, torch.empty(1, dtype=torch.float32, device=x.device)],
                task=f"layers.{layer}",
                **self.options,
            )
            x = torch.cat([query + output, x[..., LATENT:]], -1)
        return x
