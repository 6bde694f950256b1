"""Pipelines of diffusers whose denoisers replay graphs: every image equals the eager one."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REASON = "diffusers is not installed (pip install graphrt[diffusers])"
diffusers = pytest.importorskip("diffusers", reason=REASON)

import numpy  # noqa: E402
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor  # noqa: E402

from graphrt import Reason  # noqa: E402
from graphrt.core.replay.recording import is_inside_capture  # noqa: E402
from graphrt.errors import InvalidOptionError, UnsupportedHostError  # noqa: E402
from graphrt.hosts.diffusers import (  # noqa: E402
    EagerDenoiserWarning,
    EagerReason,
    capture,
    report,
    with_graphs,
    without_graphs,
)
from graphrt.trust.places.walk import places_of  # noqa: E402
from tests.draws import rest_long  # noqa: E402
from tests.hosts.of_diffusers.pipelines import (  # noqa: E402
    FAMILIES,
    PROMPT,
    Family,
    built,
    dit,
    embedding,
    flux_transformer,
    stable_diffusion,
    unet,
    wan,
)
from tests.hosts.of_diffusers.pipelines import UNET as UNET_CONFIG  # noqa: E402

UNET, DIT, FLUX = FAMILIES["UNet"], FAMILIES["DiT"], FAMILIES["Flux"]
DENOISERS = ("unet", "transformer", "transformer_2")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_warning_of_ours() -> Iterator[None]:
    """Every eager call has to be expected by its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerDenoiserWarning)
        yield


def denoisers(pipe: Any) -> list[torch.nn.Module]:
    return [getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) is not None]


def hits(pipe: Any) -> int:
    return sum(each.hits for each in report(pipe).values())


def ran_eagerly(pipe: Any) -> dict[Any, int]:
    return {reason: n for each in report(pipe).values() for reason, n in each.eager.items()}


def captures(pipe: Any) -> int:
    return sum(each.captures for each in report(pipe).values())


def call_counter(pipe: Any) -> list[int]:
    """A list that gets one item more at each call of a denoiser."""
    calls: list[int] = []
    for module in denoisers(pipe):
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def calls(n: int, call: Callable[[], Any]) -> list[Any]:
    return [call() for _ in range(n)]


def denoise_with_gradients(model: Any, *, length: int = 16, step: int = 500, **more: Any) -> Any:
    """One call of Flux's transformer."""
    arguments: dict[str, Any] = {
        "hidden_states": embedding(1, length, 16),
        "timestep": torch.tensor([step / 1000]),
        "guidance": torch.tensor([3.5]),
        "pooled_projections": embedding(1, 8),
        "encoder_hidden_states": embedding(1, 7, 8),
        "txt_ids": torch.zeros(7, 3),
        "img_ids": torch.arange(3.0 * length).reshape(length, 3),
        **more,
    }
    return model(**arguments)


def denoise(model: Any, **more: Any) -> Any:
    with torch.no_grad():
        return denoise_with_gradients(model, **more)


def unet_call(model: Any, **more: Any) -> Any:
    with torch.no_grad():
        return model(embedding(2, 4, 8, 8), torch.tensor(500), embedding(2, 7, 8), **more)


class Pipe:
    """As much of a pipeline as graphs need."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.transformer = model


# Images -------------------------------------------------------------------------------------------


# A doubled batch, a call for each half of the guidance, two denoisers.
@pytest.mark.parametrize("name", rest_long(FAMILIES, "UNet", "Flux", "Wan"))
def test_images_with_graphs_equal_those_of_the_eager_pipeline(name: str):
    family = FAMILIES[name]
    pipe = family.make()
    count = call_counter(pipe)
    kinds = [(size, guided) for size in range(len(family.sizes) or 1) for guided in (False, True)]
    eager = {kind: family.images(pipe, *kind) for kind in kinds}
    assert len({image.double().sum().item() for image in eager.values()}) == len(kinds)
    assert with_graphs(pipe) is pipe
    count.clear()
    # Two resolutions and guidance on and off take turns; each comes twice.
    for kind in kinds * 2:
        assert torch.equal(family.images(pipe, *kind), eager[kind]), kind
    assert hits(pipe) == len(count) > 0 and not ran_eagerly(pipe)
    before = captures(pipe)
    family.images(pipe)
    assert captures(pipe) == before
    without_graphs(pipe)
    assert not any("forward" in vars(module) for module in denoisers(pipe)) and not report(pipe)
    assert torch.equal(family.images(pipe), eager[0, True])


SCHEDULERS = [
    diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
    diffusers.UniPCMultistepScheduler(),
    diffusers.DPMSolverMultistepScheduler(),
    diffusers.HeunDiscreteScheduler(),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: type(each).__name__)
def test_a_scheduler_that_keeps_denoiser_outputs_gives_the_eager_image(scheduler: Any):
    """Without guidance they get the denoiser's own tensor."""
    pipe = dit()
    pipe.scheduler = scheduler
    eager = DIT.images(pipe, guided=False, num_inference_steps=6)
    with_graphs(pipe)
    assert torch.equal(DIT.images(pipe, guided=False, num_inference_steps=6), eager)
    assert not ran_eagerly(pipe)


