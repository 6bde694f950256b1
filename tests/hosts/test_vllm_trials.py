"""Trials of vLLM's FULL graphs under GRAPHRT_CHECK, in loops that call as vLLM's runners do."""
# ruff: noqa: F811 (fixtures are arguments)

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_on_cpu as host
from test_vllm import step, told, vllm  # noqa: F401  (fixtures)

import graphrt.hosts.vllm
from graphrt import GraphMode, Reason
from graphrt.errors import GraphMemoryWarning, GraphQuarantinedWarning
from graphrt.hosts import engine
from graphrt.hosts.vllm import _state, trials

pytestmark = pytest.mark.skipif(
    host.IS_INSTALLED, reason="the published runners need a GPU: benchmarks/gpu/vllm_host"
)
WIDTH, SLOTS = 4, 32
SIZES = [2, 4]


class Model(torch.nn.Module):
    """A decoder that writes its token's row of a cache, and sums the rows of its request.

    Rows of padding hold something else in the graph than in eager runs, as if a kernel skips them.
    """

    def __init__(self, vllm: Any) -> None:
        super().__init__()
        self.contexts = vllm.contexts
        self.embed = torch.randn(64, WIDTH)
        self.cache = torch.zeros(SLOTS, WIDTH)
        # Not a number: one that the forward moves is tried three times.
        self._calls: SimpleQueue[None] = SimpleQueue()

    @property
    def calls(self) -> int:
        return self._calls.qsize()

    def forward(self, input_ids, positions, inputs_embeds=None, intermediate_tensors=None):
        self._calls.put(None)
        metadata = self.contexts._forward_context.attn_metadata["layer"]
        hidden = self.embed[input_ids] * metadata.scale + metadata.bias[: len(input_ids)]
        self.cache.index_copy_(0, metadata.slots, hidden)
        hidden = hidden + self.cache[metadata.slots] + positions[:, None]
        padding = torch.arange(len(input_ids)) >= metadata.query_start_loc.max()
        return torch.where(padding[:, None], metadata.rest, hidden)


class Metadata:
    """What a runner prepares: buffers in place, or, with a defect, what no graph can see."""

    def __init__(self, *, scale: float = 1.0, replaces: bool = False, above: int = 0) -> None:
        self.slots = torch.zeros(max(SIZES), dtype=torch.int64)
        self.bias = torch.zeros(max(SIZES), WIDTH)
        self.starts = torch.zeros(max(SIZES) + 1, dtype=torch.int64)
        # Only steps of more tokens have the defect.
        self.scale, self.replaces, self.above = scale, replaces, above

    def __call__(self, tokens: int, padded: int, *, for_capture: bool) -> Any:
        is_wrong = not for_capture and tokens > self.above
        self.slots[:padded] = torch.arange(padded) % SLOTS
        self.starts.copy_(torch.arange(len(self.starts)).clamp_max(tokens))
        bias = torch.full_like(self.bias, 5.0) if is_wrong and self.replaces else self.bias
        layer = SimpleNamespace(
            scale=self.scale if is_wrong else 1.0,
            bias=bias,
            rest=1.0 if for_capture else 2.0,
            slots=self.slots[:padded],
            query_start_loc=self.starts[: padded + 1],
        )
        return {"layer": layer}


class V1:
    """Steps of the V1 runner: a wrapper around the model."""

    def __init__(self, vllm: Any, config: Any, model: Any, prepare: Any) -> None:
        self.vllm, self.config, self.prepare = vllm, config, prepare
        self.ids = torch.zeros(max(SIZES), dtype=torch.int64)
        self.positions = torch.zeros(max(SIZES), dtype=torch.int64)
        self.model = vllm.v1.CUDAGraphWrapper(model, config, runtime_mode=vllm.mode.FULL)
        with vllm.v1.graph_capture(device=torch.device("cpu")):
            for size in reversed(SIZES):
                self._call(size, size, for_capture=True)

    def _call(self, tokens: int, padded: int, *, for_capture: bool = False) -> Any:
        metadata = self.prepare(tokens, padded, for_capture=for_capture)
        self.metadata = metadata
        with self.vllm.contexts.set_forward_context(
            metadata,
            self.config,
            num_tokens=padded,
            cudagraph_runtime_mode=self.vllm.mode.FULL,
            batch_descriptor=self.vllm.Key(padded, num_reqs=padded),
        ):
            return self.model(input_ids=self.ids[:padded], positions=self.positions[:padded])

    def step(self, ids: list[int]) -> torch.Tensor:
        self.ids[: len(ids)] = torch.tensor(ids)
        self.positions[: len(ids)] += 1
        padded = min(size for size in SIZES if size >= len(ids))
        return self._call(len(ids), padded)[: len(ids)].clone()


