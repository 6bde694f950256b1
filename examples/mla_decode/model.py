"""A DeepSeek-V2-type decoder over a paged cache of latents, with random weights.

Its attention is multi-head latent attention with the up-projections absorbed: keys and values are
never made, every head attends to the one vector that is cached for a token. The MLPs are dense in
every layer (no mixture of experts), and queries are not compressed, as in DeepSeek-V2-Lite. All
shapes are static and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrt import InputSpec
from graphrt.attention import AttentionBackend, LatentShape

EPS, THETA = 1e-6, 10_000.0


@dataclass(frozen=True)
class MlaConfig:
    """The shape of the decoder: a head has `nope + rope` numbers in its query, `value` in its
    output, and `rank + rope` are cached for a token."""

    layers: int
    hidden: int
    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    intermediate: int
    vocab: int

    def shape(self, page_size: int) -> LatentShape:
        """The shape for an attention backend; the scale is of the heads before absorption."""
        scale = (self.nope + self.rope) ** -0.5
        return LatentShape(self.heads, self.rank, self.rope, page_size, scale)


PRESETS = {
    "lite": MlaConfig(61, 2048, 16, 512, 64, 128, 128, 10944, 102400),
    "tiny": MlaConfig(3, 64, 4, 32, 16, 16, 16, 96, 128),
}


class MlaDecoder:
    """Inference only; `context` is the longest one, for the table of rotations."""

    def __init__(self, config: MlaConfig, context: int, device: str, dtype: torch.dtype) -> None:
        self.config = config
        random = torch.Generator(device).manual_seed(0)

        def new(*shape: int, std: float | None = None) -> Tensor:
            weight = torch.empty(shape, device=device, dtype=dtype)
            return weight.normal_(0, shape[-1] ** -0.5 if std is None else std, generator=random)

        self.embedding = new(config.vocab, config.hidden, std=1)
        self.layers = [MlaLayer(config, new) for _ in range(config.layers)]
        self.norm = torch.ones_like(self.embedding[0])
        self.head = new(config.vocab, config.hidden)
        exponents = torch.arange(0, config.rope, 2, device=device) / config.rope
        angles = torch.arange(context, device=device)[:, None] * THETA**-exponents
        self.rotations = torch.stack((angles.cos(), angles.sin())).to(dtype)

    def new_cache(self, num_pages: int, page_size: int) -> Tensor:
        """Zeros [layers, pages, page_size, rank + rope]; padding writes to page 0."""
        width = self.config.rank + self.config.rope
        return self.embedding.new_zeros(self.config.layers, num_pages, page_size, width)

    def inputs(self, max_blocks: int) -> dict[str, InputSpec]:
        """The input specs of `__call__`, for a runner."""
        return {
            "input_ids": InputSpec(torch.int64, ("tokens",)),
            "positions": InputSpec(torch.int64, ("tokens",)),
            "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
            "block_table": InputSpec(torch.int32, ("reqs", max_blocks), pad=0, index=True),
            "context_lens": InputSpec(torch.int32, ("reqs",), pad=0),
            "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
        }

    def __call__(
        self, attention: AttentionBackend, cache: Tensor, *, input_ids: Tensor, positions: Tensor,
        slot_mapping: Tensor, block_table: Tensor, context_lens: Tensor, query_start_loc: Tensor,
    ) -> Tensor:  # fmt: skip
        """Logits [tokens, vocab]; inputs as `inputs` says, the cache as of `new_cache`."""
        step = attention.begin(block_table, context_lens, query_start_loc=query_start_loc)
        cos, sin = self.rotations.index_select(1, positions)
        hidden = self.embedding.index_select(0, input_ids)
        for layer, latents in zip(self.layers, cache.unbind(), strict=True):
            query, latent = layer.project(hidden, cos, sin)
            latents.flatten(0, 1).index_copy_(0, slot_mapping, latent)
            hidden = layer.finish(hidden, attention.attend(step, query, latents))
        return F.linear(rms_norm(hidden, self.norm), self.head)


class MlaLayer:
    """The projections before the attention of one layer, and the output and MLP after it.

    `up_key` [heads, nope, rank] and `up_value` [heads, rank, value] are the two halves of the
    matrix that makes keys and values from latents.
    """

    def __init__(self, config: MlaConfig, new: Callable[..., Tensor]) -> None:
        self.config = config
        hidden, heads, inner = config.hidden, config.heads, config.intermediate
        # Small outputs keep the hidden states near the size of the embeddings in any depth.
        small = (2 * config.layers) ** -0.5
        self.query = new(heads * (config.nope + config.rope), hidden)
        self.down_latent = new(config.rank + config.rope, hidden)
        self.up_key = new(heads, config.nope, config.rank)
        self.up_value = new(heads, config.rank, config.value, std=config.rank**-0.5)
        self.out = new(hidden, heads * config.value) * small
        self.gate_up = new(2 * inner, hidden)
        self.down = new(hidden, inner) * small
        self.latent_norm = torch.ones_like(self.down_latent[: config.rank, 0])
        self.norm = torch.ones_like(self.query[0])
        self.mlp_norm = torch.ones_like(self.query[0])

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The absorbed query [tokens, heads, rank + rope], and the vector to cache [tokens, rank +
        rope], of `hidden` [tokens, hidden]; `cos` and `sin` are [tokens, rope / 2]."""
        config = self.config
        normed = rms_norm(hidden, self.norm)
        query = F.linear(normed, self.query).unflatten(-1, (config.heads, -1))
        nope, rope = query.split((config.nope, config.rope), dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self.up_key).transpose(0, 1)
        rotated = rotate(rope, cos[:, None], sin[:, None])
        latent, key = F.linear(normed, self.down_latent).split((config.rank, config.rope), dim=-1)
        cached = torch.cat((rms_norm(latent, self.latent_norm), rotate(key, cos, sin)), dim=-1)
        return torch.cat((absorbed, rotated), dim=-1), cached

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` with the attention [tokens, heads, rank] and the SwiGLU MLP added."""
        values = torch.bmm(attended.transpose(0, 1), self.up_value).transpose(0, 1)
        hidden = hidden + F.linear(values.flatten(1), self.out)
        gate, up = F.linear(rms_norm(hidden, self.mlp_norm), self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down)


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, EPS)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
