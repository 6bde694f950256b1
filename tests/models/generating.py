"""Tiny seeded models of transformers for the tests of its host, and ways to generate with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.models.families import SHARED, VOCAB, Family
from tests.models.table import DECODERS, SPEECH_AND_TEXT

_TEXT = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.2,
}
ENCODER_DECODERS = {
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {**SPEECH_AND_TEXT["t5"].extra, "initializer_factor": 2.0},
    ),
    "whisper": SPEECH_AND_TEXT["whisper"],
    "bart": Family("BartConfig", "BartForConditionalGeneration", _TEXT),
    "mbart": Family("MBartConfig", "MBartForConditionalGeneration", _TEXT),
    "marian": Family("MarianConfig", "MarianMTModel", _TEXT),
    "pegasus": Family("PegasusConfig", "PegasusForConditionalGeneration", _TEXT),
    "m2m_100": Family("M2M100Config", "M2M100ForConditionalGeneration", _TEXT),
}
GENERATING = {**DECODERS, **ENCODER_DECODERS}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
NEW = 14
"""Tokens of a greedy call: the window of sliding models is 8."""


def new_model(name: str, device: str = "cpu", **config: Any) -> Any:
    """A model whose weights are the same each time."""
    import transformers

    family = GENERATING[name]
    merged = getattr(transformers, family.config)(**{**SHARED, **family.extra, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, family.model)(merged).eval().to(device)


def counted_anew(model: Any) -> Any:
    """A model with graphs that earlier tests have used: nothing is in its memory, counts are 0."""
    from graphrt.hosts.transformers import graphs_of

    graphs = graphs_of(model)
    graphs.reset()
    graphs._counts.__init__(type(model).__name__)
    return model


def random_tokens(rows: int, length: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator).to(device)


def generate(model: Any, tokens: torch.Tensor, new: int = 20, **more: Any) -> Any:
    """Greedy tokens of prompts without padding, unless `more` says otherwise."""
    call = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, max_new_tokens=new, **{**call, **more})


def prompt(name: str, rows: int, device: str = "cpu", *, padded: bool = False) -> dict[str, Any]:
    """What `generate` is given, with padding in the first two rows if it is `padded`."""
    if name == "whisper":
        sound = torch.randn(rows, 16, 24, generator=torch.Generator().manual_seed(2))
        return {"input_features": sound.to(device)}
    tokens = random_tokens(rows, 9, device)
    mask = torch.ones_like(tokens)
    if padded:
        # Decoders are padded on the left, encoders on the right.
        ends = (
            (slice(-4, None), slice(-1, None)) if name in ENCODER_DECODERS else (slice(4), slice(1))
        )
        for row, end in zip(range(rows), ends, strict=False):
            mask[row, end] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _sampled(model: Any, name: str, device: str) -> torch.Tensor:
    torch.manual_seed(3)
    call = {**prompt(name, 1, device), "do_sample": True, "num_return_sequences": 4}
    return model.generate(**call, max_new_tokens=10, pad_token_id=0)


WAYS: Mapping[str, Callable[[Any, str, str], torch.Tensor]] = {
    "greedy": lambda model, name, device: model.generate(
        **prompt(name, 3, device), max_new_tokens=NEW, do_sample=False
    ),
    "padded": lambda model, name, device: model.generate(
        **prompt(name, 3, device, padded=True), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    ),
    "sampled": _sampled,
    "beams": lambda model, name, device: model.generate(
        **prompt(name, 2, device, padded=True),
        max_new_tokens=10,
        num_beams=2,
        do_sample=False,
        pad_token_id=0,
    ),
}
STEPS = {"greedy": NEW - 1, "padded": NEW - 1, "sampled": 9, "beams": 9}
"""Steps of each way after its prompt: all are to be served."""
