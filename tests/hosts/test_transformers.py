"""`generate` of transformers' models through graphs gives the tokens of `generate` without, and
every step of one token a row is a replay."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import re
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune

from graphrt import CompileOptions, GraphRunner
from graphrt.errors import CaptureError, InvalidInputError, InvalidOptionError
from tests.draws import on_devices, rest_long
from tests.models.families import SHARED
from tests.models.generating import (
    ENCODER_DECODERS,
    GENERATING,
    STEPS,
    WAYS,
    counted_anew,
    new_model,
    prompt,
    random_tokens,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from graphrt.hosts.transformers import graphs_of, with_graphs, without_graphs  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
CHOSEN = ("llama", "deepseek_v3", "falcon_h1", "mamba", "t5", "whisper")
"""One family of each kind of cache; all of them are in `tests/models/table.py`. Windows and experts
are in test_transformers_sliding.py, linear attention in test_transformers_kinds.py."""
OTHER = "the cache has other rows, shapes or dtypes than the memory"
REFUSED = {"m2m_100": "CaptureSyncError"}


def served(model: Any) -> tuple[int, dict[str, int]]:
    report = graphs_of(model).report()
    return report.served, report.eager


def generate(model: Any, tokens: torch.Tensor, new: int = 8, **more: Any) -> Any:
    mask = more.pop("attention_mask", torch.ones_like(tokens))
    return model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, **{"do_sample": False, **more}
    )


@pytest.fixture(scope="module")
def plain():
    """A Llama without graphs."""
    return new_model("llama")


@pytest.fixture(scope="module")
def shared_model():
    return with_graphs(new_model("llama"), max_batch=4, max_len=32, strict=True)


@pytest.fixture
def model(shared_model):
    """A Llama with graphs for 4 rows of 32 tokens; its counts start at 0."""
    return counted_anew(shared_model)


# Families ----------------------------------------------------------------------------------------


@dataclass
class Served:
    """A model of a family with a graph for 4 rows, and its twin without."""

    name: str
    device: str
    plain: Any
    model: Any


ON_GPUS = (*CHOSEN, "gemma2", "mixtral", "qwen3_next", "opt")
FAMILIES = [name for name in GENERATING if name not in REFUSED]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each.values, marks=each.marks, id="-".join(each.values))
        for each in on_devices(FAMILIES, *CHOSEN, on_gpus=ON_GPUS)
    ],
)
def family(request) -> Served:
    """Built once, asked by each test behind it."""
    name, device = request.param
    plain = new_model(name, device)
    model = copy.deepcopy(plain)
    return Served(
        name, device, plain, with_graphs(model, max_batch=4, sizes=[4], max_len=32, strict=True)
    )


@pytest.mark.parametrize("way", WAYS)
def test_generate_with_graphs_gives_eager_tokens_and_replays_every_step(family, way):
    model, call = counted_anew(family.model), WAYS[way]
    expected = call(family.plain, family.name, family.device)
    assert torch.equal(call(model, family.name, family.device), expected)
    assert served(model) == (STEPS[way], {})


def test_logits_of_replays_equal_eager_steps_bit_for_bit(family, monkeypatch):
    given = {**prompt(family.name, 3, family.device, padded=True), "max_new_tokens": 12}
    given |= {"do_sample": False, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    replayed = family.model.generate(**given)

    def step(runner, batch, **values):
        # 3 rows in the graph of 4.
        dispatch = runner.dispatcher.dispatch(batch)
        return runner.run_padded_eagerly(batch, dispatch, values)

    monkeypatch.setattr(GraphRunner, "__call__", step)
    eager = family.model.generate(**given)
    assert len(replayed.logits) == 12
    assert all(torch.equal(*both) for both in zip(replayed.logits, eager.logits, strict=True))


def test_a_greedy_loop_of_prefill_and_step_gives_the_tokens_of_generate(family):
    if family.name in ENCODER_DECODERS:
        pytest.skip("a prompt beside an encoder is generate's own")
    model, graphs = counted_anew(family.model), graphs_of(family.model)
    call = prompt(family.name, 2, family.device, padded=True)
    tokens, found = graphs.prefill(**call).argmax(-1), []
    for _ in range(8):
        found.append(tokens)
        tokens = graphs.step(tokens).argmax(-1)
    expected = family.plain.generate(**call, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.stack(found, 1), expected[:, 9:])
    assert served(model) == (8, {})
    graphs.reset()
    with pytest.raises(InvalidInputError, match="prefill"):
        graphs.step(tokens)


COMPILED = rest_long(("llama", "t5", "mixtral", "jamba", "mamba"), "llama")
INDUCTOR = pytest.param("cuda", "inductor", marks=pytest.mark.cuda)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "eager"), INDUCTOR])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_give_eager_tokens_and_are_all_replayed(name, device, backend):
    model = new_model(name, device)
    ways = ("greedy", "padded")
    expected = {way: WAYS[way](model, name, device) for way in ways}
    options = CompileOptions(backend=backend)
    with_graphs(model, max_batch=4, sizes=[4], max_len=32, strict=True, compile=options)
    for way in ways:
        assert torch.equal(WAYS[way](model, name, device), expected[way]), way
    assert served(model) == (sum(STEPS[way] for way in ways), {})


def test_a_backend_name_as_the_compile_option_is_refused():
    with pytest.raises(InvalidOptionError, match="compile= has a wrong value"):
        with_graphs(new_model("llama"), max_batch=1, max_len=32, compile="inductor")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_captured_runs_eagerly_and_the_report_says_why(name, caplog):
    model = new_model(name)
    expected = WAYS["greedy"](model, name, "cpu")
    with caplog.at_level(logging.WARNING, "graphrt"):
        with_graphs(model, max_batch=4, sizes=[4], max_len=32)
        assert torch.equal(WAYS["greedy"](model, name, "cpu"), expected)
        WAYS["greedy"](model, name, "cpu")
    report = graphs_of(model).report()
    assert report.refused.startswith(REFUSED[name])
    assert "leave with_graphs() out" in report.refused
    assert not re.search("eager_break|PIECEWISE", report.refused)
    assert report.served == 0 and sum(report.eager.values()) == 2 * STEPS["greedy"]
    # Once for the model, and once for its steps.
    assert [REFUSED[name] in each.message for each in caplog.records] == [True, False]


def test_an_error_in_the_models_forward_is_reported_with_its_source_line():
    model = new_model("llama")
    inner = model.model.forward

    def forward(*args, **kwargs):
        torch.arange(3, 1)  # the line
        return inner(*args, **kwargs)

    model.model.forward = forward
    with_graphs(model, max_batch=1, max_len=32)
    refused = graphs_of(model).report().refused
    assert refused.startswith("RuntimeError: upper bound and")
    assert re.search(r"\(test_transformers\.py:\d+: torch\.arange\(3, 1\)  # the line\)", refused)


# Modes of generate -------------------------------------------------------------------------------


def test_a_streamer_is_given_every_token(model, plain):
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    tokens, streamer = random_tokens(1, 6), Streamer()
    expected = generate(plain, tokens)
    assert torch.equal(generate(model, tokens, streamer=streamer), expected)
    assert streamer.tokens == expected.flatten().tolist() and streamer.ended
    assert served(model) == (7, {})


def test_beam_search_reorders_the_kv_cache_and_replays_every_step(model, plain):
    tokens = random_tokens(1, 6, seed=5)
    given = {"num_beams": 4, "num_return_sequences": 3, "new": 12}
    assert torch.equal(generate(model, tokens, **given), generate(plain, tokens, **given))
    assert served(model) == (11, {})


@pytest.mark.parametrize("assistant", ["prompt lookup", "another model", "with graphs"])
def test_assisted_generation_crops_the_kv_cache_and_gives_eager_tokens(model, plain, assistant):
    tokens = random_tokens(1, 4, seed=7).repeat(1, 3)
    given: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if assistant != "prompt lookup":
        other = new_model("llama", num_hidden_layers=1)
        other.generation_config.update(
            num_assistant_tokens=4,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        given = {"assistant_model": other}
    expected = generate(plain, tokens, 12, **given)
    if assistant == "with graphs":
        with_graphs(given["assistant_model"], max_batch=1, max_len=32, strict=True)
    assert torch.equal(generate(model, tokens, 12, **given), expected)
    if assistant == "with graphs":
        assert served(given["assistant_model"])[0] > 0


def test_assisted_generation_of_a_model_with_recurrent_states_runs_eagerly():
    plain, model = new_model("lfm2"), new_model("lfm2")
    with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True)
    tokens = random_tokens(1, 4, seed=7).repeat(1, 3)
    given = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generate(model, tokens, **given), generate(plain, tokens, **given))
    assert served(model)[0] == 0


@pytest.mark.parametrize("what", ["output_attentions", "output_hidden_states"])
def test_steps_that_ask_for_attentions_or_hidden_states_run_eagerly(what):
    plain, model = (new_model("llama", attn_implementation="eager") for _ in range(2))
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    tokens = random_tokens(1, 6)
    given = {what: True, "return_dict_in_generate": True}
    ours, theirs = generate(model, tokens, **given), generate(plain, tokens, **given)
    assert torch.equal(ours.sequences, theirs.sequences)
    name = what.removeprefix("output_")
    assert len(getattr(ours, name)) == 8
    assert served(model) == (0, {f"{what}= was passed": 7})
    # transformers leaves hooks in the model for it.
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model)[0] == 7


def test_a_prompt_with_a_picture_is_followed_by_replayed_steps():
    vision = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**SHARED),
        image_token_index=2,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tokens = torch.cat([torch.full((2, 4), 2), random_tokens(2, 5)], 1)
    given = {"pixel_values": torch.randn(2, 3, 16, 16)}
    expected = generate(model, tokens, **given)
    with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True)
    assert torch.equal(generate(model, tokens, **given), expected)
    assert served(model) == (7, {})
    model.config.text_config.rms_norm_eps *= 2
    generate(model, tokens, **given)
    name = "model.config.text_config.rms_norm_eps"
    assert served(model)[1] == {f"the model is not as it was captured ({name}): recapture()": 7}


# What has no room --------------------------------------------------------------------------------


def test_a_sequence_that_grows_beyond_max_len_continues_eagerly(model, plain):
    tokens = random_tokens(2, 20)
    assert torch.equal(generate(model, tokens, 20), generate(plain, tokens, 20))
    assert served(model) == (12, {"the sequence is longer than 32 tokens": 7})


def test_a_prompt_longer_than_max_len_runs_eagerly(model, plain):
    tokens = random_tokens(2, 40)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (0, {"the sequence is longer than 32 tokens": 7})


def test_a_batch_above_max_batch_runs_eagerly_and_warns_once(model, plain, caplog):
    tokens = random_tokens(5, 6)
    with caplog.at_level(logging.WARNING, "graphrt"):
        assert torch.equal(generate(model, tokens), generate(plain, tokens))
        generate(model, tokens)
    assert served(model) == (0, {"5 rows are above max_batch=4": 14})
    assert len(caplog.records) == 1


def test_a_batch_above_the_largest_captured_size_runs_eagerly(plain):
    model = with_graphs(new_model("llama"), max_batch=4, max_len=32, sizes=[1, 2], strict=True)
    tokens = random_tokens(3, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (0, {"graphrt says TOO_LARGE": 7})


# Caches ------------------------------------------------------------------------------------------


def test_a_returned_cache_keeps_its_contents_after_the_next_generate_call(model, plain):
    """As transformers' own does: it takes its tensors along when the memory is needed."""
    tokens, more = random_tokens(2, 6), random_tokens(2, 3, seed=4)

    def two_turns(model):
        first = generate(model, tokens, return_dict_in_generate=True)
        keys = first.past_key_values.layers[0].keys.clone()
        generate(model, random_tokens(3, 9, seed=8))
        assert torch.equal(first.past_key_values.layers[0].keys, keys)
        longer = torch.cat([first.sequences, more], 1)
        return generate(model, longer, past_key_values=first.past_key_values)

    assert torch.equal(two_turns(model), two_turns(plain))
    assert served(model) == (3 * 7, {})