class V2:
    """Steps of the V2 runner."""

    def __init__(self, vllm: Any, config: Any, model: Any, prepare: Any) -> None:
        self.runner = vllm.v2_runner.GPUModelRunner(config, model, prepare)
        self.positions = self.runner.positions
        self.runner.capture_model()

    def step(self, ids: list[int]) -> torch.Tensor:
        self.runner.execute_model(SimpleNamespace(token_ids=ids))
        return self.runner.execute_model_state.hidden_states[: len(ids)].clone()


@pytest.fixture(params=[V1, V2])
def loop(request, vllm, monkeypatch):
    """Makes the steps of a runner with trials."""
    return maker(request.param, vllm, monkeypatch, "first")


def maker(kind, vllm, monkeypatch, level):
    monkeypatch.setenv("GRAPHRT_CHECK", level)
    graphrt.hosts.vllm.uninstall()
    graphrt.hosts.vllm.install()
    engine.log_untried.cache_clear()

    def make(metadata: Metadata, *, model: Any = None, **config: Any) -> Any:
        given = host.config(SIZES, "FULL_DECODE_ONLY")
        given.compilation_config.static_forward_context = config.pop("layers", {})
        vars(given.cache_config).update(config.pop("cache", {}))
        vars(given.parallel_config).update(config)
        model = model or Model(vllm)
        steps = kind(vllm, given, model, metadata)
        steps.inner, steps.captured = model, model.calls
        return steps

    return make


def expected(steps: Any, ids: list[int], scale: float = 1.0, bias: float = 0.0) -> torch.Tensor:
    hidden = steps.inner.embed[torch.tensor(ids)] * scale + bias
    return hidden * 2 + steps.positions[: len(ids), None]


BATCHES = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]] * 3


def test_without_a_defect_each_full_graph_is_tried_once_and_stays(loop, told):
    steps = loop(Metadata())
    for ids in BATCHES:
        assert torch.allclose(steps.step(ids), expected(steps, ids))
    # Two eager runs for each of two graphs.
    assert steps.inner.calls == steps.captured + 4
    record = graphrt.hosts.vllm.report().trust.trials
    assert [(each.mode, each.status, each.steps) for each in record] == [
        (GraphMode.FULL, "tried", 1)
    ] * 2
    lines = [line for line in told.messages if "tried FULL" in line]
    assert len(lines) == 2 and all("ms: as eager" in line for line in lines)
    assert graphrt.hosts.vllm.report().reasons == {Reason.HIT: len(BATCHES)}


@pytest.mark.parametrize("defect", ["baked", "stale"])
def test_a_defect_in_metadata_is_found_and_its_graph_alone_runs_eagerly(loop, told, defect):
    scale, bias = (3.0, 0.0) if defect == "baked" else (1.0, 5.0)
    steps = loop(Metadata(scale=scale, replaces=defect == "stale", above=2))
    with pytest.warns(GraphQuarantinedWarning, match="differs from eager"):
        first = steps.step([3, 4, 5])
    assert torch.allclose(first, expected(steps, [3, 4, 5], scale, bias))
    for ids in BATCHES:
        wrong = (scale, bias) if len(ids) > 2 else (1.0, 0.0)
        assert torch.allclose(steps.step(ids), expected(steps, ids, *wrong))
    trials = graphrt.hosts.vllm.report().trust.trials
    assert [(each.descriptor.num_tokens, each.status) for each in trials] == [
        (4, "quarantined"),
        (2, "tried"),
    ]
    (line,) = [line for line in told.messages if "in quarantine" in line]
    assert "num_tokens=4" in line or "4 tokens" in line
    text = graphrt.hosts.vllm.trials._counter()
    assert any(
        sample.labels.get("verdict") == "quarantined" and sample.value >= 1
        for metric in text.collect()
        for sample in metric.samples
    )


def test_a_graph_is_tried_again_once_vllm_has_captured_it_again(loop):
    metadata = Metadata(scale=3.0)
    steps = loop(metadata)
    with pytest.warns(GraphQuarantinedWarning):
        steps.step([3, 4])
    metadata.scale = 1.0
    if type(steps) is V1:
        steps.model.clear_graphs()
        with steps.vllm.v1.graph_capture(device=torch.device("cpu")):
            for size in SIZES:
                steps._call(size, size, for_capture=True)
    else:
        steps.runner.cudagraph_manager.graphs.clear()
        steps.runner.capture_model()
    calls = steps.inner.calls
    for _ in range(3):
        assert torch.allclose(steps.step([3, 4]), expected(steps, [3, 4]))
    assert steps.inner.calls == calls + 2


