"""Weights: a local Hugging Face Llama or Qwen3 checkpoint, or a small seeded model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphrt.core.base.errors import CheckpointError
from graphrt.core.base.files import read_bounded
from graphrt.core.base.option_values import shown
from graphrt.demo.layer import DecoderConfig
from graphrt.demo.model import tensor_shapes

BEGIN, END = 256, 257
"""The tokens of the seeded model that are not bytes."""
_ARCHITECTURES = ["LlamaForCausalLM"], ["Qwen3ForCausalLM"]
_WIDTHS = "vocab_size", "hidden_size", "intermediate_size"
_COUNTS = "num_hidden_layers", "num_attention_heads"
_MOST_COUNTS, _MOST_WIDTH = 1 << 12, 1 << 31
"""The most layers or heads, and the most of any other number: far above any model's."""
_MOST_BYTES = 1 << 26
"""The most bytes of a JSON file."""
_SHARD = re.compile(r"\w[\w.\-]*\.safetensors")
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
_ROPE_KEYS = {"default": (), "linear": _LLAMA3[:1], "llama3": _LLAMA3}


@dataclass(frozen=True)
class Checkpoint:
    """The config and weights of a decoder; `weights` are named by `tensor_shapes(config)`."""

    config: DecoderConfig
    weights: dict[str, Tensor]
    eos_ids: frozenset[int]


def seeded_checkpoint(seed: int = 0, head_dim: int = 32) -> Checkpoint:
    """Four float32 layers, hidden 128, grouped queries, bytes as tokens; the same for a seed."""
    config = DecoderConfig(
        258, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=head_dim
    )
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        # Gains above the usual ones: with those, greedy sampling soon repeats one token.
        weight = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * (
            2.0 / shape[-1] ** 0.5
        )
        weights[name] = (
            weight if len(shape) > 1 else torch.ones(shape, dtype=torch.float32, device="cpu")
        )
    # Of all bytes only these are ever sampled, so that the text can be printed.
    silent = sorted(set(range(config.vocab_size)) - set(b" abcdefghijklmnopqrstuvwxyz"))
    weights["lm_head.weight"][silent] = 0
    return Checkpoint(config, weights, frozenset({END}))


def load_checkpoint(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read config.json and model.safetensors, or its shards; the weights as `dtype` on the CPU.

    Nothing outside of `directory` is read, whatever the files or links in it say. Raises
    `CheckpointError`, which names the file and what is missing or wrong in it.
    """
    path, generation = directory / "config.json", directory / "generation_config.json"
    raw = _read_json(path, architectures=list)
    stop = {**raw, **(_read_json(generation) if generation.exists() else {})}.get("eos_token_id")
    eos_ids = _eos_ids(stop, path)
    config = _decoder_config(raw, path)
    return Checkpoint(config, _read_weights(directory, config, dtype), eos_ids)


def _eos_ids(stop: object, path: Path) -> frozenset[int]:
    ids = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(type(each) is int for each in ids):
        expected = "an int or a list of them"
        raise CheckpointError(f"{path}: bad 'eos_token_id'", got=shown(stop), expected=expected)
    return frozenset(ids)


def _read_json(path: Path, **required: type) -> dict[str, Any]:
    try:
        raw = json.loads(read_bounded(inside(path.parent, path.name), _MOST_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing",
            expected="a local directory with a Hugging Face checkpoint",
            advice="leave --model out for a small seeded one",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
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
        most = _MOST_COUNTS if key in _COUNTS else _MOST_WIDTH
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most:  # type: ignore[operator]
            expected = f"a positive {kind.__name__}, at most {most}"
            raise CheckpointError(
                f"{path}: bad or missing {key!r}", got=shown(value), expected=expected
            )
        return value

    def check(key: str, value: object, *allowed: object) -> None:
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            got = shown(value)
            raise CheckpointError(f"{path}: unsupported {key!r}", got=got, expected=expected)

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


def _shards(names: Collection[object], index: Path) -> list[str]:
    """The files that an index names: plain names, as a path could lead out of the directory."""
    for name in names:
        if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
            raise CheckpointError(
                f"{index} names a file that is none of this directory",
                got=shown(name),
                expected="plain names such as model-00001-of-00002.safetensors",
                advice="download the checkpoint again, from where you trust it",
            )
    return sorted(set(map(str, names)))


def inside(directory: Path, name: str) -> Path:
    """The regular file `name` of a checkpoint's directory.

    Links may lead to other files of it, or from a snapshot of a Hugging Face cache to the blobs
    beside it; raises `CheckpointError` for any other, and for what is no file (a device, a pipe),
    and `FileNotFoundError` for none.
    """
    path, home = directory / name, directory.resolve()
    try:
        target = path.resolve(strict=True)
    except RuntimeError as error:
        # `resolve` raises it for links that lead to one another.
        raise CheckpointError(f"{path} leads nowhere", got=error, expected="a file") from error
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and target.parent != blobs:
        raise CheckpointError(
            f"{path} leads out of its directory",
            got=target,
            expected=f"a file in {home}",
            advice="copy the file there, if it belongs to the checkpoint",
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is no regular file", got=target, expected="a file")
    return target


def _read_weights(directory: Path, config: DecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    # Not at import: the seeded model runs without this package.
    from safetensors import SafetensorError, safe_open

    listing, files = directory / "model.safetensors", ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if index.exists() and not listing.exists():
        names = _read_json(index, weight_map=dict)["weight_map"]
        listing, files = index, _shards(names.values(), index)
    shapes, weights = tensor_shapes(config), {}
    for path in (directory / file for file in files):
        try:
            with safe_open(inside(directory, path.name), framework="pt") as tensors:
                wanted = shapes.keys() & tensors.keys()
                # Before anything is read: a sparse file may claim tensors of any size.
                stored_shapes = {
                    name: tuple(tensors.get_slice(name).get_shape()) for name in wanted
                }
                for name, got in stored_shapes.items():
                    if got != (expected := shapes[name]):
                        raise CheckpointError(
                            f"{path}: shape of {name!r}", got=got, expected=expected
                        )
                weights.update({name: tensors.get_tensor(name).to(dtype) for name in wanted})
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing", expected=f"it, by {listing}") from error
        except (OSError, RuntimeError, SafetensorError) as error:
            # RuntimeError: torch could not map the file.
            raise CheckpointError(f"{path} is no readable safetensors file", got=error) from error
    for name, shape in shapes.items():
        if name not in weights:
            raise CheckpointError(f"{listing} has no tensor {name!r}", expected=f"shape {shape}")
    return weights