def test_a_second_generate_call_continues_from_a_returned_cache(model, plain):
    tokens, more = random_tokens(2, 6), random_tokens(2, 3, seed=4)

    def two_turns(model):
        first = generate(model, tokens, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, more], 1)
        return generate(model, longer, past_key_values=first.past_key_values)

    assert torch.equal(two_turns(model), two_turns(plain))
    assert served(model) == (2 * 7, {})


def test_several_prompts_start_from_copies_of_a_prefix_cache(model, plain):
    prefix, ends = random_tokens(1, 8), [random_tokens(1, 3, seed=seed) for seed in (1, 2)]

    def prompts(model, cache):
        with torch.no_grad():
            model(prefix, past_key_values=cache, use_cache=True)
        given = [torch.cat([prefix, end], 1) for end in ends]
        return [generate(model, each, past_key_values=copy.deepcopy(cache)) for each in given]

    ours = prompts(model, graphs_of(model).new_cache())
    theirs = prompts(plain, transformers.DynamicCache(config=plain.config))
    assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    assert served(model) == (2 * 7, {})


def test_a_dynamic_cache_passed_by_the_user_is_used_eagerly(model, plain):
    tokens = random_tokens(2, 6)
    cache = transformers.DynamicCache(config=model.config)
    assert torch.equal(generate(model, tokens, past_key_values=cache), generate(plain, tokens))
    assert cache.get_seq_length() == 13
    # `cache` from transformers 5.24 on.
    name = graphs_of(model)._signature.cache
    assert served(model) == (0, {f"a DynamicCache was passed as {name}=": 7})


