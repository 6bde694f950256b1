"""PEFT beside `with_graphs`: adapters come, go and take turns, and every served step is right."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.models.families import VOCAB
from tests.models.generating import new_model, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from graphrt.hosts.transformers import adapters, graphs_of, with_graphs  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TARGETS = ["q_proj", "v_proj"]


def lora(**fields: Any) -> Any:
    fields = {"target_modules": TARGETS, "init_lora_weights": False, "lora_alpha": 64, **fields}
    return peft.LoraConfig(**fields)


def adapted(names: str = "ab", base: Any = None, device: str = "cpu") -> Any:
    """A decoder with an adapter for each letter, the same each time; the first one is active."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = new_model("llama") if base is None else base
        model = peft.get_peft_model(model, lora(), adapter_name=names[0])
        for rank, name in enumerate(names[1:], 3):
            model.add_adapter(name, lora(r=rank))
        return model.eval().to(device)


def graphed(names: str = "ab", device: str = "cpu", **arguments: Any) -> Any:
    options = {"max_batch": 2, "sizes": [2], "max_len": 32, "strict": True, **arguments}
    return with_graphs(adapted(names, device=device), **options)


def generated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.generate(input_ids=tokens, max_new_tokens=8, do_sample=False)
    return result


def seen(model: Any) -> tuple[int, int]:
    """Steps by graphs, and other steps of one token a row."""
    report = graphs_of(model).report()
    return report.served, sum(report.eager.values())


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# Which adapter is active -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_fifty_switches_among_adapters_are_served_by_graphs_and_give_plain_tokens(device: str):
    plain, model = adapted("abc", device=device), graphed("abc", device)
    tokens, chosen = random_tokens(2, 6).to(device), random.Random(0)
    expected = {}
    for name in (*"abc", ""):
        plain.set_adapter(name or "a")
        with nullcontext() if name else plain.disable_adapter():
            expected[name] = generated(plain, tokens)
    assert len({tuple(each.flatten().tolist()) for each in expected.values()}) == 4
    for _ in range(50):
        name = chosen.choice(["a", "b", "c", ""])
        model.set_adapter(name or chosen.choice("abc"))
        with nullcontext() if name else model.disable_adapter():
            assert torch.equal(generated(model, tokens), expected[name]), name
    assert seen(model) == (50 * 7, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_switch_in_a_loop_of_ones_own_is_eager_until_a_sequence_began_with_that_adapter(
    device: str,
):
    plain, model = adapted(device=device), graphed(device=device)
    graphs, tokens = graphs_of(model), random_tokens(2, 12).to(device)
    for round_ in range(3):
        cache = transformers.DynamicCache()
        for each in (plain, model):
            each.set_adapter("a" if round_ != 1 else "b")
        plain(tokens[:, :4], past_key_values=cache)
        graphs.prefill(tokens[:, :4])
        for at in range(4, 12):
            for each in (plain, model):
                each.set_adapter("ab"[at // 2 % 2])
            ours = graphs.step(tokens[:, at])
            theirs = plain(tokens[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert seen(model) == (4 + 8 + 8, 4)


def test_several_active_adapters_and_merged_ones_have_graphs_of_their_own():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    for change in (
        lambda each: each.base_model.set_adapter(["a", "b"]),
        lambda each: each.set_adapter("b"),
        lambda each: each.merge_adapter(),
        lambda each: each.unmerge_adapter(),
        lambda each: each.base_model.set_adapter(["b", "a"]),
    ):
        change(plain), change(model)
        for _ in range(2):
            assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (70, 0)


def test_a_rescaled_adapter_is_eager_until_its_scale_is_back_or_recapture():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    for factor, count in ((4.0, (0, 7)), (0.25, (7, 7)), (2.0, (7, 14))):
        for each in (plain, model):
            for layer in each.modules():
                if hasattr(layer, "lora_A"):
                    layer.scaling["a"] *= factor
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
        assert seen(model) == count
    graphs_of(model).recapture()
    assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (14, 14)


def test_with_as_many_sets_as_have_graphs_others_run_eagerly_until_one_is_deleted(monkeypatch):
    monkeypatch.setattr("graphrt.hosts.transformers.seam.MOST", 2)
    assert adapters.MOST == 8
    plain, model, tokens = adapted("abc"), graphed("abc"), random_tokens(2, 6)
    for name, count in (("b", (7, 0)), ("c", (7, 7)), ("a", (14, 7)), ("b", (21, 7))):
        plain.set_adapter(name), model.set_adapter(name)
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
        assert seen(model) == count
    (reason,) = graphs_of(model).report().eager
    assert "2 sets have graphs" in reason
    for each in (plain, model):
        each.delete_adapter("a")
        each.set_adapter("c")
    graphs_of(model).recapture()
    assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (28, 7)


# Adapters that come and go -----------------------------------------------------------------------


@pytest.mark.parametrize("targets", [TARGETS, ["k_proj", "up_proj"]], ids=["same", "other"])
def test_adding_and_deleting_an_adapter_that_is_not_active_changes_nothing(targets: list[str]):
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    captures = graphs_of(model).steps.pool.captures
    for change in (
        lambda each: each.add_adapter("new", lora(target_modules=targets)),
        lambda each: each.delete_adapter("b"),
        lambda each: each.delete_adapter("new"),
        lambda each: each.add_adapter("b", lora(r=2, use_dora=True)),
    ):
        change(plain), change(model)
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (28, 0)
    assert graphs_of(model).steps.pool.captures == captures


def test_an_adapter_that_comes_later_has_graphs_at_its_first_use_and_the_others_keep_theirs():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    captures = []
    for each in (plain, model):
        torch.manual_seed(3)
        each.add_adapter("new", lora(target_modules=["k_proj", "up_proj"]))
    for name in ("new", "a", "b", "new", "a", "b"):
        plain.set_adapter(name), model.set_adapter(name)
        before = graphs_of(model).steps.pool.captures
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
        captures.append(graphs_of(model).steps.pool.captures > before)
    assert captures == [True, False, True, False, False, False]
    assert seen(model) == (42, 0)


def test_a_model_that_gets_its_first_adapter_after_with_graphs_is_served_with_and_without_it():
    base = with_graphs(new_model("llama"), max_batch=2, sizes=[2], max_len=32, strict=True)
    plain, model, tokens = adapted(), adapted(base=base), random_tokens(2, 6)
    for _ in range(2):
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
        with plain.disable_adapter(), model.disable_adapter():
            assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (28, 0)
    assert torch.equal(generated(model.unload(), tokens), generated(plain.unload(), tokens))


def test_an_adapter_loaded_again_under_its_name_is_captured_again():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    for seed in range(3):
        for each in (plain, model):
            each.set_adapter("a")
            each.delete_adapter("b")
            torch.manual_seed(seed)
            each.add_adapter("b", lora(r=2))
        for name in "bab":
            plain.set_adapter(name), model.set_adapter(name)
            assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (63, 0)
    assert len(graphs_of(model)._by_adapters) == 2


def test_weights_of_adapters_written_in_place_are_read_by_the_graphs_of_each():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    for name in "abab":
        for each in (plain, model):
            each.set_adapter(name)
            for path, tensor in each.named_parameters():
                if f".{name}." in path:
                    tensor.mul_(-1.5)
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (28, 0)


def test_hooks_of_a_batch_with_several_adapters_run_eagerly_and_graphs_serve_again():
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    call = {
        "input_ids": tokens,
        "max_new_tokens": 8,
        "do_sample": False,
        "adapter_names": ["a", "b"],
    }
    for _ in range(2):
        assert torch.equal(model.generate(**call), plain.generate(**call))
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (14, 14)


def test_a_capture_that_fails_for_an_adapter_is_tried_once_and_others_stay_served(monkeypatch):
    plain, model, tokens = adapted(), graphed(), random_tokens(2, 6)
    tries = []

    def fail(*arguments: Any) -> None:
        tries.append(1)
        raise RuntimeError("no room")

    monkeypatch.setattr("graphrt.hosts.transformers.steps.StepGraphs._capture", fail)
    for name in "bab":
        plain.set_adapter(name), model.set_adapter(name)
        assert torch.equal(generated(model, tokens), generated(plain, tokens))
    assert seen(model) == (7, 14)
    (reason,) = graphs_of(model).report().eager
    assert "no room" in reason and len(tries) == 1


def test_an_adapter_that_came_after_the_captures_is_freed_when_it_is_deleted():
    model, tokens = graphed(), random_tokens(2, 6)
    model.add_adapter("new", lora())
    generated(model, tokens)
    watched = [weakref.ref(each) for name, each in model.named_parameters() if ".new." in name]
    model.delete_adapter("new")
    # Without dict watchers a runner finds it within so many steps.
    for _ in range(graphs_of(model).report().runner.trust.glance_steps):
        generated(model, tokens)
        gc.collect()
        if all(each() is None for each in watched):
            break
    assert watched and not any(each() is not None for each in watched)


# Encoders ----------------------------------------------------------------------------------------


def test_an_encoder_is_right_at_the_call_after_each_of_fifty_switches():
    def new() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        fields = {"target_modules": ["query", "value"]}
        model = peft.get_peft_model(
            transformers.BertModel(config).eval(), lora(**fields), adapter_name="a"
        )
        model.add_adapter("b", lora(**fields))
        return model.eval()

    plain, tokens, chosen = new(), random_tokens(2, 7), random.Random(0)
    model = with_graphs(new(), max_batch=2, max_len=16, sizes=[2])
    expected = {}
    for name in "ab":
        plain.set_adapter(name)
        expected[name] = plain(input_ids=tokens).last_hidden_state
    for _ in range(50):
        name = chosen.choice("ab")
        model.set_adapter(name)
        ours = model(input_ids=tokens).last_hidden_state
        torch.testing.assert_close(ours, expected[name], rtol=1e-3, atol=1e-4)
    assert seen(model) == (50, 0)
