"""A layer of a Llama-type decoder around its attention: functions of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Llama-type decoder; names as in Hugging Face, shortened.

    `rope_scaling` is the factor, the low and high frequency factors and the original context of
    `llama3`; an original context of 0 stretches all frequencies alike, which is `linear`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, float] = (1.0, 1.0, 4.0, 0.0)
    rms_eps: float = 1e-6
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, [out, in] each: `qkv` and `gate_up` are those of their parts in a row.

    The functions here take anything that has these attributes, a module among them.
    """

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def project(
    layer: LayerWeights, config: DecoderConfig, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]."""
    eps = config.rms_eps
    qkv = F.linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    query, key, value = qkv.view(len(hidden), -1, config.head_dim).split_with_sizes(sizes, 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        query, key = rms_norm(query, layer.q_norm, eps), rms_norm(key, layer.k_norm, eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """[tokens, heads * head_dim] of each token of `query` [tokens, heads, head_dim] over its own
    keys and values [tokens, kv_heads, context, head_dim]; `visible` is bool [tokens, 1, 1,
    context]."""
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # The heads of one group are the "sequence" here: grouped queries need no repeated keys.
    grouped = query.view(tokens, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
    return attended.reshape(tokens, heads * head_dim)


def finish(layer: LayerWeights, config: DecoderConfig, hidden: Tensor, attended: Tensor) -> Tensor:
    """`hidden` [tokens, hidden_size] with the attention and the SwiGLU MLP added."""
    hidden = hidden + F.linear(attended, layer.out, layer.out_bias)
    normed = rms_norm(hidden, layer.mlp_norm, config.rms_eps)
    gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` over its root mean square in the last dimension, times `weight`."""
    return F.rms_norm(hidden, weight.shape, weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, the halves of a head as pairs; `cos` and `sin` are [tokens, 1, dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotations(config: DecoderConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines: `dtype` [2, len(positions), head_dim / 2]."""
    angles = positions[:, None] * rope_frequencies(config).to(positions.device)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [head_dim / 2]: radians per position."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    frequencies = 1.0 / config.rope_theta**exponents
    factor, low, high, original_context = config.rope_scaling
    turns = original_context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)