def test_a_request_for_a_static_cache_is_served_by_graphs(model, plain):
    """Checkpoints of Gemma ask for one in their generation_config."""
    tokens, given = random_tokens(2, 6), {"cache_implementation": "static"}
    assert torch.equal(generate(model, tokens, **given), generate(plain, tokens))
    assert served(model) == (7, {})


def test_a_request_for_an_offloaded_cache_is_left_to_transformers(model, plain, monkeypatch):
    asked = []
    graphs = graphs_of(model)
    monkeypatch.setattr(graphs, "_prepare", lambda config, *args: asked.append(config))
    tokens = random_tokens(2, 6)
    ours = generate(model, tokens, cache_implementation="offloaded")
    assert torch.equal(ours, generate(plain, tokens))
    assert asked[0].cache_implementation == "offloaded"
    assert served(model) == (0, {"cache_implementation='offloaded' was asked for": 7})


def test_a_cache_from_before_a_recapture_is_used_eagerly(plain):
    model = with_graphs(new_model("llama"), max_batch=2, sizes=[2], max_len=32, strict=True)
    tokens, more = random_tokens(2, 6), random_tokens(2, 3, seed=4)
    first = generate(model, tokens, return_dict_in_generate=True)
    graphs_of(model).recapture()
    longer = torch.cat([first.sequences, more], 1)
    ours = generate(model, longer, past_key_values=first.past_key_values)
    cache = generate(plain, tokens, return_dict_in_generate=True).past_key_values
    assert torch.equal(ours, generate(plain, longer, past_key_values=cache))
    assert served(model) == (7, {"the cache is of other graphs than the model's": 7})