def test_a_number_that_the_host_changes_later_is_named(loop, vllm):
    class Scaled(Model):
        factor = 1.0

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * self.factor

    steps = loop(Metadata(), model=Scaled(vllm))
    for ids in BATCHES:
        steps.step(ids)
    steps.inner.factor = 3.0
    with pytest.warns(GraphQuarantinedWarning, match="factor"):
        right = [
            torch.allclose(steps.step([3, 4]), 3 * expected(steps, [3, 4])) for _ in range(400)
        ]
    assert all(right[-5:])


@pytest.mark.parametrize("kind", [V1, V2])
def test_level_always_finds_a_defect_that_begins_later(kind, vllm, monkeypatch):
    metadata = Metadata()
    steps = maker(kind, vllm, monkeypatch, "always")(metadata)
    steps.step([3, 4])
    steps.step([3, 4])
    assert steps.inner.calls == steps.captured + 4
    metadata.scale = 3.0
    with pytest.warns(GraphQuarantinedWarning):
        found = steps.step([3, 4])
    assert torch.allclose(found, expected(steps, [3, 4], 3.0))


def test_arguments_that_the_model_writes_are_put_back_after_a_trial(vllm, monkeypatch):
    class Writes(Model):
        def __call__(self, *args, **kwargs):
            hidden = super().__call__(*args, **kwargs)
            kwargs["positions"].mul_(2)
            return hidden

    steps = maker(V1, vllm, monkeypatch, "always")(Metadata(), model=Writes(vllm))
    steps.positions.fill_(1)
    for expected in (4, 10, 22):
        steps.step([3, 4, 5, 6])
        assert steps.positions.tolist() == [expected] * 4
    assert graphrt.hosts.vllm.report().trust.trials[0].status == "tried"


def test_a_step_whose_trial_finds_no_memory_is_replayed(loop, vllm):
    class Large(Model):
        # Not an attribute, whose change would be one of the host's.
        full: SimpleQueue[None] = SimpleQueue()

        def __call__(self, *args, **kwargs):
            if self.full.qsize():
                raise torch.OutOfMemoryError("no memory")
            return super().__call__(*args, **kwargs)

    steps = loop(Metadata(), model=Large(vllm))
    Large.full.put(None)
    with pytest.warns(GraphMemoryWarning, match="no memory"):
        assert torch.allclose(steps.step([3, 4]), expected(steps, [3, 4]))
    assert not [each for each in graphrt.hosts.vllm.report().trust.trials if each.failure]


class Advances(Model):
    """A model whose state moves on at each run, as Mamba's."""

    def __init__(self, vllm: Any) -> None:
        super().__init__(vllm)
        self.state = torch.zeros(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.state.add_(1)
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"layers": "mamba"}, "moves on the state of Mixer"),
        ({"cache": {"calculate_kv_scales": True}}, "calculate_kv_scales"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"enable_eplb": True}, "enable_eplb"),
    ],
)
def test_a_model_whose_state_moves_on_with_each_run_is_named_and_untried(
    loop,
    vllm,
    told,
    config,
    reason,
):
    if "layers" in config:
        base = sys.modules[trials._MAMBA].MambaBase
        config = {"layers": {"mixer": type("Mixer", (base,), {})()}}
    model = Advances(vllm)
    steps = loop(Metadata(), model=model, **config)
    before = model.state.clone()
    for ids in BATCHES:
        assert torch.allclose(steps.step(ids), expected(steps, ids))
    assert model.state == before + len(BATCHES) and model.calls == steps.captured
    assert not graphrt.hosts.vllm.report().trust.trials
    assert len([line for line in told.messages if reason in line]) == 1


def test_pieces_are_replayed_untried_where_there_are_several_ranks(vllm, monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "always")
    config, x = host.config([2], "PIECEWISE"), torch.zeros(2, WIDTH)
    config.parallel_config.tensor_parallel_size = 2
    calls: list[int] = []

    def piece(x):
        calls.append(1)
        return x + 1

    # As a wrapper that is made while the V2 runner captures.
    monkeypatch.setattr(_state.state, "model", piece)
    wrapper = vllm.v1.CUDAGraphWrapper(piece, config, runtime_mode=vllm.mode.PIECEWISE)
    with vllm.v1.graph_capture(device=torch.device("cpu")):
        for at in range(4):
            if at == 1:
                calls.clear()
            with step(vllm, config, vllm.mode.PIECEWISE, vllm.Key(2)):
                assert torch.equal(wrapper(x), x + 1)
    assert not calls


@pytest.mark.parametrize("kind", ["V1", "V2"])
def test_a_graph_that_fails_on_one_rank_is_in_quarantine_on_all_after_the_same_runs(kind, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.vllm_ranks", str(rank), tmp_path / "store", kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in told)
    assert first == second
    assert first["statuses"] == {"4": "quarantined", "2": "tried"}
