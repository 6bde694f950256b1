"""Tiny checkpoints on disk, and a full-sequence forward written the way Hugging Face does it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from graphrt.demo import DecoderConfig, tensor_shapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 2,
}
LLAMA3 = LLAMA | {
    "rope_theta": 500000.0,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
LINEAR = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 5],
}
QWEN3_NEW = {key: value for key, value in QWEN3.items() if key != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}
}
CONFIGS = {
    "llama": LLAMA, "llama3": LLAMA3, "linear": LINEAR, "qwen3": QWEN3, "qwen3_new": QWEN3_NEW,
}  # fmt: skip


def decoder_config(raw: dict) -> DecoderConfig:
    """What `load_checkpoint` should read out of `raw`."""
    scaling = raw.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    rope = {"linear": (2.0, 1.0, 4.0, 0.0), "llama3": (8.0, 1.0, 4.0, 64)}
    return DecoderConfig(
        raw["vocab_size"], raw["hidden_size"], raw["intermediate_size"],
        raw["num_hidden_layers"], raw["num_attention_heads"], raw["num_key_value_heads"],
        raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"]),
        rope_theta=raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"],
        rope_scaling=rope.get(kind, (1.0, 1.0, 4.0, 0.0)),
        rms_eps=raw["rms_norm_eps"],
        tied_embeddings=raw["tie_word_embeddings"],
        attention_bias=raw["attention_bias"],
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=raw["model_type"] == "qwen3",
    )  # fmt: skip


def random_weights(raw: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in tensor_shapes(decoder_config(raw)).items()
    }


def write(
    directory: Path, raw: dict, weights: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> dict[str, torch.Tensor]:
    """A checkpoint as Hugging Face lays it out; returns its weights."""
    weights = random_weights(raw) if weights is None else weights
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return weights
    where = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, directory / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def reference_logits(raw: dict, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] logits of one whole sequence, in float64, with no cache at all."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    dim = raw.get("head_dim", raw["hidden_size"] // heads)
    length = len(ids)

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * weight

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    angles = torch.arange(length).double()[:, None] * _frequencies(raw, dim)
    cos, sin = (torch.cat((f, f), -1)[None] for f in (angles.cos(), angles.sin()))

    def rotate(x):
        half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
        return x * cos + half * sin

    x = w["model.embed_tokens.weight"][ids]
    causal = torch.ones(length, length).tril().bool()
    for index in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        h = norm(x, w[f"{layer}input_layernorm.weight"])
        q, k, v = (
            linear(h, f"{layer}self_attn.{name}_proj").view(length, -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        if raw["model_type"] == "qwen3":
            q = norm(q, w[f"{layer}self_attn.q_norm.weight"])
            k = norm(k, w[f"{layer}self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k).repeat_interleave(heads // kv_heads, 0)
        v = v.repeat_interleave(heads // kv_heads, 0)
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(~causal, -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + linear(attended, f"{layer}self_attn.o_proj")
        h = norm(x, w[f"{layer}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(linear(h, f"{layer}mlp.gate_proj"))
        x = x + linear(gate * linear(h, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


def _frequencies(raw: dict, dim: int) -> torch.Tensor:
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    inverse = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = raw.get("rope_scaling", {})
    if scaling.get("type") == "linear":
        inverse = [f / scaling["factor"] for f in inverse]
    if scaling.get("rope_type") == "llama3":
        inverse = [_llama3(f, scaling) for f in inverse]
    return torch.tensor(inverse, dtype=torch.float64)


def _llama3(frequency: float, scaling: dict) -> float:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * torch.pi / frequency
    if wavelength < old / high:
        return frequency
    if wavelength > old / low:
        return frequency / factor
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
