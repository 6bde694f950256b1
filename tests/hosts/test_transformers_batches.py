"""transformers' continuous batching through graphs gives the tokens of each prompt alone, keeps a
limit, and captures again what has changed."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from typing import Any

import pytest
import torch

from graphrt import GraphOptions
from graphrt.errors import CaptureError, InvalidOptionError, UnsupportedHostError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from graphrt.hosts.transformers import (  # noqa: E402
    graphs_of,
    versions,
    with_batch_graphs,
    with_graphs,
    without_graphs,
)
from tests.models import batching  # noqa: E402
from tests.models.batching import generate  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LENGTHS = (5, 9, 3, 17, 40, 70)


@pytest.fixture
def patch(monkeypatch):
    # A logger of transformers' passes what it says on to the log of the tests.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return monkeypatch


@pytest.fixture(params=DEVICES)
def model(request, patch):
    if request.param == "cpu":
        batching.allow_graphs(patch)
    return batching.llama(request.param)


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]


def runner_of(model: Any) -> Any:
    return model._cached_continuous_batching_manager.batch_processor.model_runner


def keys_of(model: Any) -> list[Any]:
    """The keys of a kept manager's graphs."""
    (batches,) = graphs_of(model)._each()
    return list(batches.graphs)


@pytest.mark.parametrize("attention", ["sdpa", "paged|eager", "flash"])
def test_batches_by_graphs_give_the_tokens_of_each_prompt_alone(attention, model, prompts, patch):
    expected = batching.alone(model, prompts)
    if attention == "flash":
        batching.flash(patch, model)
    else:
        model.set_attn_implementation(attention)
    with_batch_graphs(model)
    assert generate(model, prompts, persistent_manager=True) == expected
    report = graphs_of(model).report()
    keys = keys_of(model)
    assert report.served >= 8 and report.captured == len(keys) and not report.eager
    # Decode steps have keys of their own size alone, where attention takes a table of blocks.
    assert any(len(key) == 2 for key in keys) is (attention == "flash")
    # The kept manager has its graphs: another session captures nothing.
    assert generate(model, prompts) == expected
    later = graphs_of(model).report()
    assert later.captured == report.captured and later.served > report.served
    assert str(later).startswith(f"{later.served} batches by graphs, {later.captured} captured")


@pytest.mark.cuda
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_tokens_are_those_of_eager_and_of_transformers_own_graphs(
    attention, asynchronous, prompts, patch
):
    model = batching.llama("cuda")
    alone = batching.alone(model, prompts)
    if attention == "flash":
        batching.flash(patch, model)
    batching.after_inputs(patch, batching.wait)
    for way in (generate, batching.drawn):
        found = {}
        for name in ("eager", "own", "graphrt"):
            if name == "graphrt":
                with_batch_graphs(model)
            options = {"use_cuda_graph": name != "eager", "use_async_batching": asynchronous}
            found[name] = way(model, prompts, **options)
        report = graphs_of(model).report()
        without_graphs(model)
        assert report.served >= 8 and not report.eager
        if way is generate:
            assert found == dict.fromkeys(found, alone)
        # Eager batches have no padding, and so other random numbers.
        assert found["graphrt"] == found["own"]


@pytest.mark.cuda
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_batches_wait_for_inputs_that_a_busy_gpu_writes_late(
    attention, asynchronous, prompts, patch
):
    model = batching.llama("cuda")
    alone = batching.alone(model, prompts)
    if attention == "flash":
        batching.flash(patch, model)
    batching.after_inputs(patch, batching.be_late)
    with_batch_graphs(model)
    for _ in range(2):
        tokens = generate(model, prompts, use_async_batching=asynchronous, persistent_manager=True)
        assert tokens == alone
    assert graphs_of(model).report().served >= 8


@pytest.mark.parametrize("options", [{"max_graphs": 3}, 5, {}])
def test_options_of_another_kind_are_refused_at_once(model, options):
    with pytest.raises(InvalidOptionError, match="options"):
        with_batch_graphs(model, options=options)
    with pytest.raises(InvalidOptionError, match="options"):
        with_graphs(model, max_batch=2, max_len=16, options=options)


def test_a_limit_of_graphs_is_kept(model, prompts, caplog):
    expected = batching.alone(model, prompts)
    with_batch_graphs(model, options=GraphOptions(max_graphs=2))
    sizes = {"q_padding_interval_size": 4, "kv_padding_interval_size": 256}
    with caplog.at_level(logging.WARNING, "graphrt"):
        assert generate(model, prompts, persistent_manager=True, **sizes) == expected
    report = graphs_of(model).report()
    assert len(keys_of(model)) == 2 and report.eager
    assert "max_graphs" in str(report) and "2 graphs of 2" in str(report)
    assert "max_graphs" in caplog.text
    assert generate(model, prompts, persistent_manager=True) == expected
    assert len(keys_of(model)) == 2