def test_graphs_keep_no_reference_to_a_cache_that_the_user_dropped(model):
    generate(model, random_tokens(2, 6))
    holder = graphs_of(model)._holder
    gc.collect()
    assert holder() is None


def test_nan_left_in_the_kv_cache_does_not_reach_the_next_sequence(model, plain):
    cache = graphs_of(model).new_cache()
    tokens = random_tokens(2, 6)
    with torch.no_grad():
        model(random_tokens(2, 12), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = torch.full_like(layer.keys, torch.nan)
        layer.values = torch.full_like(layer.values, torch.nan)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (7, {})


# Threads -----------------------------------------------------------------------------------------


def test_generate_in_a_second_thread_during_a_call_runs_eagerly(model, plain):
    tokens, other = random_tokens(2, 6), random_tokens(1, 5, seed=3)
    expected = generate(plain, other, 6)
    results = []

    class Between(transformers.generation.streamers.BaseStreamer):
        """Generates in another thread in the middle of a call."""

        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls == 4:
                thread = threading.Thread(target=lambda: results.append(generate(model, other, 6)))
                thread.start()
                thread.join()

        def end(self):
            pass

    ours = generate(model, tokens[:1], 8, streamer=Between())
    assert torch.equal(ours, generate(plain, tokens[:1], 8))
    assert torch.equal(results[0], expected)
    assert served(model) == (7, {"another call of generate() has the memory": 5})


def test_threads_that_generate_at_once_each_get_the_eager_tokens(model, plain):
    prompts = [random_tokens(1 + seed % 3, 5 + seed, seed=seed) for seed in range(6)]
    expected = [generate(plain, each) for each in prompts]
    results: dict[int, torch.Tensor] = {}

    def run(at):
        for _ in range(3):
            results[at] = generate(model, prompts[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[at], each) for at, each in enumerate(expected))
    steps, eager = served(model)
    assert steps + sum(eager.values()) == 6 * 3 * 7


# The model ---------------------------------------------------------------------------------------


def test_without_graphs_restores_the_models_own_attributes(plain):
    model = new_model("llama")
    before, signature = dict(model.__dict__), inspect.signature(model.forward)
    with_graphs(model, max_batch=1, max_len=16, strict=True)
    assert inspect.signature(model.forward) == signature
    assert model.forward.__name__ == "forward"
    without_graphs(model)
    assert model.__dict__ == before
    assert torch.equal(WAYS["greedy"](model, "llama", "cpu"), WAYS["greedy"](plain, "llama", "cpu"))
    without_graphs(model)
    with pytest.raises(InvalidOptionError, match="with_graphs"):
        graphs_of(model)


def test_the_kv_cache_is_freed_when_the_model_is_deleted():
    model = with_graphs(new_model("llama"), max_batch=2, sizes=[2], max_len=16, strict=True)
    generate(model, random_tokens(2, 4), 4)
    keys = weakref.ref(graphs_of(model).steps.memory.layers[0].keys)
    del model
    gc.collect()
    assert keys() is None


def test_a_deep_copy_of_the_model_has_no_graphs_and_uses_its_own_weights(model, plain):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    tokens = random_tokens(1, 6)
    assert not torch.equal(generate(twin, tokens), generate(plain, tokens))
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    with pytest.raises(InvalidOptionError, match="no graphs"):
        graphs_of(twin)


def test_weights_written_in_place_are_read_by_replayed_steps():
    plain, model = new_model("llama"), new_model("llama")
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    for each in (plain, model):
        with torch.no_grad():
            each.model.layers[0].mlp.up_proj.weight.mul_(-1)
    tokens = random_tokens(1, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (7, {})


def change_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


def change_layer(model):
    layer = copy.deepcopy(model.model.layers[1])
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(-1)
    model.model.layers[1] = layer


def change_number(model):
    model.model.layers[0].self_attn.scaling *= 2


def change_weight(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def change_strides(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.shape[0] == weight.shape[1]
    weight.data = weight.data.t()  # where it was


CHANGES = (change_hook, change_layer, change_number, change_weight, change_strides)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_runs_eagerly_until_its_recapture(change):
    plain, model = new_model("llama"), new_model("llama")
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    tokens = random_tokens(1, 6)
    for each in (plain, model):
        change(each)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    steps, eager = served(model)
    assert steps == 0 and list(eager.values()) == [7] and "recapture" in next(iter(eager))
    if change is change_hook:
        with pytest.raises(CaptureError, match="has a hook"):
            graphs_of(model).recapture()
        return
    graphs_of(model).recapture()
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model)[0] == 7


def add_global_hook():
    hooks = torch.nn.modules.module
    return hooks.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, torch.nn.Linear) else None
    )


def hook_after(module, state):
    module.register_forward_hook(lambda module, args, output: output * state["factor"])


def hook_before(module, state):
    module.register_forward_pre_hook(lambda module, args: (args[0] * state["factor"],))


@pytest.mark.parametrize("add", [hook_after, hook_before], ids=lambda add: add.__name__)
@pytest.mark.parametrize("where", ["model.layers.0.mlp", "lm_head"])
def test_a_hook_on_a_submodule_keeps_the_model_eager_and_runs_each_step(add, where):
    results = []
    for with_ours in (False, True):
        model, state = new_model("llama"), {"factor": 1.0}
        add(model.get_submodule(where), state)
        if with_ours:
            with_graphs(model, max_batch=1, max_len=32)
            assert f"{where} has a hook" in graphs_of(model).report().refused
        generate(model, random_tokens(1, 6))
        state["factor"] = -4.0
        results.append(generate(model, random_tokens(1, 6)))
    assert torch.equal(*results)


def test_a_pruned_layer_is_captured_and_its_changed_mask_is_applied():
    plain, model = new_model("llama"), new_model("llama")
    for each in (plain, model):
        layer = each.model.layers[0].mlp.up_proj
        torch.nn.utils.prune.l1_unstructured(layer, name="weight", amount=0.5)
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    for _ in range(2):
        for each in (plain, model):
            with torch.no_grad():
                each.model.layers[0].mlp.up_proj.weight_mask.mul_(-1)
        tokens = random_tokens(1, 6)
        assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (14, {})


def test_a_hook_on_the_model_itself_runs_around_each_replay():
    results, state = [], {"factor": 1.0}
    for with_ours in (False, True):
        model, state = new_model("llama"), {"factor": 1.0}

        def scale(module, args, output, state=state):
            output.logits = output.logits * state["factor"]
            return output

        model.register_forward_hook(scale)
        if with_ours:
            with_graphs(model, max_batch=1, max_len=32, strict=True)
        generate(model, random_tokens(1, 6))
        state["factor"] = -4.0
        results.append(generate(model, random_tokens(1, 6)))
    assert torch.equal(*results)
    assert served(model) == (14, {})


def test_a_user_defined_accelerate_hook_is_refused_at_capture():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Mine(hooks.ModelHook):
        pass

    model = new_model("llama")
    hooks.add_hook_to_module(model.model.layers[1], hooks.SequentialHook(Mine()))
    with pytest.raises(CaptureError, match="has a hook"):
        with_graphs(model, max_batch=1, max_len=32, strict=True)


def test_a_global_module_hook_makes_steps_eager_until_its_removal():
    plain, model = new_model("llama"), new_model("llama")
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    tokens = random_tokens(1, 6)
    hook = add_global_hook()
    try:
        assert torch.equal(generate(model, tokens), generate(plain, tokens))
        steps, eager = served(model)
        assert steps == 0 and list(eager.values()) == [7]
        with pytest.raises(CaptureError, match="torch calls hooks in all modules"):
            with_graphs(new_model("llama"), max_batch=1, max_len=32, strict=True)
    finally:
        hook.remove()
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model)[0] == 7


