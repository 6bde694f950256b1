"""Layers with a sliding window keep their window alone, and give the tokens of `generate` without
graphs: prompts are longer than the window, and sequences go on past it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from graphrt import CompileOptions
from tests.draws import on_devices
from tests.models.families import SHARED, WINDOW
from tests.models.generating import counted_anew, generate, new_model, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from graphrt.hosts.transformers import graphs_of, with_graphs  # noqa: E402
from graphrt.hosts.transformers.caches import StepCache  # noqa: E402

SLIDING = ("mistral", "gemma2", "gpt_oss", "gemma3", "cohere2", "qwen2")
LENGTH = 64
LEFT = "the cache keeps past states, to be cropped"


def sliding_model(name: str, device: str = "cpu") -> Any:
    more = {}
    if name == "qwen2":
        more = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return new_model(name, device, **more)


def padded_mask(tokens: torch.Tensor) -> torch.Tensor:
    """Padding that reaches into the window of the first step, and some before it."""
    mask = torch.ones_like(tokens)
    mask[0, : tokens.shape[1] - 3] = 0
    mask[1, :4] = 0
    return mask


def sampled(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return generate(model, tokens[:1], do_sample=True, num_return_sequences=4)


WAYS = {
    "greedy": generate,
    "padded": lambda model, tokens: generate(model, tokens, attention_mask=padded_mask(tokens)),
    "short padded": lambda model, tokens: generate(
        model, tokens[:, :5], attention_mask=padded_mask(tokens[:, :5])
    ),
    "sampled": sampled,
    "beams": lambda model, tokens: generate(
        model, tokens[:2], num_beams=2, attention_mask=padded_mask(tokens[:2])
    ),
}


@pytest.fixture(scope="module")
def plain():
    """A Gemma 2 without graphs: one layer slides, the other does not."""
    return sliding_model("gemma2")


@pytest.fixture(scope="module")
def shared_model():
    return with_graphs(sliding_model("gemma2"), max_batch=4, sizes=[4], max_len=LENGTH, strict=True)


@pytest.fixture
def model(shared_model):
    return counted_anew(shared_model)


def served(model: Any) -> tuple[int, dict[str, int]]:
    report = graphs_of(model).report()
    return report.served, report.eager


# The first has windows alone, the second experts; Gemma 2 is the model of the other tests.
@pytest.mark.parametrize(
    ("name", "device"), on_devices(SLIDING, "mistral", "gpt_oss", on_gpus=SLIDING[:3])
)
def test_sequences_longer_than_the_sliding_window_give_eager_tokens(name, device):
    # Of another seed two beams of Cohere 2 have one score, but for rounding.
    model, tokens = sliding_model(name, device), random_tokens(3, 20, device, seed=1)
    expected = {way: call(model, tokens) for way, call in WAYS.items()}
    with_graphs(model, max_batch=4, sizes=[4], max_len=LENGTH, strict=True)
    for way, call in WAYS.items():
        assert torch.equal(call(model, tokens), expected[way]), way
    assert served(model) == (19 * len(WAYS), {})
    assert graphs_of(model).report().window == WINDOW


@pytest.mark.long
def test_compiled_steps_beyond_the_sliding_window_give_eager_tokens():
    model, tokens = sliding_model("gemma2"), random_tokens(3, 20)
    expected = generate(model, tokens)
    options = CompileOptions(backend="eager")
    with_graphs(model, max_batch=4, sizes=[4], max_len=LENGTH, strict=True, compile=options)
    assert torch.equal(generate(model, tokens), expected)
    assert served(model) == (19, {})
    assert graphs_of(model).report().window == WINDOW


def test_sliding_layers_keep_only_the_positions_of_their_window(model):
    lengths = [layer.keys.shape[1] for layer in graphs_of(model).steps.memory.layers]
    assert lengths == [WINDOW, LENGTH]
    assert "sliding layers keep 8 positions" in str(graphs_of(model).report())


def test_all_positions_are_kept_if_the_window_saves_less_than_half(plain):
    model = with_graphs(sliding_model("gemma2"), max_batch=2, sizes=[2], max_len=17, strict=True)
    assert graphs_of(model).report().window == WINDOW
    graphs_of(model).max_len = 2 * WINDOW - 1
    graphs_of(model).recapture()
    assert graphs_of(model).report().window is None
    tokens = random_tokens(2, 4)
    assert torch.equal(generate(model, tokens, 10), generate(plain, tokens, 10))


def test_the_mask_of_a_padding_row_covers_the_whole_window(model):
    """Nothing to look at is NaN in some kernels, and experts are then chosen by NaN."""
    memory = graphs_of(model).steps.memory
    cache = StepCache(memory, torch.tensor([0, 1, memory.rows]), torch.tensor([2 * WINDOW]))
    assert cache.mask()[:, LENGTH:].tolist() == [[0] * WINDOW, [0] * WINDOW, [1] * WINDOW]


def test_chunked_attention_layers_keep_all_positions():
    config = transformers.Llama4TextConfig(
        **SHARED,
        head_dim=16,
        layer_types=["chunked_attention", "full_attention"],
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=128,
    )
    torch.manual_seed(0)
    model, tokens = transformers.Llama4ForCausalLM(config).eval(), random_tokens(3, 20)
    expected = WAYS["padded"](model, tokens)
    with_graphs(model, max_batch=4, sizes=[4], max_len=LENGTH, strict=True)
    assert torch.equal(WAYS["padded"](model, tokens), expected)
    assert graphs_of(model).report().window is None
    assert served(model) == (19, {})


@pytest.mark.parametrize("wrong", ["mask", pytest.param("place", marks=pytest.mark.long)])
def test_a_window_that_changes_logits_is_dropped_and_all_positions_kept(
    wrong, plain, monkeypatch, caplog
):
    """Whether it is right is seen in steps that overwrite the first positions."""

    def wrong_mask(cache):
        mask = made(cache)
        return mask if cache._memory.window is None else torch.ones_like(mask)

    made, init = StepCache.mask, StepCache.__init__

    def wrong_place(cache, memory, rows, length, *more):
        init(cache, memory, rows, length, *more)
        if memory.window is not None:
            cache.layers[0]._places = length % (memory.window - 1)

    if wrong == "mask":
        monkeypatch.setattr(StepCache, "mask", wrong_mask)
    else:
        monkeypatch.setattr(StepCache, "__init__", wrong_place)
    with caplog.at_level(logging.WARNING, "graphrt"):
        model = with_graphs(
            sliding_model("gemma2"), max_batch=2, sizes=[2], max_len=LENGTH, strict=True
        )
    assert "keeps all positions where it slides: " in caplog.text
    assert graphs_of(model).report().window is None
    tokens = random_tokens(2, 20)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (19, {})


# Caches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["nothing", "another call", "a copy", "a reset loop"])
def test_a_returned_sliding_cache_continues_in_a_second_turn(model, plain, between):
    tokens, more = random_tokens(2, 20), random_tokens(2, 3, seed=4)

    def two_turns(model):
        first = generate(model, tokens, 5, return_dict_in_generate=True)
        cache = first.past_key_values
        if between == "another call":
            generate(model, random_tokens(3, 9, seed=8), 5)
        elif between == "a copy":
            cache = copy.deepcopy(cache)
        elif between == "a reset loop" and model is not plain:
            graphs_of(model).prefill(tokens)
            graphs_of(model).step(tokens[:, 0])
            graphs_of(model).reset()
        return generate(model, torch.cat([first.sequences, more], 1), past_key_values=cache)

    assert torch.equal(two_turns(model), two_turns(plain))
    steps = {"another call": 4, "a reset loop": 1}.get(between, 0)
    assert served(model) == (4 + steps + 19, {})


def test_a_reset_loop_reads_nothing_of_the_sequence_before(model, plain):
    graphs = graphs_of(model)
    for tokens in (random_tokens(4, 30, seed=6), random_tokens(2, 3)):
        logits = [graphs.prefill(tokens)]
        chosen = [logits[-1].argmax(-1)]
        for _ in range(12):
            logits.append(graphs.step(chosen[-1]))
            chosen.append(logits[-1].argmax(-1))
        graphs.reset()
        assert torch.equal(torch.stack(chosen, 1), generate(plain, tokens, 13)[:, -13:])
    assert served(model) == (24, {})


@pytest.mark.parametrize("length", [5, WINDOW - 1, WINDOW, 20])
def test_cropping_a_sliding_cache_equals_cropping_transformers_cache(model, plain, length):
    """Before the window is full; from then on what has left it is gone."""
    ours, theirs = graphs_of(model).new_cache(), transformers.DynamicCache(config=plain.config)
    tokens = random_tokens(2, length)
    with torch.no_grad():
        for each, cache in ((model, ours), (plain, theirs)):
            each(tokens, past_key_values=cache)
    if length >= WINDOW:
        for cache in (ours, theirs):
            with pytest.raises(RuntimeError, match="does not track past states"):
                cache.crop(-2)
        return
    for cache in (ours, theirs):
        cache.crop(-2)
    assert ours.get_seq_length() == theirs.get_seq_length() == length - 2
    logits = []
    for each, cache in ((model, ours), (plain, theirs)):
        for at in range(12):
            position = torch.full((2, 1), length - 2 + at)
            call = {"past_key_values": cache, "position_ids": position}
            with torch.no_grad():
                logits.append(each(random_tokens(2, 1, seed=at), **call).logits)
    torch.testing.assert_close(logits[:12], logits[12:], rtol=1e-3, atol=1e-4)
    assert served(model) == (12, {})


def test_steps_of_several_tokens_continue_past_the_window(model, plain):
    ours, theirs = graphs_of(model).new_cache(), transformers.DynamicCache(config=plain.config)
    for at, length in enumerate((3, 2, 4, 9, 1, 5, 1)):
        tokens, logits = random_tokens(2, length, seed=at), []
        positions = torch.arange(length).expand(2, -1) + theirs.get_seq_length()
        for each, cache in ((model, ours), (plain, theirs)):
            call = {"past_key_values": cache, "position_ids": positions}
            with torch.no_grad():
                logits.append(each(tokens, **call).logits)
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    assert served(model) == (2, {})


def test_assisted_generation_runs_eagerly_and_its_cache_serves_the_next_call(model, plain):
    tokens = random_tokens(1, 4, seed=7).repeat(1, 4)

    given = {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    first = generate(model, tokens, **given)
    assert torch.equal(first.sequences, generate(plain, tokens, **given).sequences)
    assert served(model)[0] == 0 and set(served(model)[1]) <= {LEFT}
    # transformers' own cache would fail here: it goes on to keep the past.
    longer = torch.cat([first.sequences, tokens], 1)
    second = generate(model, longer, 10, past_key_values=first.past_key_values)
    assert torch.equal(second, generate(plain, longer, 10))
    assert served(model)[0] == 9
    assert not first.past_key_values.layers[0].record_past


def test_a_sliding_sequence_beyond_max_len_continues_eagerly_with_its_window(plain):
    model = with_graphs(sliding_model("gemma2"), max_batch=2, sizes=[2], max_len=24, strict=True)
    tokens = random_tokens(2, 14)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (10, {"the sequence is longer than 24 tokens": 9})
    longer = random_tokens(2, 30)
    assert torch.equal(generate(model, longer, 5), generate(plain, longer, 5))