def test_a_denoiser_output_keeps_its_values_after_later_calls():
    model = flux_transformer()
    pipe = with_graphs(Pipe(model))
    first = denoise(model).sample
    before = first.clone()
    for step in (400, 300):
        assert not torch.equal(denoise(model, step=step).sample, before)
    assert torch.equal(first, before) and hits(pipe) == 3


def test_a_batch_above_max_batch_runs_eagerly_with_a_warning():
    pipe = dit()
    labels = {n: list(range(n)) for n in (1, 2, 3)}

    def images(n: int) -> torch.Tensor:
        return DIT.images(pipe, guided=False, class_labels=labels[n])

    eager = {n: images(n) for n in labels}
    with_graphs(pipe, max_batch=2)
    for n in (1, 2, 1, 2):
        assert torch.equal(images(n), eager[n])
    assert captures(pipe) == 2 and not ran_eagerly(pipe)
    with pytest.warns(EagerDenoiserWarning, match="larger than max_batch .3, where max_batch is 2"):
        assert torch.equal(images(3), eager[3])
    assert ran_eagerly(pipe) == {EagerReason.TOO_LARGE: 4}


def test_the_vae_decoder_is_served_by_graphs_if_asked():
    pipe = stable_diffusion()
    eager = UNET.images(pipe)
    with_graphs(pipe, vae_decoder=True)
    assert torch.equal(UNET.images(pipe), eager) and torch.equal(UNET.images(pipe), eager)
    assert report(pipe)["vae.decoder"].hits == 2
    without_graphs(pipe)
    assert "forward" not in vars(pipe.vae.decoder)
    with pytest.raises(UnsupportedHostError, match="NoneType"):
        with_graphs(wan(), vae_decoder=True)


def test_a_pipeline_call_ended_by_an_error_leaves_the_next_image_right():
    pipe = FLUX.make()
    eager = FLUX.images(pipe)

    def fail(_pipe: Any, step: int, _timestep: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            raise KeyboardInterrupt
        return arguments

    with_graphs(pipe)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            FLUX.images(pipe, callback_on_step_end=fail)
        assert torch.equal(FLUX.images(pipe), eager)
    wrong = embedding(1, 7, 9)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        FLUX.images(pipe, prompt_embeds=wrong, negative_prompt_embeds=wrong)
    assert torch.equal(FLUX.images(pipe), eager) and not ran_eagerly(pipe)


def test_an_interrupted_capture_keeps_no_graph_and_the_next_call_captures(
    monkeypatch: pytest.MonkeyPatch,
):
    pipe = FLUX.make()
    eager = FLUX.images(pipe)
    with_graphs(pipe)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe.transformer.transformer_blocks[0]), "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            FLUX.images(pipe)
    assert captures(pipe) == 0
    assert torch.equal(FLUX.images(pipe), eager)
    assert captures(pipe) == 1 and not ran_eagerly(pipe)


def test_capturing_ahead_changes_neither_images_nor_the_random_state():
    pipe = wan()
    family = FAMILIES["Wan"]
    eager = family.images(pipe)
    with_graphs(pipe)
    torch.manual_seed(4)
    expected = torch.get_rng_state()
    capture(pipe, height=32, width=32, num_frames=5, **PROMPT)
    assert torch.equal(torch.get_rng_state(), expected)
    # Both of its denoisers, by two steps.
    assert [each.captures for each in report(pipe).values()] == [1, 1]
    assert torch.equal(family.images(pipe), eager) and captures(pipe) == 2


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_replayed_denoiser_returns_the_eager_result_type(return_dict: bool):
    model = flux_transformer()
    eager = denoise(model, return_dict=return_dict)
    with_graphs(Pipe(model))
    for _ in range(3):
        result = denoise(model, return_dict=return_dict)
        assert type(result) is type(eager) and torch.equal(result[0], eager[0])
        assert not return_dict or result.sample is result["sample"]


def test_tensors_in_nested_arguments_are_read_at_each_call():
    """As SDXL has them."""
    model = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
    )

    def added(seed: int) -> dict[str, torch.Tensor]:
        return {"text_embeds": embedding(2, 8, seed=seed), "time_ids": embedding(2, 6, seed=seed)}

    eager = [unet_call(model, added_cond_kwargs=added(seed)).sample for seed in (1, 2)]
    assert not torch.equal(*eager)
    pipe = with_graphs(Pipe(model))
    for seed in (1, 2, 1):
        result = unet_call(model, added_cond_kwargs=added(seed)).sample
        assert torch.equal(result, eager[seed - 1])
    assert captures(pipe) == 1 and hits(pipe) == 3
    assert "added_cond_kwargs/text_embeds (2, 8)" in report(pipe)["transformer"].signatures[0]


