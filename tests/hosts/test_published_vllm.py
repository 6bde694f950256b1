"""The published vLLM's graph modules, served by graphrt on a CPU, where they are installed."""

from __future__ import annotations

import importlib.util
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphrt
from graphrt.hosts.vllm import _state, install, uninstall

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM in this environment: see docs/vllm.md", allow_module_level=True)

import vllm_on_cpu as host

host.load()

import vllm.v1.worker.encoder_cudagraph as encoder
import vllm.v1.worker.gpu.cudagraph_utils as v2
import vllm.v1.worker.gpu.model_runner as v2_runner
import vllm.v1.worker.gpu_model_runner as v1
from vllm.compilation import breakable_cudagraph
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphWrapper as TheirWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@pytest.fixture(autouse=True)
def serving(monkeypatch):
    monkeypatch.setenv("GRAPHRT_VLLM", "1")
    for module in (v1, v2):
        for name in ("is_global_first_rank",):
            monkeypatch.setattr(module, name, lambda: False)
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(v2, "get_pp_group", lambda: rank)
    install()
    yield
    uninstall()
    for wrapper in list(TheirWrapper._all_instances):
        wrapper.clear_graphs()
    TheirWrapper._all_instances.clear()
    _state.state.pools.clear()
    type(current_platform)._global_graph_pool = None


