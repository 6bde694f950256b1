"""Encoders of transformers in float32 replay: while a stream captures they take another way, and
convolutions round to TF32 by default. Both are rounding, and neither is a reason to quarantine."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.core.replay.recording import current_capture
from graphrt.errors import GraphQuarantinedWarning
from tests.draws import rest_long

pytest.importorskip("transformers")

SIZES = (1, 2, 3, 4)
LENGTH = 12
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=99, max_position_embeddings=64, **SMALL))


def modern_bert():
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=99,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        **SMALL,
    )
    return ModernBertModel(config)


def vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(image_size=32, patch_size=8, **SMALL))


def clip():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=8, **SMALL))


TEXT = {"input_ids": InputSpec(torch.int64, ("tokens", LENGTH))}
MASKED = {**TEXT, "attention_mask": InputSpec(torch.int64, ("tokens", LENGTH), pad=1)}
IMAGES = {"pixel_values": InputSpec(torch.float32, ("tokens", 3, 32, 32))}
MODELS = {
    "BERT": (bert, TEXT),
    "BERT with a mask": (bert, MASKED),
    "ModernBERT": (modern_bert, TEXT),
    "ModernBERT with a mask": (modern_bert, MASKED),
    "ViT": (vit, IMAGES),
    "CLIP": (clip, IMAGES),
}


def values(inputs, rows, generator):
    made = {}
    for name, spec in inputs.items():
        shape = (rows, *spec.shape[1:])
        if name == "attention_mask":
            made[name] = torch.ones(shape, dtype=spec.dtype)
            if rows == 3:  # else nothing is masked, and eager runs build no mask
                made[name][0, LENGTH // 2 :] = 0
        elif spec.dtype.is_floating_point:
            made[name] = torch.randn(shape, generator=generator)
        else:
            made[name] = torch.randint(3, 99, shape, generator=generator)
    return made


@pytest.fixture
def asks_for_captures(monkeypatch):
    """On the CPU transformers takes the way of a GPU."""
    from transformers import masking_utils

    monkeypatch.setattr(
        masking_utils, "is_tracing", lambda tensor=None: current_capture() is not None
    )


@pytest.mark.parametrize(
    ("name", "mode", "check"),
    rest_long(
        itertools.product(MODELS, ["FULL", "PIECEWISE"], ["capture", "first", "always"]),
        ("BERT with a mask", "FULL", "always"),
        ("ModernBERT with a mask", "PIECEWISE", "always"),
        ("ViT", "FULL", "capture"),
        ("CLIP", "PIECEWISE", "first"),
    ),
)
def test_every_encoder_step_on_the_cpu_is_replayed_without_quarantine(
    name, mode, check, asks_for_captures
):
    every_step_replays(name, "cpu", mode, check)


@pytest.mark.cuda
@pytest.mark.parametrize("check", ["capture", "first", "always"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", MODELS)
def test_every_encoder_step_on_a_gpu_is_replayed_without_quarantine(name, mode, check):
    every_step_replays(name, "cuda", mode, check)


def every_step_replays(name, device, mode, check):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().to(device=device, dtype=torch.float32).eval()

    def forward(**tensors):
        return model(**tensors).last_hidden_state

    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", GraphQuarantinedWarning)
        runner = GraphRunner(
            forward,
            mode=mode,
            sizes=SIZES,
            inputs=inputs,
            platform=device,
            options=GraphOptions(check=check),
        )
        runner.capture()
        for rows in (4, 3, 2, 1, 1, 2, 3, 4):
            tensors = values(inputs, rows, generator)
            out = runner(**tensors)
            assert runner.last_dispatch.reason.name == "HIT"
            right = forward(**{key: value.to(device) for key, value in tensors.items()})
            # Of two ways and several sizes; TF32 on a GPU.
            torch.testing.assert_close(out, right, rtol=0, atol=1e-2 if device == "cuda" else 1e-4)
    trials = runner.report().trust.trials
    assert {each.status for each in trials} <= {"tried", "untried"}
    assert any(each.status == "tried" for each in trials)
    runner.close()