def test_controlnet_residuals_are_graph_inputs_and_need_no_recapture():
    with_middle = UNET_CONFIG | {"mid_block_type": "UNetMidBlock2D"}
    known = inspect.signature(diffusers.ControlNetModel).parameters
    control = built(
        diffusers.ControlNetModel,
        **{name: value for name, value in with_middle.items() if name in known},
        conditioning_embedding_out_channels=(4, 8),
    )
    parts = stable_diffusion().components | {"unet": unet(**with_middle)}
    parts.pop("image_encoder")
    pipe = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=control)
    pipe.set_progress_bar_config(disable=True)
    images = [embedding(1, 3, 32, 32, seed=seed).sigmoid() for seed in (1, 2)]
    eager = [UNET.images(pipe, image=image) for image in images]
    assert not torch.equal(*eager)
    with_graphs(pipe)
    for image, expected in zip(images * 2, eager * 2, strict=True):
        assert torch.equal(UNET.images(pipe, image=image), expected)
    assert captures(pipe) == 1 and not ran_eagerly(pipe)


def with_ip_adapter(model: Any) -> Any:
    """As `load_ip_adapter` leaves a UNet, with random weights."""
    from diffusers.models import attention_processor, embeddings

    torch.manual_seed(3)
    processors = {
        name: attention_processor.IPAdapterAttnProcessor2_0(4, 8, num_tokens=(2,), scale=[1.0])
        if "attn2" in name
        else processor
        for name, processor in model.attn_processors.items()
    }
    model.set_attn_processor(processors)
    images = embeddings.ImageProjection(8, 8, num_image_text_embeds=2)
    model.encoder_hid_proj = embeddings.MultiIPAdapterImageProjection([images])
    model.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return model.eval()


def test_a_changed_ip_adapter_scale_recaptures_and_new_adapter_images_do_not():
    model, twin = with_ip_adapter(unet()), with_ip_adapter(unet())
    pipe = with_graphs(Pipe(model))
    eager = []
    for scale, seed in ((1.0, 1), (1.0, 2), (0.3, 1)):
        for each in (model, twin):
            for processor in each.attn_processors.values():
                if hasattr(processor, "scale"):
                    processor.scale[0] = scale
        added = {"image_embeds": [embedding(2, 1, 8, seed=seed)]}
        eager.append(unet_call(twin, added_cond_kwargs=added).sample)
        assert torch.equal(unet_call(model, added_cond_kwargs=added).sample, eager[-1])
    assert len({each.double().sum().item() for each in eager}) == 3
    assert captures(pipe) == 2 and not ran_eagerly(pipe)


def test_a_forward_that_pops_its_list_argument_gets_a_full_list_each_run():
    """UNet pops the residuals of a T2I adapter."""
    model = unet()
    adapter = [embedding(2, 4, 8, 8), embedding(2, 8, 4, 4)]
    eager = unet_call(model, down_intrablock_additional_residuals=list(adapter)).sample
    pipe = with_graphs(Pipe(model))
    for _ in range(3):
        given = list(adapter)
        result = unet_call(model, down_intrablock_additional_residuals=given).sample
        assert torch.equal(result, eager)
    assert hits(pipe) == 3
    assert not torch.equal(eager, unet_call(model).sample)


