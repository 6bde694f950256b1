"""A decoder like Llama or Qwen3 over a paged KV cache, with the names of Hugging Face.

A step has one flat row of tokens: those of all requests, one request after the other. Shapes are
static and nothing asks the host, so a step can be a graph. Attention is a backend of graphrt: its
`attend` is an eager break, at which piecewise graphs are cut.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphrt.attention import AttentionBackend, AttentionStep

Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer: [pages, page_size, kv_heads, head_dim] each."""


@dataclass(frozen=True)
class DecoderConfig:
    """Names as in config.json of Hugging Face; `qk_norm` is Qwen3's."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = RmsNorm(dim, config.rms_norm_eps)
            self.k_norm = RmsNorm(dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [tokens, heads, head_dim] each."""
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Cache,
        slot_mapping: Tensor,
        attention: AttentionBackend,
        step: AttentionStep,
    ) -> Tensor:
        query, *new = self.self_attn.project(self.input_layernorm(hidden), *rope)
        for rows, pages in zip(new, cache, strict=True):
            pages.flatten(0, 1).index_copy_(0, slot_mapping, rows)
        attended = attention.attend(step, query, *cache)
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        finished: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return finished


class Backbone(nn.Module):
    def __init__(self, config: DecoderConfig, layers: list[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """`forward` is the step that graphs hold. `logits` is called on the few rows that need it."""

    def __init__(self, config: DecoderConfig, layers: list[Layer] | None = None) -> None:
        super().__init__()
        if layers is None:
            layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.config = config
        self.model = Backbone(config, layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        attention: AttentionBackend,
        caches: list[Cache],
        rope: Tensor,
        *,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
    ) -> Tensor:
        """Hidden states [tokens, hidden_size]. `rope` is that of `rotations`."""
        step = attention.begin(block_table, context_lens, query_start_loc=query_start_loc)
        cos, sin = rope.index_select(1, positions)[:, :, None].unbind()
        hidden = self.model.embed_tokens(input_ids)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            hidden = layer(hidden, (cos, sin), cache, slot_mapping, attention, step)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab_size]"""
        return F.linear(hidden, self.lm_head.weight).float()

    def first_layers(self, count: int) -> Decoder:
        """A draft model: the first layers of this one, with the same weights in the same memory."""
        draft = Decoder(self.config, list(self.model.layers[:count]))  # type: ignore[arg-type]
        draft.model.embed_tokens, draft.model.norm = self.model.embed_tokens, self.model.norm
        draft.lm_head = self.lm_head
        return draft.eval()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim]; `cos` and `sin` are [tokens, 1, dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotations(config: DecoderConfig, length: int, like: Tensor) -> Tensor:
    """Cosines and sines of all positions: [2, length, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, device=like.device) / config.head_dim
    angles = torch.arange(length, device=like.device)[:, None] * config.rope_theta**-exponents
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def seeded(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A model with random weights: its text is noise, and the same at every start."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config).requires_grad_(False).eval()


def load(directory: Path, dtype: torch.dtype) -> Decoder:
    """A checkpoint of Llama or Qwen3 as Hugging Face writes it; others are refused."""
    from safetensors.torch import load_file

    settings: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = settings.pop("rope_parameters", None) or settings.pop("rope_scaling", None) or {}
    kind = settings["model_type"]
    plain = kind in ("llama", "qwen3") and rope.get("rope_type", "default") == "default"
    if not plain or settings.get("attention_bias") or settings.get("use_sliding_window"):
        raise ValueError(f"{directory}: only plain Llama and Qwen3 are known, not this {kind}")
    heads = settings["num_attention_heads"]
    known = DecoderConfig.__dataclass_fields__.keys() & settings.keys()
    shape = {"head_dim": settings["hidden_size"] // heads, "qk_norm": kind == "qwen3"}
    shape |= {name: settings[name] for name in known if settings[name] is not None}
    if "rope_theta" in rope:
        shape["rope_theta"] = rope["rope_theta"]
    model = Decoder(DecoderConfig(**shape)).to(dtype)
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    if model.config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights)
    return model.requires_grad_(False).eval()
