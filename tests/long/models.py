"""What a long run serves: a decoder with all that a clean forward may do on the side, and a draft
head that reads its outputs."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphrt import GraphOptions, GraphPool, GraphRunner, Host, InputSpec, current_context
from graphrt.demo import Decoder, EngineLimits, new_cache, tensor_shapes
from tests.models.served import CONFIG

LIMITS = EngineLimits(max_num_reqs=8, max_num_tokens=28, context=32, page_size=4, num_pages=65)
SHAPE = replace(CONFIG, hidden_size=32, intermediate_size=64, num_heads=4, head_dim=8)
VOCAB = SHAPE.vocab_size
SIZES = [1, 2, 4, 8, 12, 16]
QUERY_LENS = (1, 2)
ADAPTERS, RANK = 4, 2
NO_ADAPTER = 1
"""Number 0 is for padding; neither of them does anything."""

logger = logging.getLogger(__name__)


class Served(nn.Module):
    """The demo's decoder over a paged cache of its own, with dropout that is off, a count of steps
    in a tensor that decides something, one in Python that does not, and low-rank adapters that
    steps without any leave out. The same weights every time."""

    def __init__(self, device: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def new(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=random) * scale).to(device)

        weights = {
            name: new(*shape, scale=(2.0 / shape[-1]) ** 0.5) if len(shape) > 1 else new(*shape)
            for name, shape in tensor_shapes(SHAPE).items()
        }
        self.decoder = Decoder(SHAPE, weights, LIMITS.context)
        cache = new_cache(SHAPE, LIMITS.num_pages, LIMITS.page_size, self.decoder.embedding)
        self.register_buffer("cache", cache)
        self.register_buffer("down", new(ADAPTERS, VOCAB, RANK, scale=0.05))
        self.register_buffer("up", new(ADAPTERS, RANK, VOCAB, scale=0.05))
        self.up[: NO_ADAPTER + 1] = 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.eval()

    def forward(self, adapters: Tensor, **paged: Tensor) -> Tensor:
        """Logits [reqs, VOCAB]; `adapters` int64 [reqs], the others as `Decoder` has them."""
        self.calls += 1
        if self.calls % 100 == 0:
            logger.info("call %d with %d tokens", self.calls, len(paged["input_ids"]))
        logits = self.dropout(self.decoder(self.cache, **paged))
        context = current_context()
        if context is None or context.descriptor is None or context.descriptor.has_lora:
            low = logits.unsqueeze(1) @ self.down[adapters]
            logits = logits + (low @ self.up[adapters]).squeeze(1)
        self.steps.add_(1)
        return logits * (1 + 0.2 * (self.steps * 0.1).sin())

    def written_in_place(self) -> list[Tensor]:
        """Weights that a host may write while graphs read them."""
        layers = [each for layer in self.decoder.layers for each in (layer.qkv, layer.down)]
        return [self.decoder.head, self.decoder.embedding, self.down, *layers]


class Draft(nn.Module):
    """A head on another model's logits; it builds its table at its first call."""

    def __init__(self, device: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.register_buffer("weight", torch.randn(VOCAB, 16, generator=random).to(device))
        self.table: Tensor | None = None

    def forward(self, logits: Tensor) -> Tensor:
        """[tokens, 16] of [tokens, VOCAB]."""
        if self.table is None:
            self.table = torch.arange(16, device=logits.device) * 0.5
        return torch.tanh(logits @ self.weight / VOCAB**0.5) + self.table


def runners(
    served: Served, draft: Draft, device: str, level: str
) -> tuple[GraphRunner, GraphRunner]:
    """Both in one pool, the draft's captured by the steps that ask for them."""
    pool = GraphPool(device)
    per_token = InputSpec(torch.int64, ("tokens",))
    blocks = ("reqs", LIMITS.pages(LIMITS.context))
    main = GraphRunner(
        served,
        mode="FULL_AND_PIECEWISE",
        sizes=SIZES,
        query_lens=QUERY_LENS,
        loras=(0, 2),
        max_num_tokens=LIMITS.max_num_tokens,
        max_num_reqs=LIMITS.max_num_reqs,
        inputs={
            "input_ids": per_token,
            "positions": per_token,
            "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
            "block_table": InputSpec(torch.int64, blocks, pad=0, index=True),
            "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
            "adapters": InputSpec(torch.int64, ("reqs",), pad=0, index=True),
        },
        outputs=("reqs", VOCAB),
        # Without watching nobody finds what the forward advances.
        host=Host(state=[served.steps]) if level == "off" else None,
        options=GraphOptions(check=level),
        pool=pool,
    )
    small = GraphRunner(
        draft,
        mode="FULL",
        sizes=[1, 2, 4, 8],
        inputs={"logits": InputSpec(torch.float32, ("tokens", VOCAB))},
        outputs=("tokens", 16),
        options=GraphOptions(check=level, lazy=True),
        pool=pool,
    )
    return main, small