class Small(torch.nn.Module):
    """A denoiser that is captured fast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        scale = kwargs["scale"]
        return self.inner(hidden_states) * (3 if scale is True else scale)


def small_call(model: Any, length: int = 4, scale: Any = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return model(embedding(1, length, 16), {"scale": scale})


def test_each_plain_value_of_an_argument_has_its_own_graph():
    """The weight of a LoRA, say: 1, 1.0 and True are three values."""
    model, twin = Small(), Small()
    pipe = with_graphs(Pipe(model))
    values = (1, 1.0, True, 0.0, -0.0, float("nan"), 0.5)
    for value in values * 2:
        result, eager = small_call(model, scale=value), small_call(twin, scale=value)
        assert torch.equal(result.view(torch.int32), eager.view(torch.int32))
    assert captures(pipe) == len(values) and hits(pipe) == 2 * len(values)


def test_an_unknown_object_argument_runs_eagerly_and_is_named_by_the_warning():
    model = flux_transformer()
    pipe = with_graphs(Pipe(model))
    with pytest.warns(
        EagerDenoiserWarning, match="joint_attention_kwargs/mine is a builtins.object"
    ):
        denoise(model, joint_attention_kwargs={"mine": object()})
    assert ran_eagerly(pipe) == {EagerReason.ARGUMENT: 1}


def test_with_graphs_keeps_the_signature_of_the_denoisers_forward():
    """Pipelines ask whether a denoiser takes guidance or masks."""
    model = flux_transformer()
    before = inspect.signature(model.forward)
    with_graphs(Pipe(model))
    assert inspect.signature(model.forward) == before


# What is not served -------------------------------------------------------------------------------


def test_a_denoiser_call_with_gradients_enabled_runs_eagerly():
    model = flux_transformer()
    pipe = with_graphs(Pipe(model))
    with pytest.warns(EagerDenoiserWarning, match="gradients are on"):
        denoise_with_gradients(model).sample.sum().backward()
    assert model.x_embedder.weight.grad is not None
    assert ran_eagerly(pipe) == {EagerReason.GRADIENTS: 1}


def test_a_submodule_hook_makes_calls_eager_until_its_removal():
    model = Small()
    pipe = with_graphs(Pipe(model))
    small_call(model)
    seen: list[int] = []
    hook = model.inner.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(EagerDenoiserWarning, match="submodule inner has a forward hook") as caught:
        calls(3, lambda: small_call(model))
    assert len(caught) == 1
    assert len(seen) == 3 and ran_eagerly(pipe) == {EagerReason.HOOKS: 3}
    hook.remove()
    small_call(model)
    assert captures(pipe) == 2 and hits(pipe) == 2


@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_a_global_module_hook_makes_calls_eager_until_its_removal(kind: str):
    model = Small()
    pipe = with_graphs(Pipe(model))
    small_call(model)
    seen: list[torch.nn.Module] = []
    register = getattr(torch.nn.modules.module, f"register_module_forward_{kind}")
    hook = register(lambda module, *_: seen.append(module))
    try:
        with pytest.warns(EagerDenoiserWarning, match="torch has global"):
            small_call(model)
    finally:
        hook.remove()
    assert model.inner in seen and ran_eagerly(pipe) == {EagerReason.HOOKS: 1}
    small_call(model)
    assert captures(pipe) == 1 and hits(pipe) == 2


def test_a_diffusers_cache_hook_makes_calls_eager_with_a_warning():
    pipe = FAMILIES["Flux"].make()
    config = diffusers.FirstBlockCacheConfig(threshold=10.0)
    pipe.transformer.enable_cache(config)
    eager = FAMILIES["Flux"].images(pipe, guided=False)
    pipe.transformer.disable_cache()
    with_graphs(pipe)
    pipe.transformer.enable_cache(config)
    with pytest.warns(EagerDenoiserWarning, match="has the hooks? "):
        assert torch.equal(FAMILIES["Flux"].images(pipe, guided=False), eager)
    pipe.transformer.disable_cache()
    FAMILIES["Flux"].images(pipe, guided=False)
    assert hits(pipe) == 4


@pytest.mark.parametrize("order", ["graphs first", "hooks first"])
def test_an_accelerate_offloading_hook_makes_calls_eager_until_its_removal(order: str):
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = flux_transformer()
    eager = denoise(model).sample
    pipe = Pipe(model)
    if order == "graphs first":
        with_graphs(pipe)
    hooks.add_hook_to_module(model, hooks.ModelHook())
    if order == "hooks first":
        with_graphs(pipe)
    with pytest.warns(EagerDenoiserWarning, match="the denoiser has a hook of accelerate"):
        assert torch.equal(denoise(model).sample, eager)
    if order == "graphs first":
        hooks.remove_hook_from_module(model)
        assert torch.equal(denoise(model).sample, eager) and hits(pipe) == 1
    without_graphs(pipe)
    assert torch.equal(denoise(model).sample, eager)


def test_without_graphs_works_after_accelerate_wrapped_the_forward():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = flux_transformer()
    eager = denoise(model).sample
    pipe = with_graphs(Pipe(model))
    denoise(model)
    hooks.add_hook_to_module(model, hooks.ModelHook())
    without_graphs(pipe)
    assert torch.equal(denoise(model).sample, eager)


def test_a_denoiser_that_cannot_be_captured_warns_once_and_runs_eagerly():
    class Asks(Small):
        def forward(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
            return self.inner(hidden_states) * hidden_states.sum().item()

    model, twin = Asks(), Asks()
    pipe = with_graphs(Pipe(model))
    with pytest.warns(EagerDenoiserWarning, match="its capture failed") as caught:
        results = calls(3, lambda: small_call(model))
    assert all(torch.equal(result, small_call(twin)) for result in results)
    assert len(caught) == 1 and ran_eagerly(pipe) == {EagerReason.FAILED: 3}
    said = str(caught[0].message)
    assert "leave with_graphs() out" in said and "eager_break" not in said


def test_a_forward_that_raises_only_during_capture_runs_eagerly():
    class Breaks(Small):
        def forward(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
            if is_inside_capture():
                raise TypeError("not while a graph is made")
            return self.inner(hidden_states)

    model, twin = Breaks(), Breaks()
    pipe = with_graphs(Pipe(model))
    with pytest.warns(EagerDenoiserWarning, match="TypeError: not while a graph is made"):
        assert torch.equal(small_call(model), small_call(twin))
    assert ran_eagerly(pipe) == {EagerReason.FAILED: 1}


def test_signatures_above_max_signatures_are_dropped_and_ever_new_signatures_run_eagerly():
    model, twin = Small(), Small()
    pipe = with_graphs(Pipe(model), max_signatures=2)
    for length in (2, 3, 2, 4):
        small_call(model, length)
    # 3 is the least recently used one.
    kept = report(pipe)["transformer"].signatures
    assert kept == ("hidden_states (1, 2, 16)", "hidden_states (1, 4, 16)")
    assert report(pipe)["transformer"].dropped == 1
    lengths = iter(range(5, 15))
    with pytest.warns(EagerDenoiserWarning, match="change too often") as caught:
        results = calls(10, lambda: small_call(model, next(lengths)))
    for length, result in zip(range(5, 15), results, strict=True):
        assert torch.equal(result, small_call(twin, length))
    # Eight captures came first, and each had a replay, which is an eighth of another one.
    assert len(caught) == 1 and ran_eagerly(pipe) == {EagerReason.CHANGING: 4}
    assert captures(pipe) == 9
    calls(8, lambda: small_call(model, 10))
    small_call(model, 32)
    assert captures(pipe) == 10


def test_a_call_from_a_second_thread_runs_eagerly_while_the_denoiser_is_busy():
    model = Small()
    pipe = with_graphs(Pipe(model))
    eager = small_call(model)
    inside, on = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []
    original = model.inner.forward

    def waiting(hidden_states: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is thread:
            inside.set()
            assert on.wait(30)
        return original(hidden_states)

    model.inner.forward = waiting
    thread = threading.Thread(target=lambda: results.append(small_call(model)))
    thread.start()
    assert inside.wait(30)
    with pytest.warns(EagerDenoiserWarning, match="another thread"):
        assert torch.equal(small_call(model), eager)
    on.set()
    thread.join()
    assert torch.equal(results[0], eager) and ran_eagerly(pipe)[EagerReason.BUSY] == 1


def test_a_denoiser_that_is_compiled_already_is_refused():
    in_place = Small()
    in_place.compile(backend="eager")
    for model in (in_place, torch.compile(Small(), backend="eager")):
        with pytest.raises(UnsupportedHostError, match="compiled as a whole"):
            with_graphs(Pipe(model))


def test_torch_compile_traces_the_denoisers_own_forward_without_graphs():
    model = Small()
    eager = small_call(model)
    pipe = with_graphs(Pipe(model))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(small_call(compiled), eager)
    assert hits(pipe) == 0 and not ran_eagerly(pipe)


# A denoiser that changes --------------------------------------------------------------------------


class Lora(torch.nn.Module):
    """What peft puts in the place of a linear layer."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Linear(base.in_features, 2, bias=False)
        self.b = torch.nn.Linear(2, base.out_features, bias=False)
        self.scaling = {"default": 1.0}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.base(hidden_states) + self.b(self.a(hidden_states)) * self.scaling["default"]


