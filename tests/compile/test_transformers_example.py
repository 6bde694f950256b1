"""examples/compiled_transformers.py decodes what eager decodes."""

from __future__ import annotations

import importlib
import itertools
import shutil
import types
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphrt import GraphMode, Reason
from tests.draws import rest_long
from tests.models.families import FAMILIES, SHARED, VOCAB, Family

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ROWS, STEPS, LENGTH = 2, 14, 48
LAYERS = 2
_GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "experts_implementation": "batched_mm",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_CAPPED = {**FAMILIES["gemma2"].extra, "attn_logit_softcapping": 2.0}
DECODERS = {
    **FAMILIES,
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _CAPPED),
    "gpt_oss": Family("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
}
ASKED = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss")
PADDED = {"padded": 3, "not padded": 0}


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The example as a module: Dynamo imports what it traces, and the operator is defined once."""
    return importlib.import_module("examples.compiled_transformers")


def model_of(family: Family, attention: str | None = None) -> Any:
    config = getattr(transformers, family.config)(**{**SHARED, **family.extra})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, family.model)(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.data.uniform_(1, 3)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


class Twin:
    """Eager logits of everything said so far, with no cache and transformers' own attention."""

    def __init__(self, family: Family, prompts: torch.Tensor, mask: torch.Tensor) -> None:
        self.model = model_of(family, "eager").to(prompts.device)
        self.said, self.mask = prompts, mask

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        outputs = self.model(
            self.said, attention_mask=self.mask, position_ids=positions, use_cache=False
        )
        return outputs.logits[:, -1]

    def say(self, tokens: torch.Tensor) -> None:
        self.said = torch.cat([self.said, tokens[:, None]], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)


def check_decode(
    recipe: Any, name: str, mode: str, padding: int, device: str = "cpu", **options: Any
) -> None:
    family = DECODERS[name]
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, VOCAB, (ROWS, 5), generator=generator).to(device)
    mask = torch.ones_like(prompts, dtype=torch.bool)
    prompts[0, :padding], mask[0, :padding] = 0, False
    twin = Twin(family, prompts, mask.long())
    decode = recipe.Decode(model_of(family).to(device), ROWS, LENGTH).to(device).eval()
    seen: set[int] = set()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="graphrt")
        torch.testing.assert_close(
            decode.prefill(prompts, mask), twin.logits(), atol=1e-4, rtol=1e-4
        )
        with recipe.serve(decode, ROWS, mode, device, **options) as runner:
            tokens = twin.logits().argmax(-1)
            for step in range(STEPS):
                twin.say(tokens)
                expected, got = twin.logits(), runner(input_ids=tokens)
                assert runner.last_dispatch.reason is Reason.HIT
                assert runner.last_dispatch.mode is GraphMode.parse(mode)
                torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
                tokens = expected.argmax(-1)
                assert torch.equal(got.argmax(-1), tokens), step
                seen.update(tokens.tolist())
            assert {record.status for record in runner.report().trust.trials} == {"tried"}
    assert len(seen) > 6, "a decode that repeats itself proves little"


@pytest.mark.parametrize(
    ("name", "mode", "padding"),
    rest_long(
        itertools.product(ASKED, ("FULL", "PIECEWISE"), PADDED.values()),
        ("llama", "FULL", 3),
        ("gpt_oss", "PIECEWISE", 3),
    ),
)
def test_the_compiled_transformers_example_decodes_the_tokens_of_eager(recipe, name, mode, padding):
    check_decode(recipe, name, mode, padding)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ASKED])
def test_the_compiled_transformers_example_decodes_with_further_model_families(recipe, name, mode):
    check_decode(recipe, name, mode, 3)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on the CPU needs g++")
@pytest.mark.parametrize("name", ASKED)
def test_the_compiled_transformers_example_decodes_with_inductor(recipe, name):
    check_decode(recipe, name, "PIECEWISE", 3, backend="inductor")


@pytest.mark.cuda
@pytest.mark.parametrize("padding", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", ASKED)
def test_the_compiled_transformers_example_decodes_on_a_gpu(recipe, name, mode, padding):
    check_decode(recipe, name, mode, padding, "cuda")


def attend_with(recipe: Any, **keywords: Any) -> Any:
    module = types.SimpleNamespace(is_causal=True)
    query = torch.randn(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    arguments: Mapping[str, Any] = {"attention_mask": mask, **keywords}
    return recipe.attention(module, query, query, query, **arguments)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"temperature": 2.0}, TypeError),
        ({"head_mask": None}, TypeError),
        ({"attention_mask": None}, ValueError),
        ({"dropout": 0.5}, ValueError),
        ({"output_attentions": True}, ValueError),
    ],
)
def test_an_attention_argument_that_the_example_does_not_support_is_an_error(recipe, given, error):
    attend_with(recipe)
    with pytest.raises(error):
        attend_with(recipe, **given)


def test_a_position_bias_and_a_mask_of_numbers_are_added(recipe):
    torch.manual_seed(0)
    bias = torch.randn(1, 2, 3, 3)
    hidden = torch.full((3, 3), torch.finfo(torch.float32).min).triu(1)
    query = torch.randn(1, 2, 3, 4)
    module = types.SimpleNamespace(is_causal=True)
    got, _ = recipe.attention(
        module, query, query, query, hidden.view(1, 1, 3, 3), scaling=1.0, position_bias=bias
    )
    expected = (query @ query.transpose(2, 3) + bias + hidden).softmax(-1) @ query
    torch.testing.assert_close(got, expected.transpose(1, 2))
