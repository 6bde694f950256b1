"""A Llama-type decoder with a paged KV cache: static shapes and no host sync in its forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrt import current_context, eager_break
from graphrt.demo.layer import (
    DecoderConfig,
    LayerWeights,
    attend_grouped,
    finish,
    project,
    rms_norm,
    rotations,
)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in Hugging Face) and shape of every weight."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    attention["o_proj"] = (hidden, q)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in (f"model.layers.{index}." for index in range(config.num_layers)):
        groups = ("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)
        for group, linears, bias in groups:
            for name, shape in linears.items():
                shapes[f"{layer}{group}.{name}.weight"] = shape
                if bias:
                    shapes[f"{layer}{group}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[f"{layer}self_attn.{norm}.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    head = {} if config.tied_embeddings else {"lm_head.weight": (config.vocab_size, hidden)}
    return shapes | head


def new_cache(config: DecoderConfig, num_pages: int, page_size: int, like: Tensor) -> Tensor:
    """Zeros [layers, 2, num_pages, page_size, kv_heads, head_dim]; padding writes to page 0."""
    shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
    return like.new_zeros(shape)


@eager_break
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    slot_mapping: Tensor, context_pages: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Write this step's keys and values, then attend: [tokens, heads * head_dim].

    `query` is [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim], the caches
    [pages, page_size, kv_heads, head_dim], `slot_mapping` int64 [tokens], `context_pages` int64
    [tokens * max_blocks] and `visible` bool [tokens, 1, 1, context].

    Every token gathers the pages of its own request, so that decode, prefill and mixed batches
    are one static shape, at the price of tokens * context of traffic.
    """
    tokens, kv_heads, head_dim = key.shape
    write_cache(key, value, key_cache, value_cache, slot_mapping)
    keys = key_cache.index_select(0, context_pages).view(tokens, -1, kv_heads, head_dim)
    values = value_cache.index_select(0, context_pages).view(tokens, -1, kv_heads, head_dim)
    return attend_grouped(query, keys.transpose(1, 2), values.transpose(1, 2), visible)


def write_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Put this step's keys and values into their slots."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *new.shape[1:]).index_copy_(0, slot_mapping, new)


class DecodeAttention(Protocol):
    """A device's own attention operator for batches of one token a request."""

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor
    ) -> Tensor: ...

    def updates(self, context_lens: Sequence[int]) -> dict[str, Any]: ...


def _is_decode() -> bool:
    context = current_context()
    if context is None or context.descriptor is None or context.updates is None:
        return False
    return context.descriptor.uniform and context.descriptor.query_len == 1


class Decoder:
    """A decoder's forward, for inference: its weights are the caller's, and are never written."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], context: int,
        decode_attention: DecodeAttention | None = None,
    ) -> None:  # fmt: skip
        """`weights` as named by `tensor_shapes`; `context` is page_size * max_blocks tokens."""
        self.config = config
        self.decode_attention = decode_attention
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [layer_weights(config, weights, index) for index in range(config.num_layers)]
        self.norm = weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.context = torch.arange(context, device=self.embedding.device)
        self.rope = rotations(config, self.context, self.embedding.dtype)

    def __call__(
        self, cache: Tensor, *, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor,
        block_table: Tensor, query_start_loc: Tensor,
    ) -> Tensor:  # fmt: skip
        """Logits [reqs, vocab] of the last token of each request.

        `cache` as `new_cache` makes it; `input_ids`, `positions` and `slot_mapping` int64 [tokens],
        `block_table` int64 [reqs, max_blocks], `query_start_loc` int32 [reqs + 1].
        """
        ends = query_start_loc[1:]
        token = torch.arange(len(input_ids), dtype=ends.dtype, device=ends.device)
        # Padding tokens are behind the last end: they read the last row and write the dummy page.
        request = torch.searchsorted(ends, token, right=True).clamp(max=len(block_table) - 1)
        pages = block_table.index_select(0, request).flatten()
        visible = (self.context <= positions[:, None])[:, None, None]
        cos, sin = self.rope.index_select(1, positions)[:, :, None]
        hidden = self.embedding.index_select(0, input_ids)
        fused = self.decode_attention if _is_decode() else None
        for index, (layer, (keys, values)) in enumerate(zip(self.layers, cache, strict=True)):
            query, key, value = project(layer, self.config, hidden, cos, sin)
            if fused is not None:
                write_cache(key, value, keys, values, slot_mapping)
                attended = fused(index, query, keys, values, block_table)
            else:
                attended = paged_attention(
                    query, key, value, keys, values, slot_mapping, pages, visible
                )
            hidden = finish(layer, self.config, hidden, attended)
        last = hidden.index_select(0, (ends - 1).clamp(min=0))
        return F.linear(rms_norm(last, self.norm, self.config.rms_eps), self.head)


def layer_weights(config: DecoderConfig, weights: Mapping[str, Tensor], index: int) -> LayerWeights:
    """The weights of layer `index`; those that one product uses are joined in one tensor."""

    def fused(name: str, *parts: str) -> dict[str, Tensor]:
        biases = [of_layer[f"{part}.bias"] for part in parts if f"{part}.bias" in of_layer]
        weights = {name: torch.cat([of_layer[f"{part}.weight"] for part in parts])}
        return weights | ({f"{name}_bias": torch.cat(biases)} if biases else {})

    prefix = f"model.layers.{index}."
    of_layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    return LayerWeights(
        input_norm=of_layer["input_layernorm.weight"],
        mlp_norm=of_layer["post_attention_layernorm.weight"],
        q_norm=of_layer.get("self_attn.q_norm.weight"),
        k_norm=of_layer.get("self_attn.k_norm.weight"),
        **fused("qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        **fused("out", "self_attn.o_proj"),
        **fused("gate_up", "mlp.gate_proj", "mlp.up_proj"),
        **fused("down", "mlp.down_proj"),
    )