class Inverted:
    """An attention processor that is no module."""

    def __init__(self) -> None:
        self.inner = FluxAttnProcessor()
        self.sign = -1.0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = self.inner(*args, **kwargs)
        return image * self.sign, text


def attention(model: Any) -> Any:
    return model.transformer_blocks[0].attn


def load_lora(model: Any) -> None:
    torch.manual_seed(1)
    attention(model).to_q = Lora(attention(model).to_q)


def change_its_weight(model: Any) -> None:
    attention(model).to_q.scaling["default"] = 0.25


def set_processor(model: Any) -> None:
    attention(model).processor = Inverted()


def change_processor(model: Any) -> None:
    attention(model).processor.sign = 2.0


def replace_weight(model: Any) -> None:
    attention(model).to_k.weight = torch.nn.Parameter(torch.ones(32, 32))


def replace_data(model: Any) -> None:
    attention(model).to_v.weight.data = torch.ones(32, 32)


def transpose_where_it_is(model: Any) -> None:
    weight = attention(model).add_k_proj.weight
    weight.data = weight.data.t()


def change_attribute(model: Any) -> None:
    attention(model).norm_q.eps = 3.0


CHANGES = [
    load_lora,
    change_its_weight,
    set_processor,
    change_processor,
    replace_weight,
    replace_data,
    transpose_where_it_is,
    change_attribute,
]


def test_the_first_call_after_a_changed_attribute_gives_the_eager_result():
    model, twin = flux_transformer(), flux_transformer()
    pipe = with_graphs(Pipe(model))
    last = denoise(model).sample
    for n, change in enumerate(CHANGES):
        change(model)
        change(twin)
        eager = denoise(twin).sample
        assert not torch.equal(eager, last), change
        for _ in range(2):
            assert torch.equal(denoise(model).sample, eager), change
        assert captures(pipe) == n + 2
        last = eager
        # So that captures are worth it.
        for _ in range(8):
            denoise(model)
    assert not ran_eagerly(pipe)


