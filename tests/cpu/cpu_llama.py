"""A four-layer Llama-like model with a paged KV cache, small enough to capture in a test."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


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


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, slots: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.widths = [heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.qkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.register_buffer("keys", torch.zeros(slots, kv_heads, self.head_dim))
        self.register_buffer("values", torch.zeros(slots, kv_heads, self.head_dim))

    def forward(self, x, cos, sin, slots, context, mask):
        tokens = x.shape[0]
        q, k, v = self.qkv(x).split(self.widths, -1)
        q = rope(q.view(tokens, self.heads, self.head_dim), cos, sin)
        k = rope(k.view(tokens, self.kv_heads, self.head_dim), cos, sin)
        self.keys.index_put_((slots,), k)
        self.values.index_put_((slots,), v.view(tokens, self.kv_heads, self.head_dim))
        keys = self.keys[context].transpose(1, 2)
        values = self.values[context].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return self.o(out.reshape(tokens, -1))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, slots: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads, slots)
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, *rest):
        x = x + self.attention(self.norm1(x), *rest)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(
        self, layers: int = 4, dim: int = 64, heads: int = 4, pages: int = 32, page: int = 4
    ) -> None:
        super().__init__()
        self.page = page
        self.embed = nn.Embedding(128, dim)
        self.layers = nn.ModuleList(
            Layer(dim, heads, heads // 2, pages * page) for _ in range(layers)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 128, bias=False)
        half = torch.arange(0, dim // heads, 2) / (dim // heads)
        angles = torch.outer(torch.arange(pages * page).float(), 10000**-half)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, ids, positions, slots, block_table, lengths):
        x = self.embed(ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        context = (block_table.unsqueeze(-1) * self.page + torch.arange(self.page)).flatten(1)
        mask = (torch.arange(context.shape[1]) < lengths.unsqueeze(1))[:, None, None, :]
        for layer in self.layers:
            x = layer(x, cos, sin, slots, context, mask)
        return self.head(self.norm(x))


def step_inputs(batch: int, step: int, pages: int = 4, page: int = 4) -> list[torch.Tensor]:
    table = torch.arange(batch * pages).view(batch, pages)
    position = step % (pages * page)
    positions = torch.full((batch,), position)
    slots = table[:, position // page] * page + position % page
    return [torch.randint(0, 128, (batch,)), positions, slots, table, positions + 1]
