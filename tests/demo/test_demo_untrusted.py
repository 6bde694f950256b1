"""Untrusted checkpoints: no file outside of their directory is read, and no endless file."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphrt.core.base.errors import CheckpointError
from graphrt.demo.checkpoint import load_checkpoint
from graphrt.demo.tokenizer import Tokenizer
from tests.demo.tiny_checkpoints import LLAMA, write

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory beside which there is a file that is none of its business."""
    save_file({"secret": torch.ones(2)}, tmp_path / "other.safetensors")
    write(tmp_path / "model", LLAMA, shards=3)
    return tmp_path / "model"


def send_to(checkpoint: Path, name: object) -> None:
    """Let the index name this file for one of the tensors."""
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (checkpoint / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../other.safetensors",
        "..",
        "sub/../../other.safetensors",
        "sub/model.safetensors",
        "..\\other.safetensors",
        "C:\\other.safetensors",
        "/dev/zero",
        "~/other.safetensors",
        "a\0.safetensors",
        "",
        "model.bin",
        ".safetensors",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_a_weight_index_that_names_a_path_is_refused(checkpoint, name):
    send_to(checkpoint, name)
    with pytest.raises(CheckpointError, match="none of this directory") as caught:
        load_checkpoint(checkpoint)
    assert INDEX in str(caught.value)


def test_an_absolute_path_in_a_weight_index_is_refused(checkpoint):
    send_to(checkpoint, str(checkpoint.parent / "other.safetensors"))
    with pytest.raises(CheckpointError, match="none of this directory"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [SHARD, "config.json", "generation_config.json", INDEX])
def test_a_link_that_leads_out_of_the_directory_is_refused(checkpoint, name):
    outside = checkpoint.parent / "outside"
    if (checkpoint / name).exists():
        (checkpoint / name).rename(outside)
    else:
        outside.write_text("{}")
    (checkpoint / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of its directory") as caught:
        load_checkpoint(checkpoint)
    assert str(checkpoint / name) in str(caught.value)


def test_a_tokenizer_that_is_a_link_out_of_the_directory_is_refused(checkpoint):
    (checkpoint.parent / "outside.json").write_text("{}")
    (checkpoint / "tokenizer.json").symlink_to(checkpoint.parent / "outside.json")
    with pytest.raises(CheckpointError, match="leads out of its directory"):
        Tokenizer(checkpoint, 300)


def test_links_within_the_checkpoint_directory_are_followed(checkpoint):
    (checkpoint / SHARD).rename(checkpoint / "real.safetensors")
    (checkpoint / SHARD).symlink_to("real.safetensors")
    assert load_checkpoint(checkpoint).config.num_layers == 2


def test_only_links_from_a_snapshot_into_its_blobs_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "abc", tmp_path / "repo" / "blobs"
    write(snapshot, LLAMA)
    blobs.mkdir()
    (snapshot / WEIGHTS).rename(blobs / "0123")
    (snapshot / WEIGHTS).symlink_to("../../blobs/0123")
    assert load_checkpoint(snapshot).config.num_layers == 2
    (blobs / "0123").rename(tmp_path / "repo" / "0123")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../0123")
    with pytest.raises(CheckpointError, match="leads out of its directory"):
        load_checkpoint(snapshot)


def test_a_checkpoint_file_that_links_to_itself_is_refused(checkpoint):
    (checkpoint / SHARD).unlink()
    (checkpoint / SHARD).symlink_to(SHARD)
    with pytest.raises(CheckpointError, match=SHARD):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_named_pipe_as_checkpoint_file_is_refused_without_waiting(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        load_checkpoint(checkpoint)


def header(path: Path, content: bytes, length: int | None = None, data: int = 0) -> None:
    """A safetensors file of this header, which says it has another length."""
    told = len(content) if length is None else length
    with path.open("wb") as file:
        file.write(struct.pack("<Q", told) + content)
        # A hole takes no room on the disk.
        file.truncate(8 + len(content) + data)


NORM = b'{"model.norm.weight": {"dtype": "F32", "shape": %s, "data_offsets": [0, %d]}}'


@pytest.mark.parametrize(
    ("content", "length", "data"),
    [
        (b"{}", 1 << 62, 0),
        (b"{}", (1 << 64) - 1, 0),
        (b"[" * 100_000 + b"]" * 100_000, None, 0),
        (b'{"a": ' * 20_000 + b"1" + b"}" * 20_000, None, 0),
        (b"{" + b'"a":' + b"9" * 5000 + b"}", None, 0),
        (NORM % (b"[1000000000000]", 4 * 10**12), None, 0),
        (NORM % (b"[4294967296, 4294967296]", 8), None, 8),
        (NORM % (b"[-1]", 4), None, 4),
    ],
    ids=["length", "longest", "brackets", "braces", "digits", "short", "product", "negative"],
)
def test_a_malicious_safetensors_header_is_refused(checkpoint, content, length, data):
    header(checkpoint / SHARD, content, length, data)
    with pytest.raises(CheckpointError, match="no readable safetensors file"):
        load_checkpoint(checkpoint)


def test_a_tensor_of_a_wrong_shape_is_refused_before_reading(checkpoint):
    size = 1 << 32
    header(checkpoint / SHARD, NORM % (f"[{size // 4}]".encode(), size), data=size)
    with pytest.raises(CheckpointError, match=r"shape of 'model\.norm\.weight'"):
        load_checkpoint(checkpoint)


def test_a_weight_file_too_large_to_map_is_refused(checkpoint):
    header(checkpoint / SHARD, NORM % (b"[%d]" % (1 << 38), 1 << 40), data=1 << 40)
    # Where so much address space can be had, the shape is wrong all the same.
    with pytest.raises(CheckpointError, match=r"no readable safetensors file|shape of"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", 10**12),
        ("num_key_value_heads", 10**30),
        ("hidden_size", 10**30),
        ("vocab_size", 1e300),
        ("head_dim", "64"),
        ("num_hidden_layers", True),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rms_norm_eps", float("nan")),
        ("eos_token_id", "2"),
        ("eos_token_id", [[2]]),
        ("eos_token_id", {"a": 1}),
        ("hidden_act", ["silu"] * 100_000),
    ],
)
def test_a_config_with_an_absurd_value_is_refused_with_a_short_message(checkpoint, key, value):
    (checkpoint / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(CheckpointError, match=key) as caught:
        load_checkpoint(checkpoint)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"], ids=["brackets", "digits"]
)
def test_a_config_of_nested_brackets_or_endless_digits_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_checkpoint(checkpoint)


def test_a_config_that_is_too_large_is_not_read_to_its_end(checkpoint):
    with (checkpoint / "config.json").open("r+b") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="more than"):
        load_checkpoint(checkpoint)
