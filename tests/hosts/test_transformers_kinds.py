"""Kinds of models, and changes between two calls, that the families of `test_transformers.py` do
not have: each was once refused, served as it was before the change, or advised wrongly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from graphrt.errors import CaptureError, InvalidOptionError
from tests.draws import on_devices, rest_long
from tests.models.families import SHARED
from tests.models.generating import generate, new_model, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from graphrt.hosts.transformers import graphs_of, with_graphs  # noqa: E402

VISION = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CHANGED = "the model is not as it was captured ({}): recapture()"


def pair(name: str = "llama", **config: Any) -> tuple[Any, Any]:
    """A model, and a twin with graphs."""
    plain = new_model(name, **config)
    return plain, with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=32, strict=True)


def served(model: Any) -> tuple[int, dict[str, int]]:
    report = graphs_of(model).report()
    return report.served, report.eager


def logits_of(model: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    call = {"return_dict_in_generate": True, "output_logits": True, **more}
    return torch.stack(generate(model, tokens, 8, **call).logits)


def assert_same(plain: Any, model: Any, tokens: torch.Tensor, **more: Any) -> None:
    ours, theirs = logits_of(model, tokens, **more), logits_of(plain, tokens, **more)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Code that is replaced ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", rest_long(["LlamaMLP", "LlamaForCausalLM"], "LlamaMLP"))
def test_a_replaced_forward_of_a_module_class_makes_steps_eager(name, monkeypatch):
    plain, model = pair()
    tokens, kind = random_tokens(2, 6), getattr(modeling_llama, name)
    before = kind.forward

    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output / 2
        output.logits = output.logits / 2
        return output

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", halved)
        assert_same(plain, model, tokens)
        assert served(model) == (0, {CHANGED.format(f"{name}.forward"): 7})
        graphs_of(model).recapture()
        assert_same(plain, model, tokens)
        assert served(model)[0] == 7
    assert_same(plain, model, tokens)
    assert served(model)[0] == 7


def weaker(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Little enough that a comparison within rounding of half precision would let it pass.
    return sdpa_attention_forward(*args, **kwargs)[0] * 0.999, None


def test_a_replaced_attention_function_makes_steps_eager_until_recapture(monkeypatch):
    plain, model = pair()
    tokens = random_tokens(2, 6)
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", weaker)
        assert_same(plain, model, tokens)
        assert served(model) == (
            0,
            {CHANGED.format("AttentionInterface._global_mapping['sdpa']"): 7},
        )
        graphs_of(model).recapture()
        assert_same(plain, model, tokens)
        assert served(model)[0] == 7


# Changes that no step reads ----------------------------------------------------------------------


def test_a_model_is_still_served_after_save_pretrained(tmp_path):
    plain, model = pair()
    model.save_pretrained(tmp_path)
    assert_same(plain, model, random_tokens(2, 6))
    assert served(model) == (7, {})


@pytest.mark.parametrize("captured_first", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_with_prompt_tuning_is_served_by_graphs(captured_first):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kind = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tokens, models = random_tokens(2, 6), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(peft.get_peft_model(new_model("llama"), kind).eval())
    plain, model = models
    if captured_first:
        base = with_graphs(new_model("llama"), max_batch=2, sizes=[2], max_len=32, strict=True)
        torch.manual_seed(0)
        model = peft.get_peft_model(base, kind).eval()
    else:
        with_graphs(model, max_batch=2, sizes=[2], max_len=32, strict=True)
    steps: list[bool] = []
    # PEFT 0.21 does not know the cache by its name of transformers 5.24, and passes no token alone.
    plain.base_model.register_forward_pre_hook(
        lambda _, args, call: steps.append(call["input_ids"] is not None), with_kwargs=True
    )
    for _ in range(2):
        call = {"input_ids": tokens, "max_new_tokens": 8, "do_sample": False}
        call["attention_mask"] = torch.ones_like(tokens)
        assert torch.equal(model.generate(**call), plain.generate(**call))
    assert len(steps) == 16
    assert served(model) == (sum(steps), {})


def test_token_type_ids_are_served_if_only_the_prompt_reads_them():
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.GemmaConfig(**{**SHARED, "head_dim": 16, "pad_token_id": 0}),
        image_token_index=2,
        projection_dim=64,
        hidden_size=64,
    )
    torch.manual_seed(0)
    plain = transformers.PaliGemmaForConditionalGeneration(config).eval()
    model = with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=32, strict=True)
    tokens = torch.cat([torch.full((2, 4), 2), random_tokens(2, 5)], 1)
    more = {"pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": torch.zeros_like(tokens)}
    more["token_type_ids"][:, 6:] = 1
    assert_same(plain, model, tokens, **more)
    assert served(model) == (7, {})


def test_token_type_ids_read_by_every_step_make_steps_eager():
    config = transformers.CTRLConfig(
        vocab_size=64, n_embd=32, dff=64, n_layer=2, n_head=2, n_positions=64
    )
    torch.manual_seed(0)
    plain = transformers.CTRLLMHeadModel(config).eval()
    model = with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=32, strict=True)
    cache, theirs = graphs_of(model).new_cache(), transformers.DynamicCache()
    tokens, types = random_tokens(2, 6) % 64, torch.ones(2, 6, dtype=torch.int64)
    with torch.no_grad():
        for each, kept in ((plain, theirs), (model, cache)):
            each(tokens, past_key_values=kept)
        call = {"token_type_ids": types[:, :1], "position_ids": torch.full((2, 1), 6)}
        ours = model(tokens[:, :1], past_key_values=cache, **call).logits
        expected = plain(tokens[:, :1], past_key_values=theirs, **call).logits
        other = plain(tokens[:, :1], past_key_values=theirs).logits
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(other, expected)
    assert served(model) == (0, {"token_type_ids= was passed": 1})


# Positions in planes -----------------------------------------------------------------------------

IMAGE, START = 127, 125
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
QWEN_TEXT = {**SHARED, "vocab_size": 128, "head_dim": 16, "pad_token_id": 0}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
QWEN_VISION |= {"num_heads": 2, "patch_size": 4}
LINEAR = {f"linear_{each}_head_dim": 16 for each in ("key", "value")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    ),
    "Qwen2_5_VL": (
        {"rope_parameters": MROPE},
        {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [0]},
    ),
    "Qwen3VL": (
        {"rope_parameters": MROPE},
        {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Qwen3_5": (
        {
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
            "layer_types": ["linear_attention", "full_attention"],
            **LINEAR,
        },
        {**QWEN_VISION, "num_position_embeddings": 16},
    ),
}


def qwen(name: str, device: str = "cpu") -> Any:
    text, vision = QWENS[name]
    config = getattr(transformers, f"{name}Config")(
        text_config={**QWEN_TEXT, **text},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=126,
        vision_start_token_id=START,
        vision_end_token_id=124,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().to(device)


def with_pictures(device: str = "cpu", *, text: int = 6) -> dict[str, Any]:
    """Two prompts with a picture of 4 x 6 patches in 6 tokens, and text behind it."""
    tokens = random_tokens(2, 4 + 6 + text) % 100
    tokens[:, 3], tokens[:, 4:10] = START, IMAGE
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    generator = torch.Generator().manual_seed(0)
    prompt = {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": torch.randn(2 * 24, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 6]]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
    return {name: each.to(device) for name, each in prompt.items()}


def told(model: Any, call: dict[str, Any], **more: Any) -> Any:
    more = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **more}
    return model.generate(**call, max_new_tokens=8, **more)


# Qwen 3.5 has layers of recurrent states beside.
@pytest.mark.parametrize(("name", "device"), on_devices(QWENS, "Qwen2VL", "Qwen3_5"))
def test_multimodal_positions_of_time_height_and_width_are_served(name, device):
    plain = qwen(name, device)
    model = with_graphs(copy.deepcopy(plain), max_batch=4, sizes=[4], max_len=64, strict=True)
    words = {"input_ids": random_tokens(2, 6, device) % 100}
    # Height and width go on apart where the prompt ends in a picture.
    calls = (with_pictures(device), with_pictures(device, text=0), words)
    for call in calls:
        for more in ({}, {"num_beams": 2}):
            ours, theirs = told(model, call, **more), told(plain, call, **more)
            assert torch.equal(ours.sequences, theirs.sequences)
            for one, other in zip(ours.logits, theirs.logits, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert served(model) == (7 * 2 * len(calls), {})


def test_a_second_turn_about_a_picture_is_replayed():
    plain = qwen("Qwen3VL")
    model = with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=64, strict=True)
    first, turns = with_pictures(), []
    for each in (plain, model):
        answer = told(each, first)
        tokens = torch.cat([answer.sequences, random_tokens(2, 3) % 100], 1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 11, dtype=torch.int64)], 1)
        call = {"input_ids": tokens, "attention_mask": mask}
        turns.append(told(each, call, past_key_values=answer.past_key_values).sequences)
    assert torch.equal(*turns)
    assert served(model) == (14, {})


def test_a_capture_between_two_turns_keeps_rope_deltas():
    model = qwen("Qwen2VL")
    told(model, with_pictures())
    deltas = model.model.rope_deltas.clone()
    assert deltas.any()
    with_graphs(model, max_batch=2, sizes=[2], max_len=64, strict=True)
    assert torch.equal(model.model.rope_deltas, deltas)


def test_position_ids_without_the_text_plane_make_steps_eager():
    plain = qwen("Qwen3VL")
    model = with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=64, strict=True)
    tokens, caches = random_tokens(2, 6) % 100, []
    for each in (plain, model):
        new = graphs_of(model).new_cache() if each is model else transformers.DynamicCache()
        with torch.no_grad():
            each(tokens, past_key_values=new)
            positions = torch.full((3, 2, 1), 9)
            caches.append(each(tokens[:, :1], past_key_values=new, position_ids=positions))
    torch.testing.assert_close(caches[0].logits, caches[1].logits)
    assert served(model) == (0, {"position_ids= is not of the shape (4, rows, 1)": 1})


def test_a_loop_of_prefill_and_step_gives_the_tokens_of_generate():
    plain = qwen("Qwen3VL")
    graphs = graphs_of(
        with_graphs(copy.deepcopy(plain), max_batch=2, sizes=[2], max_len=64, strict=True)
    )
    prompts = random_tokens(2, 6) % 100
    tokens = [graphs.prefill(prompts).argmax(-1)]
    for _ in range(7):
        tokens.append(graphs.step(tokens[-1]).argmax(-1))
    expected = told(plain, {"input_ids": prompts}).sequences[:, 6:]
    assert torch.equal(torch.stack(tokens, 1), expected)
    assert graphs.report().served == 7


# Advice ------------------------------------------------------------------------------------------


def t5gemma() -> Any:
    config = {**SHARED, "head_dim": 16, "sliding_window": 8}
    half = transformers.T5GemmaModuleConfig(**config)
    whole = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
    return transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=half, decoder=half, vocab_size=256, **whole)
    ).eval()


def test_extra_outputs_that_no_option_controls_are_refused():
    with pytest.raises(CaptureError, match="decoder_hidden_states") as error:
        with_graphs(t5gemma(), max_batch=1, max_len=32, strict=True)
    assert str(error.value.advice).startswith("leave with_graphs() out")


def test_hidden_states_asked_for_by_the_config_are_refused_with_advice():
    model = new_model("llama", output_hidden_states=True)
    with pytest.raises(CaptureError, match="hidden_states") as error:
        with_graphs(model, max_batch=1, max_len=32, strict=True)
    advised = str(error.value.advice)
    assert advised == "model.config.output_hidden_states = False before with_graphs()"
    model.config.output_hidden_states = False
    with_graphs(model, max_batch=1, max_len=32, strict=True)


def test_graphs_of_names_the_class_of_a_model_without_graphs():
    with pytest.raises(InvalidOptionError) as error:
        graphs_of(new_model("llama"))
    assert error.value.got == "LlamaForCausalLM"
