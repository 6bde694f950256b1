"""Encoders of transformers, called through graphs: their own outputs, at any batch and length."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tests.draws import on_devices, rest_long
from tests.models.families import SHARED, VOCAB, WINDOW, Family
from tests.models.table import ENCODERS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from graphrt import graphed  # noqa: E402
from graphrt.errors import (  # noqa: E402
    CaptureError,
    CaptureSyncError,
    InvalidOptionError,
    ResourceExhaustedError,
    VerificationError,
)
from graphrt.hosts.transformers import (  # noqa: E402
    encoders,
    graphs_of,
    masks_on_device,
    with_graphs,
    without_graphs,
)
from graphrt.hosts.transformers.buckets import masks_of  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
_PICTURES = {"image_size": 32, "patch_size": 8}
_SLIDES = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES = {
    **ENCODERS,
    "roberta": Family("RobertaConfig", "RobertaModel", {"pad_token_id": 1}),
    "classifier": Family("BertConfig", "BertForSequenceClassification", {"pad_token_id": 0}),
    "clip text": Family("CLIPTextConfig", "CLIPTextModel", {"pad_token_id": 0, "eos_token_id": 2}),
    "dinov2": Family("Dinov2Config", "Dinov2Model", _PICTURES),
    # Embedders over a decoder, which make causal masks, of a window in some layers.
    "qwen3": Family("Qwen3Config", "Qwen3Model", {"head_dim": 16, "use_cache": False}),
    "gemma3": Family("Gemma3TextConfig", "Gemma3TextModel", {**_SLIDES, "use_cache": False}),
    # The window is of all layers: the config names no kinds.
    "mistral": Family("MistralConfig", "MistralModel", {"sliding_window": 15, "use_cache": False}),
    "esm": Family("EsmConfig", "EsmModel", {"pad_token_id": 1, "mask_token_id": 2}),
}
SERVED = ("bert", "vit", "clip", "roberta", "classifier", "dinov2", "modernbert", "clip text")
SERVED += ("qwen3", "gemma3", "mistral")
KEPT = ("bert", "vit", "modernbert", "clip text", "gemma3")
"""For each way to read a text or a picture: whole, in windows, causal, and causal in windows."""
ON_A_GPU = ("esm",)
"""They read their masks on the host, unless a CUDA stream captures."""


def new_model(name: str, device: str = "cpu") -> Any:
    return model_of(FAMILIES[name], device)


def model_of(family: Family, device: str = "cpu") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, family.config)(**{**SHARED, **family.extra})
        return getattr(transformers, family.model)(config).eval().to(device)


def tokens_of(rows: int, length: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * length)
    return torch.randint(3, VOCAB, (rows, length), generator=generator).to(device)


@torch.no_grad()
def calls(model: Any, device: str) -> list[Any]:
    """Calls of several batches and lengths, with padding and without."""
    outputs = []
    for rows, length in ((1, 5), (3, 16), (4, 29), (3, 32)):
        if model.main_input_name == "pixel_values":
            generator = torch.Generator().manual_seed(rows)
            outputs.append(model(torch.randn(rows, 3, 32, 32, generator=generator).to(device)))
            continue
        tokens = tokens_of(rows, length, device)
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        outputs += [model(tokens), model(input_ids=tokens, attention_mask=mask)]
    return outputs


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *on_devices(SERVED, *KEPT),
        *(pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in ON_A_GPU),
    ],
)
def test_encoder_calls_give_eager_outputs_and_are_all_replayed(name, device):
    model = new_model(name, device)
    expected = calls(model, device)
    # Of BERT as by default, of the others one number of rows: each has a graph for every length.
    sizes = None if name == "bert" else [4]
    with_graphs(model, max_batch=4, sizes=sizes, max_len=32, strict=True)
    outputs = calls(model, device)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert type(ours) is type(theirs) and list(ours) == list(theirs)
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=5e-3)
    report = graphs_of(model).report()
    assert (report.served, report.eager) == (len(expected), {})
    without_graphs(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("name", ON_A_GPU)
def test_an_encoder_that_reads_its_mask_on_the_host_runs_eagerly(name, caplog):
    model = new_model(name)
    expected = calls(model, "cpu")
    with caplog.at_level(logging.WARNING, "graphrt"):
        with_graphs(model, max_batch=4, sizes=[4], max_len=32)
    outputs = calls(model, "cpu")
    assert all(
        torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
        for ours, theirs in zip(outputs, expected, strict=True)
    )
    assert "CaptureSyncError" in graphs_of(model).report().refused
    # Once for the model, and once for its calls.
    assert [each.name for each in caplog.records].count("graphrt") == 2


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (VerificationError("another mask"), 3),
        (CaptureError("the mask is read on the host"), 3),
        (TypeError("a mask of two dimensions"), 3),
        (ResourceExhaustedError("no room"), 1),
        (torch.cuda.OutOfMemoryError("no memory"), 1),
        (InvalidOptionError("lengths"), 1),
        (AssertionError("a defect of ours"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_capture_is_retried_with_another_mask_only_after_mask_errors(
    error, tried, monkeypatch, caplog
):
    masks = []

    def buckets(*args: Any, mask: Any, **kwargs: Any) -> None:
        masks.append(mask)
        raise error

    monkeypatch.setattr(encoders, "Buckets", buckets)
    with caplog.at_level(logging.INFO, "graphrt"), pytest.raises(type(error)):
        with_graphs(new_model("bert"), max_batch=1, max_len=16, strict=True)
    assert len(masks) == tried
    assert sum("another mask: " in each.message for each in caplog.records) == tried - 1


def test_a_capture_with_use_cache_on_is_refused_with_advice_to_disable_the_cache():
    model = new_model("qwen3")
    model.config.use_cache = True
    with pytest.raises(CaptureError, match="use_cache = False"):
        with_graphs(model, max_batch=1, max_len=16, strict=True)


def test_switching_use_cache_on_after_capture_makes_calls_eager():
    model = with_graphs(new_model("qwen3"), max_batch=1, max_len=16, strict=True)
    model.config.use_cache = True
    with torch.no_grad():
        assert model(tokens_of(1, 8))[1] is not None
    assert graphs_of(model).report().served == 0


@pytest.mark.parametrize(
    "more",
    [{"use_bidirectional_attention": True}, {"layer_types": ["chunked_attention"] * 2}],
    ids=["both ways", "chunks"],
)
def test_configs_with_masks_a_comparison_may_miss_use_the_models_own_mask(more):
    config = new_model("gemma3").config
    assert masks_of(config)[-1] is None and len(masks_of(config)) == 3
    for name, value in more.items():
        setattr(config, name, value)
    assert masks_of(config) == (None,)


@pytest.fixture(scope="module")
def model():
    return with_graphs(new_model("bert"), max_batch=2, max_len=32, strict=True)


@pytest.fixture(scope="module")
def plain():
    return new_model("bert")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"input_ids": tokens_of(3, 8)}, "3 rows are above max_batch=2"),
        ({"input_ids": tokens_of(1, 40)}, "the text is longer than 32 tokens"),
        (
            {"input_ids": tokens_of(1, 8), "output_hidden_states": True},
            "output_hidden_states= was passed",
        ),
        ({"inputs_embeds": torch.ones(1, 8, 64)}, "no input of the usual dimensions"),
        (
            {"input_ids": tokens_of(1, 8), "position_ids": torch.arange(8, 16)[None]},
            "position_ids= was passed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_that_graphs_cannot_serve_run_eagerly_with_a_reason(model, plain, call, reason):
    before = graphs_of(model).report()
    with torch.no_grad():
        assert torch.equal(model(**call)[0], plain(**call)[0])
    report = graphs_of(model).report()
    assert report.served == before.served
    assert report.eager[reason] == before.eager.get(reason, 0) + 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "token_type_ids"])
def test_text_inputs_of_another_dtype_run_eagerly(model, plain, name, dtype):
    call = {"input_ids": tokens_of(2, 9)}
    call |= {"attention_mask": torch.ones_like(call["input_ids"])}
    call |= {"token_type_ids": torch.zeros_like(call["input_ids"])}
    call["attention_mask"][0, 6:] = 0
    call[name] = call[name].to(dtype)
    before = graphs_of(model).report()
    outputs = []
    with torch.no_grad():
        for each in (plain, model):
            try:
                outputs.append(each(**call).last_hidden_state)
            except Exception as error:
                outputs.append((type(error), str(error)))
    if isinstance(outputs[0], torch.Tensor):
        assert torch.equal(*outputs)
    else:
        assert outputs[0] == outputs[1]
    report = graphs_of(model).report()
    assert report.served == before.served
    reason = f"{name}= of {dtype} was passed"
    assert report.eager[reason] == before.eager.get(reason, 0) + 1


def test_pictures_of_another_size_or_dtype_run_eagerly():
    plain = new_model("dinov2")
    model = with_graphs(new_model("dinov2"), max_batch=2, max_len=32, strict=True)
    with torch.no_grad():
        for picture in (torch.randn(1, 3, 48, 32), torch.randn(1, 3, 32, 32).double()):
            assert torch.equal(model(picture)[0], plain(picture)[0])
        with pytest.raises(ValueError, match="channel"):
            model(torch.randn(1, 1, 32, 32))
    assert graphs_of(model).report().eager == {
        "pixel_values= of the shape (3, 48, 32) was passed": 1,
        "pixel_values= of torch.float64 was passed": 1,
        "pixel_values= of the shape (1, 32, 32) was passed": 1,
    }


def test_an_encoder_with_a_submodule_hook_is_not_captured():
    outputs = []
    for with_ours in (False, True):
        model, state = new_model("bert"), {"factor": 1.0}
        model.encoder.layer[0].output.register_forward_hook(
            lambda module, args, output, state=state: output * state["factor"]
        )
        if with_ours:
            with_graphs(model, max_batch=1, max_len=16)
        state["factor"] = -4.0
        with torch.no_grad():
            outputs.append(model(tokens_of(1, 8)).last_hidden_state)
    assert torch.equal(*outputs)
    assert "hook" in graphs_of(model).report().refused


def test_a_changed_config_or_a_global_hook_makes_calls_eager():
    model = with_graphs(new_model("bert"), max_batch=1, max_len=16, strict=True)
    register = torch.nn.modules.module.register_module_forward_pre_hook
    with torch.no_grad():
        hook = register(lambda module, args: None)
        model(tokens_of(1, 8))
        hook.remove()
        model.config.layer_norm_eps *= 2
        model(tokens_of(1, 8))
    reasons = ("global pre-hooks (keys)", "model.config.layer_norm_eps")
    assert graphs_of(model).report().eager == {
        f"the model is not as it was captured ({each}): recapture()": 1 for each in reasons
    }


def test_a_call_with_gradients_enabled_runs_eagerly(model):
    assert model(tokens_of(1, 8)).last_hidden_state.requires_grad
    assert graphs_of(model).report().eager["gradients are on"] > 0


def test_encoder_outputs_keep_their_values_after_the_next_call(model, plain):
    with torch.no_grad():
        first = model(tokens_of(2, 9)).last_hidden_state
        model(tokens_of(2, 30))
        expected = plain(tokens_of(2, 9)).last_hidden_state
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)


def test_threads_that_call_at_once_get_their_own_outputs(model, plain):
    inputs = [tokens_of(1 + at % 2, 5 + at) for at in range(4)]
    with torch.no_grad():
        expected = [plain(each).last_hidden_state for each in inputs]
    wrong = []

    def run(at: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                got = model(inputs[at]).last_hidden_state
                if not torch.allclose(got, expected[at], rtol=1e-3, atol=1e-4):
                    wrong.append(at)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_hook_added_after_capture_is_found_within_some_calls():
    model = with_graphs(new_model("bert"), max_batch=1, max_len=16, strict=True)
    tokens = tokens_of(1, 8)
    hook = model.encoder.layer[1].register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        for _ in range(len([*model.modules()]) // 16 + 1):
            model(tokens)
        assert any("recapture" in reason for reason in graphs_of(model).report().eager)
        hook.remove()
        if any("QUARANTINED" in reason for reason in graphs_of(model).report().eager):
            # CPython has told of the hook before a look came by.
            graphs_of(model).recapture()
        served = graphs_of(model).report().served
        model(tokens)
    assert graphs_of(model).report().served == served + 1


def test_the_compile_option_is_refused_for_an_encoder():
    model = new_model("bert")
    with pytest.raises(InvalidOptionError, match="for models that generate"):
        with_graphs(model, max_batch=1, max_len=16, compile=True)


# A graph of the forward itself ------------------------------------------------------------------

_NARROW = {"projection_dim": 16, "image_size": 32, "patch_size": 8}
_SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_TOWERS = {
    "text_config": {**SHARED, "eos_token_id": 2, **_NARROW},
    "vision_config": {**SHARED, **_PICTURES},
}
# Family -> the names of its inputs.
MASKED: dict[str, tuple[Family, tuple[str, ...]]] = {
    "bert": (FAMILIES["bert"], ("token_type_ids", "position_ids")),
    "roberta": (FAMILIES["roberta"], ("token_type_ids",)),
    "classifier": (FAMILIES["classifier"], ("token_type_ids",)),
    "distilbert": (Family("DistilBertConfig", "DistilBertModel", {"dim": 64, "n_heads": 4}), ()),
    "electra": (Family("ElectraConfig", "ElectraModel", {}), ("token_type_ids",)),
    "albert": (Family("AlbertConfig", "AlbertModel", {}), ("token_type_ids",)),
    "modernbert": (FAMILIES["modernbert"], ()),
    "t5": (Family("T5Config", "T5EncoderModel", {"d_model": 64, "d_kv": 16, "d_ff": 64}), ()),
    "esm": (FAMILIES["esm"], ()),
    "clip text": (FAMILIES["clip text"], ("position_ids",)),
    "clip": (
        Family("CLIPConfig", "CLIPModel", {**_TOWERS, "projection_dim": 16}),
        ("pixel_values",),
    ),
    "sound": (Family("Wav2Vec2Config", "Wav2Vec2Model", _SOUND), ("input_values",)),
}


def masked_inputs(rows: int, others: tuple[str, ...], seed: int) -> dict[str, torch.Tensor]:
    """Usual inputs of a text of 9 tokens, or of a sound, with hidden places at the end."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, end, shape, generator=generator)

    length = 400 if "input_values" in others else 9
    made = {
        "input_ids": draw(3, VOCAB, rows, length),
        "token_type_ids": draw(0, 2, rows, length),
        "position_ids": torch.arange(length).repeat(rows, 1),
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "input_values": torch.randn(rows, length, generator=generator),
    }
    mask = (torch.arange(length) < draw(length // 2, length + 1, rows, 1)).long()
    names = others if "input_values" in others else ("input_ids", *others)
    return {"attention_mask": mask, **{name: made[name] for name in names}}


@pytest.mark.parametrize("name", rest_long(MASKED, "bert", "modernbert", "clip", "sound"))
@torch.no_grad()
def test_an_encoder_is_served_by_graphed_once_its_masks_stay_on_the_device(name: str) -> None:
    """As the error advises. A batch of a graph's own size has the bits of the model before."""
    family, others = MASKED[name]
    model, plain = model_of(family), model_of(family)
    given = masked_inputs(4, others, 0)
    with pytest.raises(CaptureSyncError, match=r"graphed\(masks_on_device\(model\)"):
        graphed(model, given)
    fast = graphed(masks_on_device(model), given)
    for seed, rows in enumerate((1, 2, 3, 4, 4)):
        inputs = masked_inputs(rows, others, seed)
        ours, theirs = fast(**inputs), plain(**inputs)
        assert fast.runner.last_dispatch.reason.name == "HIT"
        for key in theirs:
            if isinstance(theirs[key], torch.Tensor):
                apart = 1e-4 if rows == 3 else 0.0
                torch.testing.assert_close(ours[key], theirs[key], rtol=apart, atol=apart)


@torch.no_grad()
def test_another_attention_than_sdpa_is_refused_with_advice_that_works() -> None:
    family = Family("MPNetConfig", "MPNetModel", {"pad_token_id": 1})
    model, plain = model_of(family), model_of(family)
    given = masked_inputs(4, (), 0)
    with pytest.raises(CaptureSyncError, match=r"with_graphs\(model, max_batch=4, max_len=16\)"):
        graphed(model, given)
    with pytest.raises(InvalidOptionError, match=r"(?s)got: eager.*with_graphs\(model") as raised:
        masks_on_device(model)
    assert "max_batch=4, max_len=64" in str(raised.value)
    with_graphs(model, max_batch=4, max_len=16, strict=True)
    ours, theirs = model(**given), plain(**given)
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=1e-3, atol=5e-3)
    assert graphs_of(model).report().served == 1


@pytest.mark.parametrize(("family", "most"), [("bert", 32), ("roberta", 30)])
def test_texts_above_the_models_positions_are_named(family: str, most: int) -> None:
    """RoBERTa's positions begin behind the index of padding."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        **sizes,
    )
    model = transformers.AutoModel.from_config(config).eval()
    with pytest.raises(InvalidOptionError, match=f"(?s)positions.*max_len={most}"):
        with_graphs(model, max_batch=1, max_len=most + 1, strict=True)
    with_graphs(model, max_batch=1, max_len=most, strict=True)


def test_masks_on_device_names_itself() -> None:
    """Where it is given another model."""
    with pytest.raises(InvalidOptionError, match=r"masks_on_device\(\) takes a model"):
        masks_on_device(torch.nn.Linear(2, 2))