class Forward:
    """Counts its calls; writes nothing."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4)
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(x @ self.weight) + 1


def step(config: Any, mode: Any, descriptor: Any) -> Any:
    return set_forward_context(
        None, config, num_tokens=descriptor.num_tokens, cudagraph_runtime_mode=mode,
        batch_descriptor=descriptor,
    )  # fmt: skip


def capture_all(config, wrapper, buffer, mode, descriptors) -> None:
    with v1.graph_capture(device=torch.device("cpu")):
        for descriptor in descriptors:
            with step(config, mode, descriptor):
                wrapper(buffer[: descriptor.num_tokens])


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_a_wrapper_captures_in_a_session_and_replays_each_descriptor(mode):
    config, forward, buffer = host.config([2, 4], mode.name), Forward(), torch.zeros(4, 4)
    wrapper = v1.CUDAGraphWrapper(forward, config, runtime_mode=mode)
    kinds = [
        BatchDescriptor(size, has_lora=bool(loras), num_active_loras=loras)
        for size in (4, 2)
        for loras in (0, 1, 2)
    ]
    before = compilation_counter.num_cudagraph_captured
    capture_all(config, wrapper, buffer, mode, kinds)
    assert forward.calls == len(kinds) == len(wrapper.concrete_cudagraph_entries)
    assert compilation_counter.num_cudagraph_captured == before + len(kinds)
    for kind in kinds * 2:
        buffer.normal_()
        with step(config, mode, kind):
            found = wrapper(buffer[: kind.num_tokens])
        assert torch.equal(found, torch.relu(buffer[: kind.num_tokens] @ forward.weight) + 1)
    assert forward.calls == len(kinds)


def test_after_the_session_an_unseen_batch_runs_eagerly_and_the_log_says_so(caplog_vllm):
    config, forward, buffer = host.config([2], "PIECEWISE"), Forward(), torch.zeros(4, 4)
    wrapper = v1.CUDAGraphWrapper(forward, config, runtime_mode=PIECEWISE)
    capture_all(config, wrapper, buffer, PIECEWISE, [BatchDescriptor(2)])
    with step(config, PIECEWISE, BatchDescriptor(3)):
        wrapper(buffer[:3])
    assert (forward.calls, len(wrapper.entries)) == (2, 1)
    assert "there is no PIECEWISE graph for [3 tokens" in caplog_vllm.text
    assert "graphrt captured 1 PIECEWISE graphs for 1 batches" in caplog_vllm.text


@pytest.fixture
def caplog_vllm(caplog):
    import logging

    logger = logging.getLogger("vllm.graphrt")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    _state.state.eager.counts.clear()
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


def test_vllm_meets_graphrts_wrapper_by_every_name():
    wrapper = v1.CUDAGraphWrapper(Forward(), host.config([1], "FULL"), runtime_mode=FULL)
    assert isinstance(wrapper, TheirWrapper) and isinstance(wrapper, graphrt.GraphWrapper)
    assert current_platform.get_static_graph_wrapper_cls() == "graphrt.hosts.vllm.GraphrtWrapper"
    assert wrapper in TheirWrapper._all_instances
    assert isinstance(wrapper.unwrap(), Forward) and wrapper.weight is wrapper.runnable.weight
    assert wrapper.cudagraph_wrapper is wrapper


def test_profiling_captures_in_a_pool_of_its_own_which_is_closed_after_it():
    config, forward, buffer = host.config([2], "PIECEWISE"), Forward(), torch.zeros(2, 4)
    wrapper = v1.CUDAGraphWrapper(forward, config, runtime_mode=PIECEWISE)
    real, profiling = wrapper.graph_pool, current_platform.graph_pool_handle()
    wrapper.graph_pool = profiling
    capture_all(config, wrapper, buffer, PIECEWISE, [BatchDescriptor(2)])
    throwaway = wrapper.pool
    v1.CUDAGraphWrapper.clear_all_graphs()
    wrapper.graph_pool = real
    close_unused()
    assert throwaway.closed and not wrapper.pool.closed and not wrapper.entries
    capture_all(config, wrapper, buffer, PIECEWISE, [BatchDescriptor(2)])
    assert len(wrapper.entries) == 1 and wrapper.graph_pool is real


def close_unused():
    """What the end of profiling, and the next captures, begin with."""
    _state.state.pools.close_unused(current_platform.get_global_graph_pool())


def test_profiling_of_either_runner_ends_with_that(monkeypatch):
    uninstall()
    called: list[str] = []
    for runner in (v1.GPUModelRunner, v2_runner.GPUModelRunner):
        monkeypatch.setattr(runner, "profile_cudagraph_memory", lambda self: called.append("own"))
    monkeypatch.setattr(_state.state.pools, "close_unused", lambda keep: called.append("closed"))
    install()
    for runner in (v1.GPUModelRunner, v2_runner.GPUModelRunner):
        runner.profile_cudagraph_memory(None)
    assert called == ["own", "closed"] * 2
    uninstall()


def manager_of(sizes, mode, **options):
    config = host.config(sizes, mode)
    made = v2.CudaGraphManager(config, torch.device("cpu"), CUDAGraphMode[mode], 1, **options)
    return config, made


class Decoder:
    """What the V2 runner hands its manager: a forward over static buffers, made for a batch."""

    def __init__(self, config, model=None) -> None:
        self.config, self.model = config, model or Forward()
        self.x, self.out = torch.zeros(8, 4), torch.zeros(8, 4)
        self.made: list[tuple[int, bool]] = []
        self.pairs = (
            "attn_states" in inspect.unwrap(v2.CudaGraphManager.capture).__code__.co_varnames
        )

    def create(self, desc, warmup):
        self.made.append((desc.num_tokens, warmup))

        def forward(mode):
            descriptor = BatchDescriptor(desc.num_tokens) if mode == PIECEWISE else None
            with step_or_none(self.config, mode, descriptor, desc.num_tokens):
                self.out[: desc.num_tokens].copy_(self.model(self.x[: desc.num_tokens]))

        return (forward, None) if self.pairs else forward


def step_or_none(config, mode, descriptor, tokens):
    return set_forward_context(
        None, config, num_tokens=tokens, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
    )


def test_full_graphs_of_the_v2_runner_are_graphrts():
    config, manager = manager_of([1, 2, 4], "FULL_DECODE_ONLY")
    decoder = Decoder(config)
    before = compilation_counter.num_cudagraph_captured
    manager.capture(decoder.create)
    assert compilation_counter.num_cudagraph_captured == before + 3
    assert [type(graph).__name__ for graph in manager.graphs.values()] == ["FullGraph"] * 3
    assert decoder.made == [(4, True), (4, False), (2, True), (2, False), (1, True), (1, False)]
    calls = decoder.model.calls
    for live in (1, 2, 3, 4, 3, 1):
        decoder.x.normal_()
        desc = manager.dispatch(live, live, 1, 0)
        assert desc.cg_mode == FULL
        manager.run_fullgraph(desc)
        expected = torch.relu(decoder.x[:live] @ decoder.model.weight) + 1
        assert torch.equal(decoder.out[:live], expected)
    assert decoder.model.calls == calls


def test_full_and_piecewise_share_a_loop_and_a_pool():
    config, manager = manager_of([2, 4], "FULL_AND_PIECEWISE")
    piece = v1.CUDAGraphWrapper(Forward(), config, runtime_mode=PIECEWISE)
    decoder = Decoder(config, piece)
    manager.capture(decoder.create)
    assert sorted(each.num_tokens for each in piece.entries) == [2, 4]
    assert len(manager.graphs) == 2 and piece.sealed
    assert list(_state.state.pools._pools) == [manager.pool]


def test_graphs_that_a_manager_forgets_are_destroyed():
    config, manager = manager_of([1, 2], "FULL_DECODE_ONLY")
    manager.capture(Decoder(config).create)
    pool = _state.state.pools._pools[manager.pool]
    assert len(pool.keyed(None)) == 2
    manager.graphs.clear()
    assert len(pool.keyed(None)) == 0
    close_unused()
    assert not pool.graphs.closed, "vLLM captures into it again"
    manager.capture(Decoder(config).create)
    assert len(pool.keyed(None)) == 2 and list(_state.state.pools._pools.values()) == [pool]


def test_breakable_graphs_break_where_vllm_marked_it(monkeypatch):
    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: True)
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda tensor: tensor)
    lengths: list[int] = []

    @breakable_cudagraph.eager_break_during_capture
    def attend(x, out):
        lengths.append(len(x))
        out.copy_(x * 2)

    def model(x, inputs_embeds=None):
        x = x + 1
        out = torch.empty_like(x)
        attend(x, out)
        return out - 3

    config = host.config([2, 4], "FULL_AND_PIECEWISE")
    buffer = torch.zeros(4, 4)
    wrapper = v1.BreakableCUDAGraphWrapper(model, config)
    plain = [BatchDescriptor(4), BatchDescriptor(2)]
    capture_all(config, wrapper, buffer, PIECEWISE, plain)
    capture_all(config, wrapper, buffer, FULL, [BatchDescriptor(2, 2, True)])
    assert len(wrapper.entries) == 3
    lengths.clear()
    for mode, kind in [
        (PIECEWISE, plain[0]),
        (FULL, BatchDescriptor(2, 2, True)),
        (PIECEWISE, plain[1]),
    ]:
        buffer.normal_()
        with step(config, mode, kind):
            # Left out where vLLM captures.
            found = wrapper(buffer[: kind.num_tokens], inputs_embeds=None)
        assert torch.equal(found, (buffer[: kind.num_tokens] + 1) * 2 - 3)
    assert lengths == [4, 2]
    real, other = wrapper.graph_pool, current_platform.graph_pool_handle()
    wrapper.clear_graphs()
    wrapper.graph_pool = other
    assert not wrapper.entries and wrapper.graph_pool is other is not real


class Vision:
    """A model with an encoder, as far as vLLM's manager asks."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4)
        self.calls = 0

    def prepare_encoder_cudagraph_capture_inputs(self, budget, items, frames, device, dtype, *_):
        return SimpleNamespace(values={"pixels": torch.zeros(budget, 4)})

    def encoder_cudagraph_forward(self, values, path="default"):
        self.calls += 1
        return values["pixels"] @ self.weight


