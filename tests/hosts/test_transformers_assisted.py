"""Assisted generation through graphs: steps that check the tokens of an assistant are replayed,
where the model's `generation_config` says how many there are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from graphrt import CompileOptions
from tests.draws import on_devices
from tests.models.generating import counted_anew, generate, new_model, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from graphrt.hosts.transformers import graphs_of, with_graphs  # noqa: E402
from graphrt.hosts.transformers.caches import StepCache  # noqa: E402

CHECKED = ("llama", "gemma2", "opt", "mistral", "gpt_oss", "gpt_neox")
PROPOSED = 4
LENGTH = 64


def graphed(name: str, device: str = "cpu", **more: Any) -> Any:
    model = new_model(name, device)
    model.generation_config.num_assistant_tokens = PROPOSED
    return with_graphs(
        model, **{"max_batch": 2, "sizes": [2], "max_len": LENGTH, "strict": True, **more}
    )


def assistant_of(name: str, device: str = "cpu") -> Any:
    """A model that is right now and then; always, if it is the same."""
    model = new_model(name, device)
    model.generation_config.update(
        num_assistant_tokens=PROPOSED,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return model


def disturbed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight))
    return model


def counts(model: Any) -> tuple[int, int]:
    report = graphs_of(model).report()
    assert report.eager == {}
    return report.served, report.prompts


@pytest.fixture(scope="module")
def plain():
    return new_model("llama")


@pytest.fixture(scope="module")
def shared_model():
    return graphed("llama")


@pytest.fixture
def model(shared_model):
    return counted_anew(shared_model)


@pytest.mark.parametrize(
    ("name", "device"), on_devices(CHECKED, "llama", "gemma2", on_gpus=CHECKED[:3])
)
def test_assisted_steps_that_check_proposed_tokens_are_replayed(name, device):
    # Where layers slide, transformers' own assistant fails past the window.
    helper = "llama" if name in ("gemma2", "mistral", "gpt_oss") else name
    plain, tokens = new_model(name, device), random_tokens(1, 4, device, seed=7).repeat(1, 4)
    ways = (
        {"prompt_lookup_num_tokens": PROPOSED},
        {"assistant_model": assistant_of(helper, device)},
        {"assistant_model": disturbed(assistant_of(helper, device))},
    )
    model, before = graphed(name, device), 0
    for prompts, way in enumerate(ways, 1):
        mask = torch.ones_like(tokens)
        mask[:, :2] = 0
        expected = generate(plain, tokens, attention_mask=mask, **way)
        assert torch.equal(generate(model, tokens, attention_mask=mask, **way), expected)
        assert torch.equal(
            generate(model, tokens, attention_mask=mask),
            generate(plain, tokens, attention_mask=mask),
        )
        served, eager = counts(model)
        assert eager == 2 * prompts and served - before >= 19 + 3
        before = served
    assert graphs_of(model).report().window is None


def test_accepted_assistant_tokens_reduce_the_number_of_steps(model, plain):
    tokens = random_tokens(1, 12)
    assert torch.equal(
        generate(model, tokens, 25, assistant_model=assistant_of("llama")),
        generate(plain, tokens, 25),
    )
    # All five tokens of the prompt's forward, and of each of four steps, are right.
    assert counts(model) == (4, 1)


@pytest.mark.long
def test_compiled_assisted_steps_give_eager_tokens(plain):
    model = graphed("llama", compile=CompileOptions(backend="eager"))
    tokens = random_tokens(1, 12)
    given = {"assistant_model": disturbed(assistant_of("llama"))}
    assert torch.equal(generate(model, tokens, **given), generate(plain, tokens))
    served, prompts = counts(model)
    assert served > 0 and prompts == 1


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 9])
def test_an_assisted_step_honours_logits_to_keep(model, plain, keep):
    logits = []
    for each, cache in (
        (model, graphs_of(model).new_cache()),
        (plain, transformers.DynamicCache(config=plain.config)),
    ):
        with torch.no_grad():
            each(random_tokens(1, 6), past_key_values=cache)
            positions = torch.arange(6, 9)[None]
            call = {"past_key_values": cache, "position_ids": positions, "logits_to_keep": keep}
            logits.append(each(random_tokens(1, 3, seed=1), **call).logits)
        assert cache.get_seq_length() == 9
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    assert counts(model) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "count"), [(1, PROPOSED + 2), (2, 2)], ids=["more tokens", "more rows"]
)
def test_forwards_of_another_token_or_row_count_run_eagerly(model, plain, rows, count):
    logits = []
    for each, cache in (
        (model, graphs_of(model).new_cache()),
        (plain, transformers.DynamicCache(config=plain.config)),
    ):
        with torch.no_grad():
            each(random_tokens(rows, 6), past_key_values=cache)
            positions = torch.arange(6, 6 + count).expand(rows, -1)
            call = {"past_key_values": cache, "position_ids": positions}
            logits.append(each(random_tokens(rows, count, seed=1), **call).logits)
    assert torch.equal(*logits)
    assert counts(model) == (0, 2)


def test_an_assisted_step_whose_padding_exceeds_max_len_runs_eagerly(plain):
    """A check writes 5 positions: behind 16 tokens and 21, but not behind 26 of 30."""
    model, tokens = graphed("llama", max_len=30), random_tokens(1, 12)
    given = {"assistant_model": assistant_of("llama")}
    assert torch.equal(generate(model, tokens, 17, **given), generate(plain, tokens, 17))
    assert counts(model) == (2, 2)


def test_an_assisted_graph_with_wrong_logits_is_dropped_at_capture(plain, monkeypatch, caplog):
    init = StepCache.__init__

    def wrong_place(cache, memory, rows, length, tokens=1):
        init(cache, memory, rows, length, tokens)
        if tokens > 1:
            cache.layers[0]._places = length + torch.zeros(tokens, dtype=torch.int64)

    monkeypatch.setattr(StepCache, "__init__", wrong_place)
    with caplog.at_level(logging.WARNING, "graphrt"):
        model = graphed("llama")
    assert "LlamaForCausalLM checks tokens eagerly: " in caplog.text
    tokens = random_tokens(1, 12)
    given = {"prompt_lookup_num_tokens": PROPOSED}
    assert torch.equal(generate(model, tokens, **given), generate(plain, tokens))
    assert graphs_of(model).steps.checked == 0


@pytest.mark.parametrize("name", ["lfm2", pytest.param("t5", marks=pytest.mark.long)])
def test_models_with_recurrent_states_have_no_graphs_for_assisted_steps(name):
    assert graphs_of(graphed(name)).steps.checked == 0