def test_a_model_that_changed_between_sessions_is_captured_again(model, prompts, caplog):
    with_batch_graphs(model)
    before = generate(model, prompts, persistent_manager=True)
    captured = graphs_of(model).report().captured
    head = torch.randn_like(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(head)
    expected = batching.alone(model, prompts)
    assert expected != before
    with caplog.at_level(logging.WARNING, "graphrt"):
        assert generate(model, prompts, persistent_manager=True) == expected
    again = graphs_of(model).report().captured
    assert again > captured
    assert "lm_head" in caplog.text
    # It is the model of these graphs now.
    assert generate(model, prompts) == expected
    assert graphs_of(model).report().captured == again


def test_a_hook_inside_of_the_model_ends_its_graphs_until_it_is_removed(model, prompts):
    with_batch_graphs(model)
    expected = generate(model, prompts, persistent_manager=True)
    runner, manager = runner_of(model), model._cached_continuous_batching_manager
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    manager._create_batch_processor()  # as a session begins
    assert "has a hook" in str(graphs_of(model).report())
    assert runner._capture_graph.__self__ is runner and not graphs_of(model)._each()
    handle.remove()
    assert generate(model, prompts, persistent_manager=True) == expected
    assert graphs_of(model).report().refused is None and keys_of(model)


def test_a_key_that_cannot_be_captured_runs_eagerly_and_is_named(model, prompts, caplog):
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits * float(outputs.logits.isfinite().any().item() + 1)
        return outputs

    patched = type("Patched", (type(model),), {"forward": forward})
    model.__class__ = patched
    expected = batching.alone(model, prompts)
    with_batch_graphs(model)
    with caplog.at_level(logging.WARNING, "graphrt"):
        assert generate(model, prompts) == expected
    report = graphs_of(model).report()
    assert report.served == report.captured == 0
    assert all("CaptureSyncError" in reason for reason in report.eager)
    assert "CaptureSyncError" in caplog.text


def test_where_transformers_has_no_graphs_the_report_says_so(model, prompts, caplog):
    expected = batching.alone(model, prompts)
    with_batch_graphs(model)
    with caplog.at_level(logging.WARNING, "graphrt"):
        assert generate(model, prompts, use_cuda_graph=False) == expected
    report = graphs_of(model).report()
    assert re.search(r"transformers has them off for (paged\|)?sdpa on", str(report))
    assert report.served == 0
    assert caplog.text.count("use_cuda_graph=True) turns them on") == 1
    # The next session has graphs.
    assert generate(model, prompts) == expected
    assert graphs_of(model).report().refused is None


def test_with_graphs_off_for_the_process_batches_run_eagerly(model, prompts, patch):
    expected = batching.alone(model, prompts)
    with_batch_graphs(model)
    patch.setenv("GRAPHRT_MODE", "NONE")
    assert generate(model, prompts) == expected
    report = graphs_of(model).report()
    assert report.served == report.captured == 0 and [*report.eager] == ["graphs are off"]


def test_graphs_end_with_their_manager(model, prompts):
    with_batch_graphs(model)
    for kept in (True, False):
        generate(model, prompts, persistent_manager=kept)
        (batches,) = graphs_of(model)._each() if kept else [None]
        if batches is not None:
            pool, runner = batches._pool, weakref.ref(runner_of(model))
            assert len(pool.graphs) == graphs_of(model).report().captured
            del batches
    model.destroy_cached_continuous_batching_manager()
    gc.collect()
    assert runner() is None and pool.closed and not pool.graphs
    assert graphs_of(model)._each() == []


class OwnGraph:
    """Stands for a graph of transformers' own, which a CPU cannot have."""

    def replay(self) -> None:
        raise AssertionError("transformers replays a graph of its own")

    def reset(self) -> None:
        """Nothing was captured."""


def test_without_graphs_transformers_captures_for_itself_again(model, prompts):
    expected = batching.alone(model, prompts)
    with_batch_graphs(model)
    assert generate(model, prompts, persistent_manager=True) == expected
    runner = runner_of(model)
    without_graphs(model)
    assert "init_continuous_batching" not in vars(model)
    assert "_create_batch_processor" not in vars(model._cached_continuous_batching_manager)
    assert runner._capture_graph.__self__ is runner
    assert runner.inputs_and_outputs.get_graph.__self__ is runner.inputs_and_outputs
    with pytest.raises(InvalidOptionError, match="no graphs"):
        graphs_of(model)
    if model.device.type == "cuda":
        assert generate(model, prompts, persistent_manager=True) == expected
    else:
        runner.inputs_and_outputs.set_graph(OwnGraph())
    # The kept manager is served from its next session on, whatever graphs transformers has.
    with_batch_graphs(model)
    assert generate(model, prompts) == expected
    assert graphs_of(model).report().captured


def test_a_model_has_graphs_of_one_kind(model, prompts):
    expected = batching.alone(model, prompts)
    with_graphs(model, max_batch=1, max_len=128)
    with_batch_graphs(model)
    assert "forward" not in vars(model)
    assert generate(model, prompts) == expected
    with_graphs(model, max_batch=1, max_len=128)
    assert "init_continuous_batching" not in vars(model)
    assert batching.alone(model, prompts) == expected
    assert graphs_of(model).report().served > 0


def test_models_that_graphs_cannot_stand_for_are_refused(model):
    bert = transformers.BertModel(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(InvalidOptionError, match="BertModel"):
        with_batch_graphs(bert.eval())
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match=r"model\.layers\.0 has a hook"):
        with_batch_graphs(model)
    assert "init_continuous_batching" not in vars(model)
    handle.remove()
    model._device_mesh = "a mesh of two"
    with pytest.raises(CaptureError, match="several devices"):
        with_batch_graphs(model)


def test_a_seam_that_does_not_fit_is_refused_with_the_missing_names(patch):
    from transformers.generation.continuous_batching import input_outputs, model_runner

    patch.delattr(input_outputs.ContinuousBatchingIOs, "_get_graph_key")
    patch.setattr(model_runner.ModelRunner, "compute_batch", lambda self, model, data: None)
    model = batching.llama("cpu")
    with pytest.raises(UnsupportedHostError) as raised:
        with_batch_graphs(model)
    assert "ContinuousBatchingIOs._get_graph_key" in str(raised.value)
    assert "'_capture_graph' in the code of" in str(raised.value)
    assert "init_continuous_batching" not in vars(model)
    # What `with_graphs` needs is there.
    versions.check_transformers()