def logits_of(model, tokens):
    more = {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(generate(model, tokens, **more).logits)


def test_a_changed_config_value_makes_steps_eager_until_the_value_is_restored():
    plain, model = new_model("gemma2"), new_model("gemma2")
    with_graphs(model, max_batch=1, max_len=32, strict=True)
    tokens, before = random_tokens(1, 6), model.config.final_logit_softcapping
    for value, count in ((0.5, 0), (before, 7)):
        for each in (plain, model):
            each.config.final_logit_softcapping = value
        ours, theirs = logits_of(model, tokens), logits_of(plain, tokens)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert served(model)[0] == count
    reason = (
        "the model is not as it was captured (model.config.final_logit_softcapping): recapture()"
    )
    assert served(model)[1] == {reason: 7}
    model.config = copy.deepcopy(model.config)
    model.config.final_logit_softcapping = 0.5
    logits_of(model, tokens)
    assert served(model) == (7, {reason: 14})


def test_changing_config_values_that_steps_do_not_read_keeps_replays(model, plain):
    before = model.config.pad_token_id, model.config.use_cache
    model.config.pad_token_id, model.config.use_cache = 5, not model.config.use_cache
    tokens = random_tokens(1, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    model.config.pad_token_id, model.config.use_cache = before
    assert served(model) == (7, {})


def test_a_model_loaded_with_a_device_map_is_served(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain = new_model("llama")
    plain.save_pretrained(tmp_path)
    model = type(plain).from_pretrained(tmp_path, device_map={"": "cpu"})
    with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True)
    tokens = random_tokens(2, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (7, {})


def test_a_model_spread_over_several_devices_runs_eagerly(plain):
    model = new_model("llama")
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with_graphs(model, max_batch=2, sizes=[2], max_len=32)
    tokens = random_tokens(2, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert "several devices" in graphs_of(model).report().refused


# Loops of one's own ------------------------------------------------------------------------------


def test_a_loop_of_step_continues_eagerly_after_generate_took_the_kv_cache(model, plain):
    graphs, ours = (
        graphs_of(model),
        graphs_of(with_graphs(new_model("llama"), max_batch=2, sizes=[2], max_len=32)),
    )
    tokens = random_tokens(2, 6)
    expected = [ours.prefill(tokens), *(ours.step(tokens[:, at]) for at in range(3))]
    logits = [graphs.prefill(tokens), graphs.step(tokens[:, 0])]
    generate(model, random_tokens(3, 4))
    logits += [graphs.step(tokens[:, at]) for at in (1, 2)]
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    reason = "another call has the memory"
    assert served(model) == (8, {reason: 2})


def test_a_step_with_gradients_enabled_runs_eagerly(model):
    cache, tokens = graphs_of(model).new_cache(), random_tokens(1, 4)
    positions = torch.full((1, 1), 4)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
    logits = model(tokens[:, :1], past_key_values=cache, position_ids=positions).logits
    assert logits.requires_grad
    assert served(model) == (0, {"gradients are on": 1})


COUNTING = [("llama", True), ("gpt2", True), ("opt", False)]


@torch.no_grad()
def loop_without_positions(model, cache, mask):
    """Logits of a loop that passes what it must: its cache, and a mask if there is padding."""
    tokens, logits = random_tokens(2, 5), []
    for _ in range(10):
        masked = {} if mask is None else {"attention_mask": mask}
        output = model(tokens, past_key_values=cache, use_cache=True, **masked)
        logits.append(output.logits[:, -1])
        tokens, cache = logits[-1].argmax(-1)[:, None], output.past_key_values
        mask = None if mask is None else torch.cat([mask, torch.ones_like(tokens)], 1)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "is_served", "padded"),
    rest_long(
        [(*each, padded) for each in COUNTING for padded in (False, True)],
        *[("llama", True, True), ("gpt2", True, False), ("opt", False, True)],
    ),
)
def test_a_loop_that_passes_no_position_ids_is_served_if_the_model_counts_tokens(
    name, is_served, padded
):
    model, mask = new_model(name), torch.ones(2, 5, dtype=torch.int64)
    mask[0, :3] = 0
    passed = mask if padded else None
    expected = loop_without_positions(model, None, passed)
    with_graphs(model, max_batch=2, sizes=[2], max_len=16, strict=True)
    logits = loop_without_positions(model, graphs_of(model).new_cache(), passed)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    eager = {} if is_served else {"position_ids= was not passed": 9}
    assert served(model) == (9 if is_served else 0, eager)


def test_the_code_of_the_transformers_page_runs_and_prints_as_documented(capsys):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "transformers.md"
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, "transformers.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    shapes = ["torch.Size([3, 7, 64])", "torch.Size([2, 7, 64])"]
    assert printed == ["11 steps by graphs, 1 prompts", "{}", *shapes]
    report = names["graphs"].report()
    assert (report.served, report.eager) == (8, {})


def logits_of_loop(model, tokens, cache, change):
    """Logits of three steps of one token; the model is changed after the first one."""
    logits = []
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
        for at in range(3):
            positions = torch.full((len(tokens), 1), tokens.shape[1] + at)
            call = {"past_key_values": cache, "position_ids": positions}
            logits.append(model(input_ids=tokens[:, at : at + 1], **call).logits)
            if at == 0:
                change(model)
    return torch.stack(logits)


@pytest.mark.parametrize(
    "change", rest_long(CHANGES, change_hook, change_weight), ids=lambda change: change.__name__
)
def test_a_model_changed_between_steps_of_a_loop_runs_eagerly(change):
    plain, model = new_model("llama"), new_model("llama")
    with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True)
    tokens = random_tokens(2, 6)
    ours = logits_of_loop(model, tokens, graphs_of(model).new_cache(), change)
    theirs = logits_of_loop(plain, tokens, transformers.DynamicCache(), change)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    steps, eager = served(model)
    assert steps == 1 and list(eager.values()) == [2] and "recapture" in next(iter(eager))


def test_step_runs_eagerly_while_the_model_is_changed_and_replays_once_restored():
    plain, model = new_model("llama"), new_model("llama")
    graphs = graphs_of(with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True))
    tokens, cache = random_tokens(2, 6), transformers.DynamicCache()
    with torch.no_grad():
        graphs.prefill(tokens)
        plain(tokens, past_key_values=cache)
        for at, factor in enumerate((1, 2, 0.5)):
            for each in (plain, model):
                each.model.layers[0].self_attn.scaling *= factor
            ours = graphs.step(tokens[:, at])
            theirs = plain(tokens[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    steps, eager = served(model)
    assert steps == 2 and list(eager.values()) == [1]


def test_a_loop_with_adapters_disabled_is_served_by_graphs_without_them():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(new_model("llama"), config).eval()
    plain, tokens = new_model("llama"), random_tokens(2, 6)
    graphs = graphs_of(with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True))
    with model.disable_adapter():
        ours = logits_of_loop(model, tokens, graphs.new_cache(), lambda model: None)
    theirs = logits_of_loop(plain, tokens, transformers.DynamicCache(), lambda model: None)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    steps, eager = served(model)
    assert (steps, eager) == (3, {})


ONES = torch.ones(2, 6, dtype=torch.int64)
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((torch.tensor([1, 2, 3]),), "(rows, length)"),
        (([[1, 2, 3]],), "(rows, length)"),
        ((torch.zeros(2, 0, dtype=torch.int64),), "(rows, length)"),
        ((torch.ones(2, 6),), "(rows, length)"),
        ((ONES, torch.ones(2, 8, dtype=torch.int64)), "shape of the prompts"),
        ((ONES, [[1] * 6] * 2), "shape of the prompts"),
        ((ONES, RIGHT), "not on the left"),
        ((ONES, (1.0 - RIGHT.flip(1)) * -1e9), "not on the left"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prefill_refuses_malformed_prompts_and_names_the_fault(model, given, what):
    with pytest.raises(InvalidInputError, match=re.escape(what)) as error:
        graphs_of(model).prefill(*given)
    assert error.value.advice is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32], ids=str)
