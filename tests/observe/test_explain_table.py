"""`explain` on models of transformers, and on broken forwards: what stands in the way, at which
line, and whether its advice works when it is followed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import InputSpec, eager_break
from graphrt.observe import Explanation, explain
from tests.draws import rest_long

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
COUNT = torch.zeros(1)
calls = 0
X = {"x": InputSpec(torch.float32, ("tokens", 8))}


def explained(forward: Callable[..., Any], inputs: dict[str, InputSpec] = X) -> Explanation:
    return explain(forward, inputs, tokens=4, platform="cpu")


# Broken forwards, and the same ones mended as they are told to -----------------------------------


def reads_a_number(x):
    return x @ WEIGHT / WEIGHT.abs().max().item()


def keeps_it_on_the_device(x):
    return x @ WEIGHT / WEIGHT.abs().max()


@eager_break
def scaled(h):
    return h / WEIGHT.abs().max().item()


def breaks_around_it(x):
    return torch.relu(scaled(x @ WEIGHT))


def branches_on_data(x):
    if WEIGHT.sum() > 0:
        return x @ WEIGHT
    return -(x @ WEIGHT)


def chooses_on_the_device(x):
    h = x @ WEIGHT
    return torch.where(WEIGHT.sum() > 0, h, -h)


def drops_rows(x):
    h = x @ WEIGHT
    return h + h[h[:, 0] > 0].sum() * 0


def fills_rows(x):
    h = x @ WEIGHT
    return h + torch.where(h[:, :1] > 0, h, 0.0)


def prints_a_value(x):
    h = x @ WEIGHT
    print("h begins with", h[0, 0])
    return torch.relu(h)


@eager_break
def show(h):
    print("h begins with", h[0, 0])
    return h.clone()


def prints_in_a_break(x):
    return torch.relu(show(x @ WEIGHT))


def counts_in_python(x):
    global calls
    calls += 1
    return x @ WEIGHT + calls


def counts_in_a_tensor(x):
    COUNT.add_(1)
    return x @ WEIGHT + COUNT


def draws_by_numpy(x):
    return x @ WEIGHT + torch.from_numpy(np.random.randn(8).astype("float32"))


def draws_by_python(x):
    return x @ WEIGHT + random.random()


def draws_by_torch(x):
    return x @ WEIGHT + torch.rand_like(x)


@eager_break
def noisy(h):
    return h + random.random()


def draws_in_a_break(x):
    return torch.relu(noisy(x @ WEIGHT))


def mixes_rows(ids):
    h = WEIGHT[ids].sum(1)
    return h - h.mean(0)


BROKEN: list[tuple[Any, str, str, str | None]] = [
    # The operator, its line, and why the trial fails, None where nothing is captured.
    (reads_a_number, "aten._local_scalar_dense.default", ".max().item()", ""),
    (branches_on_data, "Tensor.__bool__", "if WEIGHT.sum() > 0:", None),
    (drops_rows, "aten.index.Tensor", "h[h[:, 0] > 0]", "aten::index.Tensor"),
    (prints_a_value, "Tensor.__repr__", 'print("h begins with"', None),
    (draws_by_numpy, "numpy.random", "np.random.randn", "differs from eager"),
    (draws_by_python, "random", "random.random()", "differs from eager"),
]


@pytest.mark.parametrize(("forward", "op", "line", "trial"), BROKEN)
def test_explain_names_the_obstacle_operator_line_and_trial_finding(forward, op, line, trial):
    explanation = explained(forward)
    (obstacle,) = explanation.obstacles
    assert obstacle.op == op and line in (obstacle.source or "")
    assert obstacle.advice
    text = str(explanation)
    assert "In the way of one graph (FULL):" in text and line in text
    if trial is None:
        assert explanation.mode is None and "Nothing was captured" in text
    elif trial:
        assert trial in (explanation.trial or "")
        assert "GraphRunner(" not in text


@pytest.mark.parametrize(
    ("forward", "mode"),
    [
        (keeps_it_on_the_device, "FULL"),
        (breaks_around_it, "PIECEWISE"),
        (chooses_on_the_device, "FULL"),
        (fills_rows, "FULL"),
        (prints_in_a_break, "PIECEWISE"),
        (counts_in_a_tensor, "FULL"),
        (draws_by_torch, "FULL"),
        (draws_in_a_break, "PIECEWISE"),
    ],
)
def test_following_the_advice_of_explain_gives_a_replayed_step(forward, mode):
    explanation = explained(forward)
    assert (explanation.trial, explanation.mode, explanation.breaks) == (None, mode, ())
    # One graph has no breaks, so in its way is what they contain.
    assert len(explanation.obstacles) == explanation.eager_parts == (mode == "PIECEWISE")
    runner = runner_of(explanation, forward)
    with torch.no_grad():
        assert runner(x=torch.randn(3, 8)).shape == (3, 8)
    assert runner.last_dispatch.reason.name == "HIT"


def test_a_python_counter_is_named_with_the_operator_that_uses_its_value():
    explanation = explained(counts_in_python)
    assert explanation.obstacles == ()
    assert "global calls" in (explanation.trial or "")
    assert "return x @ WEIGHT + calls" in (explanation.trial or "")
    assert str(explanation).startswith("No operator stands in the way")


def test_example_integers_differ_per_row_and_reveal_mixed_rows():
    # Of zeros alone every row would equal its padding, and their mean too.
    explanation = explained(mixes_rows, {"ids": InputSpec(torch.int64, ("rows", 3))})
    assert "the first operator that mixes rows" in (explanation.trial or "")


def test_the_explained_code_keeps_the_padding_options_of_inputs():
    def shifted(x, slots, starts):
        return x * (slots + starts[1:]).unsqueeze(1)

    explanation = explained(
        shifted,
        X
        | {
            "slots": InputSpec(torch.int64, ("reqs",), pad=-1, index=True),
            "starts": InputSpec(torch.int64, ("reqs+1",), pad="repeat"),
        },
    )
    assert "InputSpec(torch.int64, ('reqs',), pad=-1, index=True)" in explanation.code
    assert "InputSpec(torch.int64, ('reqs+1',), pad='repeat')" in explanation.code
    assert runner_of(explanation, shifted).plan.sizes.general == (4,)


def runner_of(explanation: Explanation, forward: Callable[..., Any]) -> Any:
    names: dict[str, Any] = {"forward": forward}
    exec(explanation.code, names)
    return names["runner"]


# Models ------------------------------------------------------------------------------------------

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 64, "word_embed_proj_dim": 32,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "num_mel_bins": 8, "max_source_positions": 16,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
IDS = {"input_ids": InputSpec(torch.int64, ("rows", 8))}
IMAGES = {"pixel_values": InputSpec(torch.float32, ("rows", 3, 16, 16))}
SOUND = {"input_features": InputSpec(torch.float32, ("rows", 8, 32))}
BOTH = {**IDS, "decoder_input_ids": InputSpec(torch.int64, ("rows", 8))}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, InputSpec]]] = {
    "bert": ("BertConfig", "BertModel", DECODER, IDS),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, IDS),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, IDS),
    "t5 encoder": ("T5Config", "T5EncoderModel", T5, IDS),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, BOTH),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, IDS),
    "mamba": ("MambaConfig", "MambaForCausalLM", {**DECODER, "state_size": 4}, IDS),
    "vit": ("ViTConfig", "ViTModel", VIT, IMAGES),
    "whisper encoder": ("WhisperConfig", "WhisperEncoder", WHISPER, SOUND),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GROUPED, "head_dim": 8}, IDS),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT, IDS),
}


def model_of(name: str, **more: Any) -> Callable[..., torch.Tensor]:
    transformers = pytest.importorskip("transformers", reason="needs transformers (its extra)")
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config_class, model_class, settings, _ = MODELS[name]
    config = getattr(transformers, config_class)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = WhisperEncoder if name == "whisper encoder" else getattr(transformers, model_class)
        model = made(config, **more) if not more else made._from_config(config, **more)
    model.eval()
    return lambda **inputs: model(**inputs)[0]


# A decoder, a model of two inputs, and one of pictures.
@pytest.mark.parametrize("name", rest_long(MODELS, "llama", "t5", "vit"))
def test_explain_of_each_transformers_model_reports_no_obstacles(name):
    forward, inputs = model_of(name), MODELS[name][3]
    explanation = explained(forward, inputs)
    assert (explanation.obstacles, explanation.trial, explanation.mode) == ((), None, "FULL")
    assert explanation.reads and not explanation.writes
    assert "The replay equals the forward." in str(explanation)
    # A step that is looked at closely each time takes twenty times as long as an eager one.
    assert explanation.graph_s < 4 * explanation.eager_s
    runner = runner_of(explanation, forward)
    rows = {
        name: torch.randint(60, (3, *spec.shape[1:])).to(spec.dtype)
        for name, spec in inputs.items()
    }
    with torch.no_grad():
        torch.testing.assert_close(runner(**rows), forward(**rows))
    assert runner.last_dispatch.reason.name == "HIT"


def test_a_host_loop_over_experts_is_an_obstacle():
    forward = model_of("mixtral", experts_implementation="eager")
    explanation = explained(forward, IDS)
    assert "aten.nonzero.default" in [each.op for each in explanation.obstacles]
    assert any("modeling_mixtral.py" in (each.source or "") for each in explanation.obstacles)
