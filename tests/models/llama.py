"""A small Llama with a paged KV cache: a decode step, its attention in the way asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, eager_break
from graphrt.compile import opaque, support_compile

PAGE = 4
PAGES = 4
IDS = InputSpec(torch.int64, ("tokens",))
INPUTS = {
    "ids": IDS,
    "positions": IDS,
    "slots": InputSpec(torch.int64, ("tokens",), pad=-1, index=True),
    "table": InputSpec(torch.int64, ("tokens", PAGES), pad=0, index=True),
    "lengths": InputSpec(torch.int64, ("tokens",), pad=1),
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One query token of each row against its pages; rows with slot -1 write to the last slot."""
    at = torch.where(slots < 0, keys.shape[0] - 1, slots)
    keys.index_put_((at,), key)
    values.index_put_((at,), value)
    context = (table.unsqueeze(-1) * PAGE + torch.arange(PAGE, device=table.device)).flatten(1)
    mask = (torch.arange(context.shape[1], device=table.device) < lengths.unsqueeze(1))[
        :, None, None, :
    ]
    found = F.scaled_dot_product_attention(
        query.unsqueeze(2),
        keys[context].transpose(1, 2),
        values[context].transpose(1, 2),
        attn_mask=mask,
        enable_gqa=True,
    )
    out.copy_(found.squeeze(2))


ATTENTION: dict[str, Callable[..., Any]] = {
    "inline": attend,
    "eager_break": eager_break(attend),
    "opaque": opaque("graphrt_tests::attention", mutates=["keys", "values", "out"])(attend),
}
"""Part of the model, a part that PIECEWISE runs eagerly, or one operator of a compiled model."""


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + 1e-6).to(x.dtype) * self.weight


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, slots: int, attention: str) -> None:
        super().__init__()
        self.attend = ATTENTION[attention]
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.widths = [n * self.head_dim for n in (heads, kv_heads, kv_heads)]
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.register_buffer("keys", torch.zeros(slots, kv_heads, self.head_dim))
        self.register_buffer("values", torch.zeros(slots, kv_heads, self.head_dim))

    def forward(self, x, cos, sin, slots, table, lengths):
        tokens = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).split(self.widths, -1)
        q = rope(q.view(tokens, self.heads, self.head_dim), cos, sin)
        k = rope(k.view(tokens, self.kv_heads, self.head_dim), cos, sin)
        v = v.view(tokens, self.kv_heads, self.head_dim)
        out = torch.empty_like(q)
        self.attend(q, k, v, self.keys, self.values, slots, table, lengths, out)
        x = x + self.o(out.view(tokens, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@support_compile(dynamic_dims=["ids", "positions", "slots", "table", "lengths"])
class Llama(nn.Module):
    """`rows` is the largest batch; `attention` is one of `ATTENTION`."""

    def __init__(
        self,
        layers: int = 2,
        dim: int = 32,
        heads: int = 4,
        rows: int = 16,
        attention: str = "opaque",
    ) -> None:
        super().__init__()
        pages = rows * PAGES
        self.embed = nn.Embedding(128, dim)
        self.layers = nn.ModuleList(
            Layer(dim, heads, heads // 2, pages * PAGE + 1, attention) for _ in range(layers)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 128, bias=False)
        half = torch.arange(0, dim // heads, 2) / (dim // heads)
        angles = torch.outer(torch.arange(PAGES * PAGE).float(), 10000**-half)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, ids, positions, slots, table, lengths):
        x = self.embed(ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin, slots, table, lengths)
        return self.head(self.norm(x))


def step_inputs(batch: int, step: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of one decode step of `batch` rows at position `step`."""
    generator = torch.Generator().manual_seed(seed * 1000 + batch)
    table = torch.arange(batch * PAGES).view(batch, PAGES)
    positions = torch.full((batch,), step)
    return {
        "ids": torch.randint(0, 128, (batch,), generator=generator),
        "positions": positions,
        "slots": table[:, step // PAGE] * PAGE + step % PAGE,
        "table": table,
        "lengths": positions + 1,
    }


def llama_runner(model: Any, pool: GraphPool, **more: Any) -> GraphRunner:
    """A runner of a compiled `Llama`, by pieces and whole."""
    arguments: dict[str, Any] = {
        "inputs": INPUTS,
        "outputs": ("tokens", 128),
        "mode": "FULL_AND_PIECEWISE",
        "sizes": [1, 2, 4, 8],
        "pool": pool,
        "pieces": "fx",
        **more,
    }
    return GraphRunner(model, **arguments)


def check_both_modes(runner: GraphRunner, original: nn.Module, *, exact: bool) -> None:
    """FULL and PIECEWISE steps are near what `original` gives eagerly; if `exact` equal to each
    other, and to that where nothing is padded."""
    device = next(original.parameters()).device
    captured, unpadded = {descriptor.num_tokens for _, descriptor in runner.plan.keys}, True
    for step, size in enumerate((1, 2, 8, 3, 5, 1)):
        inputs = step_inputs(size, step=step)
        uniform = runner.verify(Batch(size, size, 1), **inputs).clone()
        assert runner.last_dispatch.mode is GraphMode.FULL
        mixed = runner.verify(Batch(size, size), **inputs).clone()
        assert runner.last_dispatch.mode is GraphMode.PIECEWISE
        with torch.no_grad():
            eager = original(**{name: each.to(device) for name, each in inputs.items()})
        if exact:
            assert torch.equal(uniform, mixed)
        # Once a step was padded the caches differ in their last bits.
        unpadded = unpadded and size in captured
        if exact and unpadded:
            assert torch.equal(uniform, eager)
        torch.testing.assert_close(mixed.cpu(), eager.cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(uniform.cpu(), eager.cpu(), rtol=1e-4, atol=1e-4)
