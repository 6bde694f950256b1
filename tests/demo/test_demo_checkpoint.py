"""Checkpoints: what is written is read, and what cannot be read is named."""

from __future__ import annotations

import json

import pytest
import torch

from graphrt.core.base.errors import CheckpointError
from graphrt.demo import load_checkpoint, seeded_checkpoint
from tests.demo.tiny_checkpoints import CONFIGS, LLAMA, QWEN3, decoder_config, random_weights, write


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_written_checkpoint_loads_with_equal_config_and_weights(tmp_path, name, shards):
    weights = write(tmp_path, CONFIGS[name], shards=shards)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == decoder_config(CONFIGS[name])
    assert checkpoint.weights.keys() == weights.keys()
    assert all(torch.equal(checkpoint.weights[key], weights[key]) for key in weights)


def test_load_checkpoint_converts_dtype_and_reads_eos_ids(tmp_path):
    write(tmp_path / "one", LLAMA)
    write(tmp_path / "many", QWEN3)
    (tmp_path / "many" / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    checkpoint = load_checkpoint(tmp_path / "one", torch.bfloat16)
    assert {weight.dtype for weight in checkpoint.weights.values()} == {torch.bfloat16}
    assert checkpoint.eos_ids == {2}
    assert load_checkpoint(tmp_path / "many").eos_ids == {7, 8}


def test_seeded_weights_are_equal_for_equal_seeds_only():
    one, two, other = seeded_checkpoint(3), seeded_checkpoint(3), seeded_checkpoint(4)
    assert all(torch.equal(one.weights[key], two.weights[key]) for key in one.weights)
    name = "model.embed_tokens.weight"
    assert not torch.equal(one.weights[name], other.weights[name])


CONFIG_ERRORS = {
    "architecture": (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    "no architecture": (LLAMA | {"architectures": None}, "architectures"),
    "no size": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size"),
    "size as text": (LLAMA | {"vocab_size": "300"}, "vocab_size"),
    "negative size": (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
    "quantized": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "heads": (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd head": (LLAMA | {"head_dim": 7}, "head_dim"),
    "rope type": (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
    "rope factor": (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "rope not a dict": (LLAMA | {"rope_scaling": "linear"}, "rope_scaling"),
    "not an object": ([], "JSON object"),
}


@pytest.mark.parametrize(("raw", "key"), CONFIG_ERRORS.values(), ids=CONFIG_ERRORS)
def test_an_invalid_checkpoint_config_names_the_file_and_key(tmp_path, raw, key):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert key in str(caught.value)


def rewritten(directory, name, content):
    (directory / name).write_bytes(content)


def without(name):
    return {key: value for key, value in random_weights(LLAMA).items() if key != name}


LAST = "model.layers.1.mlp.down_proj.weight"
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
FILE_ERRORS = {
    "no config": (1, lambda d: (d / "config.json").unlink(), "config.json", "missing"),
    "broken config": (1, lambda d: rewritten(d, "config.json", b"{"), "config.json", "JSON"),
    "binary config": (1, lambda d: rewritten(d, "config.json", b"\xff\xfe"), "config.json", "JSON"),
    "no weights": (1, lambda d: (d / "model.safetensors").unlink(), "model.safetensors", "missing"),
    "broken weights": (
        1,
        lambda d: rewritten(d, "model.safetensors", b"12345678900"),
        "model.safetensors",
        "no readable",
    ),
    "truncated weights": (
        1,
        lambda d: rewritten(d, "model.safetensors", (d / "model.safetensors").read_bytes()[:-8]),
        "model.safetensors",
        "no readable",
    ),
    "missing tensor": (1, lambda d: write(d, LLAMA, without(LAST)), "model.safetensors", LAST),
    "untied without head": (
        1,
        lambda d: write(d, LLAMA, without("lm_head.weight")),
        "model.safetensors",
        "lm_head.weight",
    ),
    "wrong shape": (
        1,
        lambda d: write(d, LLAMA, random_weights(LLAMA) | {LAST: torch.zeros(2, 2)}),
        "model.safetensors",
        LAST,
    ),
    "missing shard": (3, lambda d: (d / SHARD).unlink(), SHARD, "missing"),
    "broken shard": (3, lambda d: rewritten(d, SHARD, b""), SHARD, "no readable"),
    "broken index": (3, lambda d: rewritten(d, INDEX, b"[1"), INDEX, "JSON"),
    "index without map": (3, lambda d: rewritten(d, INDEX, b"{}"), INDEX, "weight_map"),
    "index with a bad map": (
        3,
        lambda d: rewritten(d, INDEX, b'{"weight_map": [1]}'),
        INDEX,
        "weight_map",
    ),
    "index without a tensor": (
        3,
        lambda d: rewritten(d, INDEX, json.dumps({"weight_map": {LAST: SHARD}}).encode()),
        INDEX,
        "has no tensor",
    ),
}


@pytest.mark.parametrize(("shards", "damage", "file", "key"), FILE_ERRORS.values(), ids=FILE_ERRORS)
def test_a_damaged_checkpoint_file_names_the_file_and_key(tmp_path, shards, damage, file, key):
    write(tmp_path, LLAMA, shards=shards)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert key in str(caught.value)