def test_prefill_takes_masks_of_other_dtypes(model, dtype):
    graphs, tokens, mask = graphs_of(model), random_tokens(2, 6), RIGHT.flip(1)
    expected = [graphs.prefill(tokens, mask), graphs.step(tokens[:, 0])]
    ours = [graphs.prefill(tokens.int(), mask.to(dtype)), graphs.step(tokens[:, 0])]
    assert torch.equal(torch.stack(ours), torch.stack(expected))
    assert served(model) == (2, {})


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], torch.tensor([1]), torch.tensor([[1], [2]]), torch.tensor([1.0, 2.0])],
    ids=["list", "rows", "2-D", "dtype"],
)
def test_step_refuses_malformed_tokens_and_keeps_the_sequence(model, tokens):
    graphs, prompts = graphs_of(model), random_tokens(2, 6)
    graphs.prefill(prompts)
    expected = graphs.step(prompts[:, 0])
    graphs.prefill(prompts)
    with pytest.raises(InvalidInputError, match="one token of each sequence") as error:
        graphs.step(tokens)
    assert "argmax" in error.value.advice
    assert torch.equal(graphs.step(prompts[:, 0]), expected)


def test_steps_with_int32_tokens_run_eagerly(model, plain):
    tokens, logits = random_tokens(2, 6).int(), []
    for each, cache in (
        (plain, transformers.DynamicCache()),
        (model, graphs_of(model).new_cache()),
    ):
        with torch.no_grad():
            each(tokens, past_key_values=cache)
            positions = torch.full((2, 1), 6)
            call = {"past_key_values": cache, "position_ids": positions}
            logits.append(each(tokens[:, :1], **call).logits)
    assert torch.equal(*logits)
    assert served(model) == (0, {"input_ids= of torch.int32 was passed": 1})