def test_encoder_graphs_are_graphrts_until_the_manager_clears_them():
    manager = object.__new__(encoder.EncoderCudaGraphManager)
    manager.__dict__.update(
        model=Vision(), token_budgets=[2, 4], max_batch_size=2, max_frames_per_batch=0,
        device=torch.device("cpu"), dtype=torch.float32, budget_graphs={}, path_token_budgets={},
        config=SimpleNamespace(enable_dual_path_graph=False), graph_pool=None, _capture_axes=(),
    )  # fmt: skip
    manager.graph_pool = current_platform.graph_pool_handle()
    with v1.graph_capture(device=manager.device):
        for budget in (4, 2):
            manager._capture_budget_graph(budget)
    graphs = manager._get_graph_set("default")
    calls = manager.model.calls
    for budget in (2, 4, 2):
        made = graphs[budget]
        made.input_buffers["pixels"].normal_()
        made.graph.replay()
        expected = made.input_buffers["pixels"] @ manager.model.weight
        assert torch.equal(made.output_buffer, expected)
    assert manager.model.calls == calls
    dead, pool = weakref.ref(made.graph), _state.state.pools._pools[manager.graph_pool]
    del made
    manager.clear()
    close_unused()
    assert dead() is None and pool.graphs.closed


def test_uninstalled_vllm_has_its_own_again():
    uninstall()
    assert v1.CUDAGraphWrapper is TheirWrapper and v2.torch is torch
    assert current_platform.get_static_graph_wrapper_cls() == (
        "vllm.compilation.cuda_graph.CUDAGraphWrapper"
    )