class Gated(Small):
    """With tensors of one element, whose `==` has a truth: a buffer, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.ones(1))
        self.table = [torch.ones(1)]
        self.shift = torch.ones(1)

    def forward(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states, kwargs)
        return result * self.gate + self.shift * self.table[0]


@pytest.mark.parametrize("name", ["gate", "shift", "table"])
def test_replacing_a_tensor_by_an_equal_tensor_recaptures(name: str):
    model = Gated()
    pipe = with_graphs(Pipe(model))
    before = small_call(model)
    fresh = torch.ones(1)
    if name == "table":
        model.table[0] = fresh
    else:
        setattr(model, name, fresh)
    assert torch.equal(small_call(model), before)
    fresh.fill_(5.0)
    assert not torch.equal(small_call(model), before)
    assert captures(pipe) == 2 and not ran_eagerly(pipe)


class Controller:
    """What a processor asks: of prompt-to-prompt, say."""

    def __init__(self) -> None:
        self.weights = [{"now": 1.0}, (1.0, [1.0])]
        self.child = Slotted()
        self.tensors = {"gate": [torch.ones(1)]}
        self.net = [torch.nn.Linear(1, 1)]
        self.array = numpy.ones(1)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        numbers: Any = self.weights
        scale = numbers[0]["now"] * numbers[1][1][0] * self.child.scale * float(self.array[0])
        return value * scale * self.tensors["gate"][0] + self.net[0].bias.sum()


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Controlled:
    """A processor that leads to its controller through a list, a closure and a bound method."""

    def __init__(self) -> None:
        controller = Controller()
        self.held = [lambda value: controller(value)]
        self.controller = controller.__call__

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.held[0](value)
        return result


class WithProcessor(Small):
    """A denoiser with a processor that is no module."""

    def __init__(self, processor: Any = None) -> None:
        super().__init__()
        self.processor = processor or Controlled()
        self.config = {"plain": (1, 2), "numbers": [1, 2]}

    def forward(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = self.processor(super().forward(hidden_states, kwargs))
        return result

    @property
    def controller(self) -> Controller:
        held: Controller = self.processor.controller.__self__
        return held


def set_bias(controller: Controller) -> None:
    controller.net[0].bias = torch.nn.Parameter(torch.ones(1) * 7)


@pytest.mark.parametrize(
    "change",
    [
        lambda controller: controller.weights[0].update(now=0.2),
        lambda controller: controller.weights[1][1].__setitem__(0, 0.2),
        lambda controller: setattr(controller.child, "scale", 0.2),
        lambda controller: controller.tensors["gate"].__setitem__(0, torch.ones(1) * 3),
        lambda controller: setattr(controller.tensors["gate"][0], "data", torch.ones(1) * 3),
        set_bias,
        lambda controller: controller.array.fill(0.2),
    ],
    ids=["dict", "list in a tuple", "slot", "tensor", "moved tensor", "module", "array"],
)
def test_a_change_in_an_attention_processors_controller_recaptures(
    change: Callable[[Controller], Any],
):
    torch.manual_seed(0)
    model, twin = WithProcessor(), WithProcessor()
    twin.load_state_dict(model.state_dict())
    twin.controller.net[0].load_state_dict(model.controller.net[0].state_dict())
    pipe = with_graphs(Pipe(model))
    before = small_call(model)
    assert torch.equal(before, small_call(twin))
    for each in (model, twin):
        change(each.controller)
    eager = small_call(twin)
    assert not torch.equal(eager, before)
    for _ in range(2):
        assert torch.equal(small_call(model), eager)
    assert captures(pipe) == 2 and hits(pipe) == 3 and not ran_eagerly(pipe)


def test_a_changed_controller_in_the_closure_of_a_replaced_forward_takes_effect():
    """As prompt-to-prompt was published: `attention.forward` is replaced, on the instance."""

    def controlled(model: Small, controller: Controller) -> Small:
        before = model.inner.forward
        model.inner.forward = lambda value: controller(before(value))
        return model

    mine = Controller()
    theirs = copy.deepcopy(mine)
    model, twin = controlled(Small(), mine), controlled(Small(), theirs)
    with_graphs(Pipe(model))
    assert torch.equal(small_call(model), small_call(twin))
    mine.child.scale = theirs.child.scale = 0.2
    assert torch.equal(small_call(model), small_call(twin))


def test_replacing_a_list_by_an_equal_list_recaptures_only_when_the_list_changes():
    """As `set_ip_adapter_scale` does before each image."""
    model = WithProcessor()
    pipe = with_graphs(Pipe(model))
    before = small_call(model)
    numbers: Any = [{"now": 1.0}, (1.0, [1.0])]
    model.controller.weights = numbers
    assert torch.equal(small_call(model), before) and captures(pipe) == 1
    numbers[1][1][0] = 0.5
    assert not torch.equal(small_call(model), before) and captures(pipe) == 2


class Hidden(itertools.count):  # type: ignore[type-arg]
    """What it counts is in C."""

    __slots__ = ()


class Nothing:
    """An object that cannot change."""

    __slots__ = ()


class Holding:
    """A processor with an object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_a_processor_that_cannot_be_compared_runs_eagerly_with_a_warning():
    for held, named in ((Hidden(), r"is a .*Hidden"), ([*range(20_000)], "has more than 4096")):
        model = WithProcessor(Holding(held))
        pipe = with_graphs(Pipe(model))
        with pytest.warns(EagerDenoiserWarning, match=f"model.processor.held {named}"):
            small_call(model)
        small_call(model)
        assert ran_eagerly(pipe) == {EagerReason.UNSEEN: 2}
    for plain in (Nothing(), torch.Generator(), EagerReason.BUSY, range(3), len, Nothing, int):
        model = WithProcessor(Holding([plain]))
        pipe = with_graphs(Pipe(model))
        small_call(model)
        assert hits(pipe) == 1, plain


def test_a_processor_that_appends_to_a_list_is_captured_once_then_runs_eagerly():
    """Warm-ups and first steps run it too: its list gets what they add, and no more."""
    seen: list[torch.Tensor] = []

    def collect(value: torch.Tensor) -> torch.Tensor:
        seen.append(value.mean())
        return value

    model = WithProcessor(collect)
    pipe = with_graphs(Pipe(model))
    small_call(model)
    length = len(seen)
    with pytest.warns(EagerDenoiserWarning, match="the denoiser itself, change"):
        calls(3, lambda: small_call(model))
    assert len(seen) == length + 3
    assert captures(pipe) == 1 and ran_eagerly(pipe) == {EagerReason.CHANGING: 3}


