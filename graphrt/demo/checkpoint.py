"""Weights: a local Hugging Face Llama or Qwen3 checkpoint, or a small seeded model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphrt.core.base import CheckpointError
from graphrt.demo.layer import DecoderConfig
from graphrt.demo.model import tensor_shapes

BEGIN, END = 256, 257
"""The tokens of the seeded model that are not bytes."""
_ARCHITECTURES = ["LlamaForCausalLM"], ["Qwen3ForCausalLM"]
_WIDTHS = "vocab_size", "hidden_size", "intermediate_size"
_COUNTS = "num_hidden_layers", "num_attention_heads"
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
_ROPE_KEYS = {"default": (), "linear": _LLAMA3[:1], "llama3": _LLAMA3}


@dataclass(frozen=True)
class Checkpoint:
    """What a decoder is built from; `weights` are named by `tensor_shapes(config)`."""

    config: DecoderConfig
    weights: dict[str, Tensor]
    eos_ids: frozenset[int]


def seeded_checkpoint(seed: int = 0) -> Checkpoint:
    """Four float32 layers, hidden 128, grouped queries, bytes as tokens; the same for a seed."""
    config = DecoderConfig(258, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        # Gains above the usual ones: with those, greedy sampling soon repeats one token.
        weight = torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)
        weights[name] = weight if len(shape) > 1 else torch.ones(shape)
    # Of all bytes only these are ever sampled, so that the text can be printed.
    silent = sorted(set(range(config.vocab_size)) - set(b" abcdefghijklmnopqrstuvwxyz"))
    weights["lm_head.weight"][silent] = 0
    return Checkpoint(config, weights, frozenset({END}))


def load_checkpoint(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read config.json and model.safetensors, or its shards; the weights as `dtype` on the CPU.

    Raises `CheckpointError`, which names the file and what is missing or wrong in it.
    """
    path, generation = directory / "config.json", directory / "generation_config.json"
    raw = _read_json(path, architectures=list)
    stop = {**raw, **(_read_json(generation) if generation.exists() else {})}.get("eos_token_id")
    eos_ids = frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])
    config = _decoder_config(raw, path)
    return Checkpoint(config, _read_weights(directory, config, dtype), eos_ids)


def _read_json(path: Path, **required: type) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", advice="a checkpoint's directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON", got=error) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object", got=type(raw).__name__)
    for key, kind in required.items():
        if not isinstance(raw.get(key), kind):
            raise CheckpointError(f"{path}: bad or missing {key!r}", expected=kind.__name__)
    return raw


def _decoder_config(raw: dict[str, Any], path: Path) -> DecoderConfig:
    def number(key: str, default: float | None = None, kind: type[int] | type[float] = int) -> Any:
        value = default if (raw | rope).get(key) is None else (raw | rope)[key]
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
            expected = f"a positive {kind.__name__}"
            raise CheckpointError(f"{path}: bad or missing {key!r}", got=value, expected=expected)
        return value

    def check(key: str, value: object, *allowed: object) -> None:
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{path}: unsupported {key!r}", got=value, expected=expected)

    # Newer configs hold theta and scaling together, as rope_parameters.
    rope: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    check("rope_scaling", type(rope), dict)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check("architectures", raw["architectures"], *_ARCHITECTURES)
    check("hidden_act", raw.get("hidden_act"), "silu", None)
    check("quantization_config", raw.get("quantization_config"), None)
    check("rope_scaling", rope_type, *_ROPE_KEYS)
    vocab, hidden, inner, layers, heads = map(number, _WIDTHS + _COUNTS)
    kv_heads, head_dim = number("num_key_value_heads", heads), number("head_dim", hidden // heads)
    check("num_key_value_heads", kv_heads, *(n for n in range(1, heads + 1) if heads % n == 0))
    check("head_dim", head_dim % 2, 0)
    scaling = tuple(number(key, kind=float) for key in _ROPE_KEYS[rope_type])
    return DecoderConfig(
        vocab, hidden, inner, layers, heads, kv_heads, head_dim,
        number("rope_theta", 10_000.0, float), scaling + DecoderConfig.rope_scaling[len(scaling) :],
        number("rms_norm_eps", 1e-6, float), bool(raw.get("tie_word_embeddings")),
        bool(raw.get("attention_bias")), bool(raw.get("mlp_bias")),
        qk_norm=raw["architectures"] == _ARCHITECTURES[1],
    )  # fmt: skip


def _read_weights(directory: Path, config: DecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    listing, files = directory / "model.safetensors", ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if index.exists() and not listing.exists():
        names = _read_json(index, weight_map=dict)["weight_map"]
        listing, files = index, sorted({str(file) for file in names.values()})
    shapes, weights = tensor_shapes(config), {}
    for path in (directory / file for file in files):
        try:
            with safe_open(path, framework="pt") as tensors:
                found = {name: tensors.get_tensor(name) for name in shapes.keys() & tensors.keys()}
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing", expected=f"it, by {listing}") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is no readable safetensors file", got=error) from error
        for name, tensor in found.items():
            got, expected = tuple(tensor.shape), shapes[name]
            if got != expected:
                raise CheckpointError(f"{path}: shape of {name!r}", got=got, expected=expected)
            weights[name] = tensor.to(dtype)
    for name, shape in shapes.items():
        if name not in weights:
            raise CheckpointError(f"{listing} has no tensor {name!r}", expected=f"shape {shape}")
    return weights