def test_steps_under_autocast_run_eagerly(model, plain):
    tokens = random_tokens(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        ours = generate(model, tokens, return_dict_in_generate=True, output_logits=True)
        theirs = generate(plain, tokens, return_dict_in_generate=True, output_logits=True)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)
    assert served(model) == (0, {OTHER: 7})


def test_a_model_in_training_mode_is_refused_and_runs_eagerly_if_switched_later(plain):
    model = new_model("llama").train()
    with pytest.raises(CaptureError, match="training"):
        with_graphs(model, max_batch=1, max_len=32, strict=True)
    with_graphs(model.eval(), max_batch=1, max_len=32, strict=True).train()
    tokens = random_tokens(1, 6)
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model)[0] == 0
    assert torch.equal(generate(model.eval(), tokens), generate(plain, tokens))
    assert served(model)[0] == 7


def test_a_generate_call_that_raises_releases_the_kv_cache(model, plain):
    class Interrupted(Exception):
        pass

    def stop(tokens, scores, **more):
        if tokens.shape[1] == 9:
            raise Interrupted
        return torch.zeros(len(tokens), dtype=torch.bool)

    tokens = random_tokens(2, 6)
    with pytest.raises(Interrupted):
        generate(model, tokens, stopping_criteria=[stop])
    assert torch.equal(generate(model, tokens), generate(plain, tokens))
    assert served(model) == (2 + 7, {})


def test_with_graphs_refuses_a_linear_layer_and_a_too_short_max_len():
    with pytest.raises(InvalidOptionError, match="of transformers"):
        with_graphs(torch.nn.Linear(2, 2), max_batch=1, max_len=16)
    with pytest.raises(InvalidOptionError, match="max_len"):
        with_graphs(new_model("llama"), max_batch=1, max_len=2)


@pytest.mark.parametrize("sizes", [[8], [1, 3, 8], [], [2, 2], [0, 2], ["2"], 4], ids=str)
def test_invalid_capture_sizes_are_refused_with_advice(plain, sizes):
    with pytest.raises(InvalidOptionError, match="size") as error:
        with_graphs(plain, max_batch=4, max_len=32, sizes=sizes)
    assert error.value.advice is not None
    with pytest.raises(InvalidOptionError, match="no graphs"):
        graphs_of(plain)