def test_a_change_by_a_step_callback_takes_effect_at_the_next_step():
    def images(pipe: Any) -> torch.Tensor:
        def change(_pipe: Any, step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 1:
                attention(pipe.transformer).norm_q.eps = 3.0
            return tensors

        return FLUX.images(pipe, guided=False, callback_on_step_end=change)

    pipe, twin = FLUX.make(), FLUX.make()
    eager = images(twin)
    assert not torch.equal(eager, FLUX.images(pipe, guided=False))
    assert torch.equal(images(with_graphs(pipe)), eager)
    assert captures(pipe) == 2 and hits(pipe) == 4


def test_weights_that_are_written_in_place_need_no_capture():
    model, twin = flux_transformer(), flux_transformer()
    pipe = with_graphs(Pipe(model))
    denoise(model)
    with torch.no_grad():
        for each in (model, twin):
            each.x_embedder.weight.mul_(2)
    assert torch.equal(denoise(model).sample, denoise(twin).sample)
    assert captures(pipe) == 1 and not ran_eagerly(pipe)


def test_every_change_of_a_peft_lora_gives_the_results_of_eager_steps():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    model, twin = flux_transformer(), flux_transformer()
    pipe = with_graphs(Pipe(model))
    denoise(model)

    def both(change: Callable[[Any], Any], **call: Any) -> None:
        for each in (model, twin):
            torch.manual_seed(2)
            change(each)
        for _ in range(3):
            assert torch.equal(denoise(model, **call).sample, denoise(twin, **call).sample)

    both(lambda each: each.add_adapter(config, "one"))
    both(lambda each: each.set_adapters("one", 0.5))
    both(lambda each: each.disable_adapters())
    both(lambda each: each.enable_adapters())
    both(lambda each: each, joint_attention_kwargs={"scale": 0.5})
    both(lambda each: each, joint_attention_kwargs={"scale": 0.7})
    both(lambda each: each.delete_adapters("one"))
    assert not ran_eagerly(pipe)


def test_a_copied_or_unpickled_denoiser_has_no_graphs():
    model = flux_transformer()
    eager = denoise(model).sample
    pipe = with_graphs(Pipe(model))
    denoise(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(denoise(twin).sample, eager)
        assert hits(pipe) == 1
    with torch.no_grad():
        twin.x_embedder.weight.mul_(2)
    assert not torch.equal(denoise(twin).sample, eager)
    assert hits(pipe) == 1
    assert torch.equal(denoise(model).sample, eager)


def test_the_search_for_held_tensors_skips_the_wrapper_of_graphrt():
    """It holds copies of the module's dicts, and counters that move at every call."""
    model = Small()

    def found() -> tuple[list[str], list[str]]:
        places = places_of(model)
        return (
            [place.path for place, _ in places.tensors],
            [place.path for place in places.numbers],
        )

    before = found()
    with_graphs(Pipe(model))
    small_call(model)
    assert found() == before and before[0] == ["model.inner.weight", "model.inner.bias"]


def test_deleting_the_pipeline_frees_the_denoiser_and_its_graphs():
    pipe = dit()
    with_graphs(pipe)
    DIT.images(pipe)
    gone = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert gone() is None


# The host's functions -----------------------------------------------------------------------------


def test_calling_with_graphs_again_discards_the_earlier_graphs():
    pipe = dit()
    DIT.images(with_graphs(pipe))
    with_graphs(pipe, max_signatures=1)
    assert captures(pipe) == 0 and hits(pipe) == 0
    DIT.images(pipe)
    without_graphs(pipe)
    assert "forward" not in vars(pipe.transformer)
    without_graphs(pipe)


def test_without_graphs_restores_a_forward_the_user_had_replaced():
    model = flux_transformer()
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs)
    replaced = model.forward
    pipe = with_graphs(Pipe(model))
    denoise(model)
    without_graphs(pipe)
    assert vars(model)["forward"] is replaced


def test_replacing_the_pipelines_denoiser_warns_once_and_shows_in_the_report():
    pipe = with_graphs(Pipe(Small()))
    small_call(pipe.transformer)
    gone = weakref.ref(pipe.transformer)
    pipe.transformer = Small()
    gc.collect()
    assert gone() is None
    with pytest.warns(EagerDenoiserWarning, match=r"pipe\.transformer was replaced") as caught:
        reports = calls(2, lambda: report(pipe)["transformer"])
    assert len(caught) == 1
    assert [(each.replaced, each.hits) for each in reports] == [(True, 1)] * 2
    with_graphs(pipe)
    small_call(pipe.transformer)
    assert not report(pipe)["transformer"].replaced and hits(pipe) == 1


def test_a_wrapped_forward_is_reported_as_replaced_and_without_graphs_removes_its_graphs():
    model = Small()
    pipe = with_graphs(Pipe(model))
    served = model.forward
    model.forward = lambda *args: served(*args) * 2
    small_call(model)
    with pytest.warns(EagerDenoiserWarning, match=r"the forward of pipe\.transformer"):
        assert report(pipe)["transformer"].replaced
    assert hits(pipe) == 1
    without_graphs(pipe)
    small_call(model)
    assert served.report().hits == 1 and not served.report().signatures


def test_without_graphs_also_restores_a_denoiser_removed_from_the_pipeline():
    model = Small()
    pipe = with_graphs(Pipe(model))
    pipe.transformer = Small()
    without_graphs(pipe)
    assert "forward" not in vars(model) and report(pipe) == {}


def test_capture_is_refused_for_a_pipeline_without_graphs():
    pipe = dit()
    for _ in range(2):
        with pytest.raises(UnsupportedHostError, match="serve no denoiser") as error:
            capture(pipe, class_labels=[7])
        assert "with_graphs(pipe) before" in str(error.value)
        without_graphs(with_graphs(pipe))
    with_graphs(pipe).transformer = dit().transformer
    with (
        pytest.warns(EagerDenoiserWarning, match="was replaced"),
        pytest.raises(UnsupportedHostError, match="serve no denoiser"),
    ):
        capture(pipe, class_labels=[7])


def test_with_graphs_refuses_objects_without_a_denoiser_and_invalid_options():
    with pytest.raises(UnsupportedHostError, match="no denoiser"):
        with_graphs(torch.nn.Linear(1, 1))
    # One with other names for its arguments is served.
    model = torch.nn.Linear(4, 4)
    pipe = with_graphs(Pipe(model))
    with torch.no_grad():
        assert torch.equal(
            model(torch.ones(2, 4)),
            torch.nn.functional.linear(torch.ones(2, 4), model.weight, model.bias),
        )
    assert hits(pipe) == 1
    for wrong in ({"max_batch": 0}, {"max_signatures": 0}, {"max_batch": "2"}):
        with pytest.raises(InvalidOptionError):
            with_graphs(dit(), **wrong)


def test_a_diffusers_version_with_an_unknown_hook_registry_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    registry = importlib.import_module("diffusers.hooks.hooks").HookRegistry
    monkeypatch.setattr(registry, "check_if_exists_or_initialize", lambda module: None)
    with pytest.raises(UnsupportedHostError, match=r"no '_diffusers_hook' in .*check_if_exists"):
        with_graphs(dit())
    monkeypatch.delattr(registry, "register_hook")
    with pytest.raises(UnsupportedHostError, match="register_hook"):
        with_graphs(dit())


def test_the_code_of_the_diffusers_page_runs_and_prints_as_documented(
    capsys: pytest.CaptureFixture[str],
):
    page = Path(__file__).parents[3] / "docs" / "how-to" / "diffusers.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out == "10 2\n"


def test_graphs_switched_off_by_the_environment_make_all_calls_eager(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    pipe = dit()
    eager = DIT.images(pipe)
    with_graphs(pipe)
    with pytest.warns(EagerDenoiserWarning, match="graphs are off"):
        assert torch.equal(DIT.images(pipe), eager)
    assert set(ran_eagerly(pipe)) == {Reason.MODE_NONE}


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_images_with_graphs_on_a_gpu_equal_eager_images(name: str):
    family: Family = FAMILIES[name]
    pipe = family.make().to("cuda")
    family_call = {
        n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in family.call.items()
    }
    on_gpu = Family(**{**vars(family), "call": family_call})
    kinds = [(size, guided) for size in range(len(family.sizes) or 1) for guided in (False, True)]
    eager = {kind: on_gpu.images(pipe, *kind) for kind in kinds}
    count = call_counter(pipe)
    with_graphs(pipe)
    for kind in kinds * 2:
        assert torch.equal(on_gpu.images(pipe, *kind), eager[kind]), kind
    assert hits(pipe) == len(count) and not ran_eagerly(pipe)


@pytest.mark.cuda
def test_a_scheduler_that_keeps_outputs_on_a_gpu_gives_the_eager_image():
    """Outputs in the pool's memory would be overwritten under it."""
    pipe = dit().to("cuda")
    pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    eager = DIT.images(pipe, guided=False, num_inference_steps=8)
    with_graphs(pipe)
    assert torch.equal(DIT.images(pipe, guided=False, num_inference_steps=8), eager)


@pytest.mark.cuda
def test_a_pipeline_moved_to_another_device_gives_right_images():
    pipe = dit()
    eager = DIT.images(pipe)
    with_graphs(pipe)
    assert torch.equal(DIT.images(pipe), eager)
    pipe.to("cuda")
    moved = DIT.images(pipe)
    assert torch.equal(DIT.images(pipe), moved)
    pipe.to("cpu")
    assert torch.equal(DIT.images(pipe), eager) and not ran_eagerly(pipe)


@pytest.mark.cuda
def test_repeated_blocks_compiled_by_diffusers_are_captured():
    pipe = FLUX.make().to("cuda")
    call = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in FLUX.call.items()}
    on_gpu = Family(**{**vars(FLUX), "call": call})
    pipe.transformer.compile_repeated_blocks(fullgraph=True, dynamic=True)
    sizes = range(len(FLUX.sizes) or 1)
    compiled = [on_gpu.images(pipe, size, False) for size in sizes]
    with_graphs(pipe)
    for size in [*sizes, *sizes]:
        # A new size may be compiled anew, with other roundings.
        image = on_gpu.images(pipe, size, False)
        torch.testing.assert_close(image, compiled[size], rtol=1e-3, atol=1e-3)
    assert hits(pipe) and not ran_eagerly(pipe)
