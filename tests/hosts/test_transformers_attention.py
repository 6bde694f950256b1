"""Steps attend by groups of heads without repeated keys, and equal transformers' own."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch

from tests.models.generating import new_model, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from graphrt.compile.options import CompileOptions  # noqa: E402
from graphrt.hosts.transformers import attention, graphs_of, with_graphs  # noqa: E402

HEADS, GROUPS, LENGTH, WIDTH = 8, 4, 12, 16


def attended(forward: Any, tokens: int, mask: torch.Tensor | None, **more: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS, tokens, WIDTH, generator=generator)
    # As the memory lies: positions before heads.
    keys, values = torch.randn(2, 3, LENGTH, HEADS // GROUPS, WIDTH, generator=generator)
    module = types.SimpleNamespace(num_key_value_groups=GROUPS, is_causal=True)
    found, _ = forward(
        module, query, keys.transpose(1, 2), values.transpose(1, 2), mask, scaling=0.3, **more
    )
    return found


def padding(heads: int = 1) -> torch.Tensor:
    mask = torch.ones(3, heads, 1, LENGTH, dtype=torch.bool)
    mask[0, :, :, :5] = False
    if heads > 1:
        mask[1, 2, :, 3:9] = False
    return mask


@pytest.mark.parametrize(
    ("tokens", "mask", "more"),
    [
        (1, None, {}),
        (1, padding(), {}),
        (1, padding(HEADS), {}),
        (1, padding().float().log(), {}),
        (1, padding(), {"position_bias": torch.arange(HEADS).view(1, HEADS, 1, 1).float()}),
        (5, padding(), {}),
    ],
    ids=["no mask", "padding", "mask of each head", "added mask", "bias", "several tokens"],
)
def test_grouped_attention_equals_transformers_sdpa_within_rounding(tokens, mask, more):
    expected = attended(sdpa_attention_forward, tokens, mask, **more)
    found = attended(attention._attend, tokens, mask, **more)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


def test_grouped_attention_passes_keys_to_the_kernel_without_repeating_heads(monkeypatch):
    seen = []

    def kernel(query: Any, key: Any, value: Any, **more: Any) -> torch.Tensor:
        seen.append((query.shape[1:3], key.shape[1], key.is_contiguous()))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    attended(attention._attend, 1, padding())
    assert seen == [((2, GROUPS), 2, False)]


def test_the_mask_of_a_step_is_additive_and_of_a_prompt_boolean():
    columns = {"batch_size": 3, "kv_length": LENGTH, "attention_mask": padding()[:, 0, 0]}
    step = {**columns, "q_length": 1, "q_offset": LENGTH - 1, "dtype": torch.bfloat16}
    made = attention._mask(**step)
    assert made.dtype is torch.bfloat16
    assert torch.equal(made, padding().to(torch.bfloat16).log())
    assert attention._mask(**step | {"q_length": 5}).dtype is torch.bool


def test_only_captured_steps_use_grouped_attention_and_prompts_use_sdpa(monkeypatch):
    model = new_model("llama")
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    tokens = random_tokens(2, 5)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("attended by groups")

    with monkeypatch.context() as patch:
        patch.setattr(attention, "scaled_dot_product_attention", broken)
        with pytest.raises(RuntimeError, match="attended by groups"):
            with_graphs(model, max_batch=2, sizes=[2], max_len=16, strict=True)
        assert model.config._attn_implementation == "sdpa"
        with torch.no_grad():
            model(tokens[:, :1])
    with_graphs(model, max_batch=2, sizes=[2], max_len=16, strict=True)
    model.generate(tokens, max_new_tokens=4, do_sample=False)
    report = graphs_of(model).report()
    assert (report.served, report.eager) == (3, {})
    assert model.config._attn_implementation == "sdpa"


def test_compiled_steps_use_grouped_attention():
    """Dynamo of torch 2.11 traced transformers' own attention, which copies the keys."""
    model = new_model("llama")
    compiled = CompileOptions(backend="eager")
    with_graphs(model, max_batch=2, sizes=[2], max_len=16, strict=True, compile=compiled)
    steps, tokens = graphs_of(model).steps, random_tokens(2, 1)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        steps.runner.graphs.setup.forward(**steps._values(tokens, tokens, 4))
    name = "aten::scaled_dot_product_attention"
    heads = {event.input_shapes[0][1] for event in profile.events() if event.name == name}
    assert heads == {model.config.num_key_value_heads}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 4}),
        ("gpt2", {"num_key_value_heads": None}),
    ],
)
def test_models_without_grouped_keys_keep_their_attention(name, config):
    assert attention.attention_of(new_model(name, **config)) is None


@pytest.mark.parametrize(("family", "asks"), [("gpt2", True), ("falcon", True), ("llama", False)])
def test_a_model_family_that_compares_the_attention_name_keeps_its_attention(family, asks):
    """MiniMax-M3 masks blocks out in the attentions that it knows: another name had all of them."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert attention._asks_for_its_name(module.__name__) is asks
    assert attention._asks_for_its_name("nobody's module")


def test_the_config_says_sdpa_again_after_both_threads_left():
    config = types.SimpleNamespace(_attn_implementation_internal="sdpa")
    first, second = attention.grouped(config), attention.grouped(config)
    first.__enter__()
    second.__enter__()
    assert config._attn_implementation_internal == attention.GROUPED
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert config._attn_implementation_internal == "sdpa"
