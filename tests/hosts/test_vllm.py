"""vLLM's graphs, served by graphrt on a CPU: of the published modules, or of a stand-in."""

from __future__ import annotations

import dataclasses
import faulthandler
import inspect
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standin_vllm
import torch
import vllm_on_cpu as host

import graphrt
import graphrt.hosts.vllm
from graphrt.hosts.table import Table
from graphrt.hosts.vllm import _state, breakable, install, platform_type, uninstall, wrapper
from graphrt.observe import load_report

# The published one stands for itself.
VERSIONS = ("installed",) if host.IS_INSTALLED else ("0.24.0", "0.33.0")


@pytest.fixture(params=VERSIONS)
def vllm(request, monkeypatch):
    """vLLM's modules with graphrt in them."""
    monkeypatch.setenv("GRAPHRT_VLLM", "1")
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    monkeypatch.delenv("GRAPHRT_MODE", raising=False)
    if request.param != "installed":
        for name, module in standin_vllm.modules(request.param).items():
            monkeypatch.setitem(sys.modules, name, module)
    for cached in (wrapper.wrapper_type, breakable.breakable_type, platform_type):
        cached.cache_clear()
    engine = host.load()
    for module in (engine.v1, engine.v2):
        monkeypatch.setattr(module, "is_global_first_rank", lambda: False, raising=False)
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(engine.v2, "get_pp_group", lambda: rank, raising=False)
    engine.Own = engine.wrappers.CUDAGraphWrapper
    engine.mode = engine.config.CUDAGraphMode
    engine.Key = engine.contexts.BatchDescriptor
    engine.counter = engine.counting.compilation_counter
    engine.platform = engine.platforms.current_platform
    install()
    yield engine
    uninstall()
    engine.Own._all_instances.clear()
    _state.state.pools.clear()
    _state.state.weights = type(_state.state.weights)()
    _state.state.eager.counts.clear()
    _state.state.eager.reasons.clear()
    engine.platform.__class__._global_graph_pool = None


@pytest.fixture
def untried(monkeypatch):
    """Also where the suite runs under GRAPHRT_CHECK: a trial of a FULL graph replays it once more,
    and calls its forward twice."""
    monkeypatch.delenv("GRAPHRT_CHECK", raising=False)


class Forward:
    """Counts its calls; writes nothing."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4)
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.of(x)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) + 1


def step(vllm: Any, config: Any, mode: Any, key: Any, tokens: int | None = None, attn: Any = None):
    """vLLM's forward context of one step."""
    return vllm.contexts.set_forward_context(
        attn, config, num_tokens=tokens or key.num_tokens, cudagraph_runtime_mode=mode,
        batch_descriptor=key,
    )  # fmt: skip


def capture_all(vllm, config, wrapper, buffer, mode, keys) -> None:
    with vllm.v1.graph_capture(device=torch.device("cpu")):
        for key in keys:
            with step(vllm, config, mode, key):
                wrapper(buffer[: key.num_tokens])


def close_unused(vllm) -> None:
    """What profiling ends with, and captures begin with."""
    _state.state.pools.close_unused(vllm.platform.get_global_graph_pool())


@pytest.fixture
def told(caplog):
    """What vLLM's log says of graphrt."""
    logger = logging.getLogger("vllm.graphrt")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield caplog
    logger.propagate = True
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


# Wrappers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PIECEWISE", "FULL"])
@pytest.mark.usefixtures("untried")
def test_a_wrapper_captures_in_a_session_and_replays_each_descriptor(vllm, name):
    config, forward, buffer = host.config([2, 4], name), Forward(), torch.zeros(4, 4)
    mode = vllm.mode[name]
    wrapper = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=mode)
    keys = [
        vllm.Key(size, has_lora=bool(loras), num_active_loras=loras)
        for size in (4, 2)
        for loras in (0, 1, 2)
    ]
    before = vllm.counter.num_cudagraph_captured
    capture_all(vllm, config, wrapper, buffer, mode, keys)
    assert forward.calls == len(keys) and set(wrapper.concrete_cudagraph_entries) == set(keys)
    assert vllm.counter.num_cudagraph_captured == before + len(keys)
    for key in keys * 2:
        buffer.normal_()
        with step(vllm, config, mode, key):
            output = wrapper(buffer[: key.num_tokens])
        assert torch.equal(output, forward.of(buffer[: key.num_tokens]))
    assert forward.calls == len(keys)


def last_line(told) -> str:
    """What the log says at the end of a worker."""
    executor = sys.modules["vllm.v1.executor.multiproc_executor"]
    reader, writer = multiprocessing.Pipe(duplex=False)
    shutdown = threading.Event()
    thread = executor.WorkerProc(rank=3).monitor_death_pipe(reader, shutdown)
    writer.close()
    thread.join(10)
    faulthandler.cancel_dump_traceback_later()  # it would end this process
    assert shutdown.is_set()
    assert executor.WorkerProc(0).monitor_death_pipe(None, shutdown) is None
    return [line for line in told.messages if "rank 3 ends" in line][-1]


@pytest.mark.skipif(host.IS_INSTALLED, reason="the published worker watches its parent process")
@pytest.mark.parametrize("name", ["PIECEWISE", "FULL"])
def test_a_worker_that_ends_names_its_rank_and_the_graph_it_was_in(vllm, told, name):
    config, buffer = host.config([2, 4], name), torch.zeros(4, 4)
    mode, keys = vllm.mode[name], [vllm.Key(4), vllm.Key(2)]
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=mode)
    with vllm.v1.graph_capture(device=torch.device("cpu")):
        with step(vllm, config, mode, keys[0]):
            wrapper(buffer)
        assert last_line(told).endswith(f"captures the {name} graph for 4 tokens, 0 steps so far")
        with step(vllm, config, mode, keys[1]):
            wrapper(buffer[:2])
    for key in (*keys, keys[0]):
        with step(vllm, config, mode, key):
            wrapper(buffer[: key.num_tokens])
    assert last_line(told).endswith(f"it was last in the {name} graph for 4 tokens, 2 steps so far")


@pytest.mark.skipif(host.IS_INSTALLED, reason="the published worker watches its parent process")
def test_a_worker_that_ends_names_the_full_graph_of_the_v2_runner(vllm, told, monkeypatch):
    monkeypatch.setattr(_state.state.table, "latest", None)
    monkeypatch.setattr(_state.state.table, "_rows", {})
    assert last_line(told).endswith("it has no graph yet")
    decoder = Decoder(vllm, [2, 4], "FULL_DECODE_ONLY")
    before: list[str] = []
    model = decoder.model.of

    def of(x):
        before.append(last_line(told))
        return model(x)

    decoder.model.of = of
    decoder.manager.capture(decoder.create)
    decoder.model.of = model
    # Each size runs twice, eagerly and in its capture.
    assert [line.partition("; ")[2] for line in before] == [
        "it has no graph yet",
        "it captures the FULL graph for 4 tokens, 0 steps so far",
        "it captures the FULL graph for 4 tokens, 0 steps so far",
        "it captures the FULL graph for 2 tokens, 0 steps so far",
    ]
    for live in (2, 4, 3):
        decoder.manager.run_fullgraph(decoder.manager.dispatch(live, live, 1, 0))
    assert last_line(told).endswith("it was last in the FULL graph for 4 tokens, 2 steps so far")


@pytest.mark.skipif(host.IS_INSTALLED, reason="the published worker watches its parent process")
def test_a_worker_that_waits_in_a_collective_ends_though_nobody_kills_it(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.vllm_ending", str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1, told
    line = "rank 0 ends, in 2 s at the latest; it was last in the FULL graph for 2 tokens, 2 steps"
    assert line in told
    assert "Timeout" in told and "in all_reduce" in told  # where its threads were


@pytest.mark.parametrize("name", ["PIECEWISE", "FULL"])
def test_a_trial_of_wrapper_graphs_finds_a_changed_number(vllm, name, monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "first")
    config, buffer, key = host.config([2], name), torch.zeros(2, 4), vllm.Key(2)
    scale = SimpleNamespace(value=1.0)

    def partition(arguments):
        (x,) = arguments
        arguments.clear()
        return (x * scale.value,)

    mode = vllm.mode[name]
    wrapper = vllm.v1.CUDAGraphWrapper(partition, config, runtime_mode=mode)

    def model(x):
        return wrapper([x])[0]

    capture_all(vllm, config, model, buffer, mode, [key])

    def is_right():
        buffer.normal_()
        with step(vllm, config, mode, key):
            return torch.equal(model(buffer), buffer * scale.value)

    assert [is_right() for _ in range(3)] == [True] * 3
    scale.value = 3.0
    with pytest.warns(graphrt.errors.GraphQuarantinedWarning, match=r"scale\.value = 1\.0"):
        # On Python up to 3.11 a few calls late.
        right = [is_right() for _ in range(20)]
    assert all(right[-5:])


def test_an_inductor_partition_that_clears_its_argument_list_is_replayed(vllm):
    config, buffer, key = host.config([2], "PIECEWISE"), torch.zeros(2, 4), vllm.Key(2)

    def partition(arguments):
        (x,) = arguments
        arguments.clear()
        return (x + 1,)

    wrapper = vllm.v1.CUDAGraphWrapper(partition, config, runtime_mode=vllm.mode.PIECEWISE)

    def model(x):
        return wrapper([x])[0]

    capture_all(vllm, config, model, buffer, vllm.mode.PIECEWISE, [key])
    for _ in range(2):
        buffer.normal_()
        with step(vllm, config, vllm.mode.PIECEWISE, key):
            assert torch.equal(model(buffer), buffer + 1)


def test_all_pieces_of_a_forward_count_as_a_single_step(vllm):
    config, buffer = host.config([2], "PIECEWISE"), torch.zeros(2, 4)
    pieces = [
        vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.PIECEWISE)
        for _ in range(3)
    ]

    def model(x):
        for piece in pieces:
            x = piece(x)
        return x

    key = vllm.Key(2)
    capture_all(vllm, config, model, buffer, vllm.mode.PIECEWISE, [key])
    for count in (1, 2):
        before = _state.state.pools.steps
        for _ in range(count):
            buffer.normal_()
            with step(vllm, config, vllm.mode.PIECEWISE, key):
                output = model(buffer)
            expected = buffer
            for piece in pieces:
                expected = piece.runnable.of(expected)
            assert torch.equal(output, expected)
        assert _state.state.pools.steps == before + count


def test_an_uncaptured_batch_runs_eagerly_and_the_log_counts_the_misses(vllm, told):
    config, forward, buffer = host.config([2], "PIECEWISE"), Forward(), torch.zeros(4, 4)
    wrapper = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=vllm.mode.PIECEWISE)
    capture_all(vllm, config, wrapper, buffer, vllm.mode.PIECEWISE, [vllm.Key(2)])
    for _ in range(11):
        with step(vllm, config, vllm.mode.PIECEWISE, vllm.Key(3)):
            wrapper(buffer[:3])
    assert (forward.calls, len(wrapper.entries)) == (12, 1)
    assert "graphrt captured 1 PIECEWISE graphs for 1 batches" in told.text
    missed = [line for line in told.messages if "there is no PIECEWISE graph for [3 tok" in line]
    assert len(missed) == 2 and missed[1].endswith("10 times so far")


def test_the_log_says_why_vllm_dispatched_no_graph_for_a_batch(vllm, told):
    config, buffer = host.config([2], "PIECEWISE"), torch.zeros(4, 4)
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.PIECEWISE)
    with step(vllm, config, vllm.mode.NONE, None, tokens=9, attn={}):
        wrapper(buffer)
    assert "eagerly" not in told.text, "nothing is captured yet"
    capture_all(vllm, config, wrapper, buffer, vllm.mode.PIECEWISE, [vllm.Key(2)])
    for tokens in (9, 1):
        with step(vllm, config, vllm.mode.NONE, None, tokens=tokens, attn={}):
            wrapper(buffer)
    assert "(9 tokens) ran eagerly, as it has more tokens than the largest graph, 2" in told.text
    assert "(1 tokens) ran eagerly, as vLLM found no graph for a batch of its kind" in told.text


def test_a_wrapper_calls_its_runnable_in_steps_of_another_graph_mode(vllm):
    config, forward, buffer = host.config([2], "FULL"), Forward(), torch.zeros(2, 4)
    inner = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=vllm.mode.PIECEWISE)
    outer = vllm.v1.CUDAGraphWrapper(inner, config, runtime_mode=vllm.mode.FULL)
    capture_all(vllm, config, outer, buffer, vllm.mode.FULL, [vllm.Key(2)])
    assert len(outer.entries) == 1 and not inner.entries
    inner(buffer)
    with step(vllm, config, vllm.mode.NONE, vllm.Key(2)):
        outer(buffer)
    assert forward.calls == 3


def test_every_import_name_of_vllms_wrapper_gives_the_wrapper_of_graphrt(vllm):
    config = host.config([1], "FULL")
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    assert isinstance(wrapper, vllm.Own) and isinstance(wrapper, graphrt.GraphWrapper)
    path = vllm.platform.get_static_graph_wrapper_cls()
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is type(wrapper) is vllm.wrappers.CUDAGraphWrapper
    assert wrapper in vllm.Own._all_instances
    assert isinstance(wrapper.unwrap(), Forward) and wrapper.weight is wrapper.runnable.weight
    assert wrapper.cudagraph_wrapper is wrapper


def test_assigning_an_empty_dict_of_entries_drops_all_graphs(vllm):
    config, buffer = host.config([2], "FULL"), torch.zeros(2, 4)
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    for _ in range(2):
        capture_all(vllm, config, wrapper, buffer, vllm.mode.FULL, [vllm.Key(2)])
        assert list(wrapper.concrete_cudagraph_entries) == [vllm.Key(2)]
        wrapper.concrete_cudagraph_entries = {}
        assert not wrapper.entries


def test_host_numbers_are_baked_in_only_with_a_lora_config(vllm):
    config = host.config([1], "FULL")
    plain = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    config.lora_config = SimpleNamespace(max_loras=2)
    adapted = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    assert plain.options.host_arguments == "refuse" and adapted.options.host_arguments == "bake"


def test_a_graph_pool_offloaded_by_sleep_mode_is_refused(vllm):
    config = host.config([1], "FULL")
    config.use_cumem_cudagraph_pool = True
    with pytest.raises(graphrt.errors.UnsupportedHostError, match="sleep_mode_offload_cudagraph"):
        vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)


# Pools --------------------------------------------------------------------------------------------


def test_memory_profiling_captures_in_a_throwaway_pool_that_is_closed_afterwards(vllm):
    config, buffer, keys = host.config([2], "PIECEWISE"), torch.zeros(2, 4), [vllm.Key(2)]
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.PIECEWISE)
    real, profiling = wrapper.graph_pool, vllm.platform.graph_pool_handle()
    wrapper.graph_pool = profiling
    capture_all(vllm, config, wrapper, buffer, vllm.mode.PIECEWISE, keys)
    throwaway = wrapper.pool
    vllm.v1.CUDAGraphWrapper.clear_all_graphs()
    wrapper.graph_pool = real
    close_unused(vllm)
    assert throwaway.closed and not wrapper.pool.closed and not wrapper.entries
    capture_all(vllm, config, wrapper, buffer, vllm.mode.PIECEWISE, keys)
    assert len(wrapper.entries) == 1 and wrapper.graph_pool is real


def test_assigning_another_graph_pool_drops_graphs_and_captures_in_the_new_pool(vllm):
    config, buffer, keys = host.config([2], "FULL"), torch.zeros(2, 4), [vllm.Key(2)]
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    capture_all(vllm, config, wrapper, buffer, vllm.mode.FULL, keys)
    before = wrapper.pool
    wrapper.graph_pool = vllm.platform.graph_pool_handle()
    assert not wrapper.entries and wrapper.pool is not before
    capture_all(vllm, config, wrapper, buffer, vllm.mode.FULL, keys)
    assert wrapper.pool.captures == 1 and wrapper.sealed


def test_a_wrapper_made_during_the_capture_session_captures_in_the_session(vllm):
    config, buffer = host.config([2], "FULL"), torch.zeros(2, 4)
    with vllm.v1.graph_capture(device=torch.device("cpu")):
        wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
        with step(vllm, config, vllm.mode.FULL, vllm.Key(2)):
            wrapper(buffer)
    assert wrapper.sealed and len(wrapper.entries) == 1


def test_memory_profiling_of_both_model_runners_closes_unused_pools(vllm, monkeypatch):
    uninstall()
    called: list[str] = []
    runners = (vllm.v1.GPUModelRunner, vllm.v2_runner.GPUModelRunner)
    for runner in runners:
        monkeypatch.setattr(runner, "profile_cudagraph_memory", lambda self: called.append("own"))
    monkeypatch.setattr(_state.state.pools, "close_unused", lambda keep: called.append("closed"))
    install()
    for runner in runners:
        runner.profile_cudagraph_memory(None)
    assert called == ["own", "closed"] * 2
    uninstall()


# New weights --------------------------------------------------------------------------------------


class Weighted(torch.nn.Module):
    """A model of vLLM's; its backend of attention has computed something of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4), requires_grad=False)
        self.absorbed = torch.ones(4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.of(x)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.absorbed


def update_in_place(model: Weighted) -> None:
    model.weight.copy_(torch.randn(4, 4))
    model.absorbed.copy_(torch.randn(4))


def replace_weight(model: Weighted) -> None:
    model.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)


def replace_data(model: Weighted) -> None:
    model.weight.data = torch.randn(4, 4)


def absorb_anew(model: Weighted) -> None:
    model.absorbed = torch.randn(4)


LOADS = {update_in_place: 0, replace_weight: 1, replace_data: 1, absorb_anew: 1}
"""A load, and how many tensors it moves."""


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("loaded", ["target", "draft"])
@pytest.mark.parametrize("version", ["v1", "v2_runner"])
@pytest.mark.usefixtures("untried")
def test_reloaded_weights_outdate_graphs_unless_written_in_place(
    vllm, monkeypatch, told, version, loaded, load
):
    uninstall()
    runner_type = getattr(vllm, version).GPUModelRunner
    target, draft = Weighted(), Weighted()
    config, buffer = host.config([2, 4], "FULL"), torch.zeros(4, 4)
    keys = [vllm.Key(4), vllm.Key(2)]

    def capture_model(runner):
        capture_all(vllm, config, runner.wrapper, buffer, vllm.mode.FULL, keys)
        if runner.decoder.manager.needs:
            runner.decoder.manager.capture(runner.decoder.create)
        return 0

    def reload_weights(runner):
        load(target if loaded == "target" else draft)

    monkeypatch.setattr(runner_type, "capture_model", capture_model)
    monkeypatch.setattr(runner_type, "reload_weights", reload_weights)
    monkeypatch.setattr(runner_type, "get_model", lambda runner: target)
    install()
    runner = object.__new__(runner_type)
    runner.wrapper = vllm.v1.CUDAGraphWrapper(target, config, runtime_mode=vllm.mode.FULL)
    runner.decoder = Decoder(vllm, [1, 2, 4], "FULL_DECODE_ONLY", draft)
    runner.drafter = runner.speculator = SimpleNamespace(model=draft)
    manager = runner.decoder.manager
    manager.needs = True
    runner.capture_model()

    def steps(*, by_graphs: bool) -> None:
        calls = target.calls
        for key in keys * 2:
            buffer.normal_()
            runner.decoder.x.normal_()
            with step(vllm, config, vllm.mode.FULL, key):
                output = runner.wrapper(buffer[: key.num_tokens])
            assert torch.equal(output, target.of(buffer[: key.num_tokens]))
            found = manager.dispatch(key.num_tokens, key.num_tokens, 1, 0)
            assert (found.cg_mode is vllm.mode.FULL) is by_graphs
            if by_graphs:
                manager.run_fullgraph(found)
                expected = draft.of(runner.decoder.x[: key.num_tokens])
                assert torch.equal(runner.decoder.out[: key.num_tokens], expected)
        assert target.calls - calls == (0 if by_graphs else 4)

    steps(by_graphs=True)
    runner.reload_weights()
    moved = LOADS[load]
    assert graphrt.hosts.vllm.weights_changed() == 0
    steps(by_graphs=not moved)
    assert (len(manager.graphs), len(runner.wrapper.entries)) == ((0, 0) if moved else (3, 2))
    line = next(
        each.getMessage() for each in told.records if "reload_weights" in each.msg % each.args
    )
    assert ("replaced 1 tensors" in line and "capture_model()" in line) is bool(moved)
    assert ("Weighted.weight" in line or "Weighted.absorbed" in line) is bool(moved)
    manager.needs = bool(moved)
    runner.capture_model()
    steps(by_graphs=True)
    uninstall()


def test_a_host_that_writes_weights_itself_asks_whether_they_have_moved(vllm):
    model = Weighted()
    weights = _state.state.weights
    weights.captured(lambda runner: 0)(SimpleNamespace(get_model=lambda: model))
    update_in_place(model)
    assert graphrt.hosts.vllm.weights_changed() == 0
    replace_weight(model)
    absorb_anew(model)
    assert graphrt.hosts.vllm.weights_changed() == 2


def test_encoder_graphs_are_destroyed_with_those_of_the_model_that_has_new_weights(vllm):
    model = Weighted()
    manager = encoder_manager(vllm, [2, 4])
    _state.state.weights.captured(lambda runner: 0)(SimpleNamespace(get_model=lambda: model))
    assert len(manager._get_graph_set("default")) == 2
    replace_weight(model)
    graphrt.hosts.vllm.weights_changed()
    assert not manager._get_graph_set("default")


@pytest.mark.parametrize("version", ["v1", "v2_runner"])
def test_weights_are_compared_after_each_way_that_vllm_loads_them(vllm, monkeypatch, version):
    uninstall()
    worker = sys.modules["vllm.v1.worker.gpu_worker"].Worker
    runner = getattr(vllm, version).GPUModelRunner
    called: list[str] = []
    monkeypatch.setattr(runner, "reload_weights", lambda self: called.append("load"))
    monkeypatch.setattr(worker, "finish_weight_update", lambda self: called.append("transfer"))
    install()
    monkeypatch.setattr(_state.state.weights, "changed", called.append)
    runner.reload_weights(None)
    worker.finish_weight_update(None)
    assert called[::2] == ["load", "transfer"] and len(called) == 4
    uninstall()


# FULL on the V2 runner ----------------------------------------------------------------------------


class Decoder:
    """What the V2 runner hands its manager: a forward over static buffers, made for a batch."""

    def __init__(self, vllm, sizes, mode, model=None) -> None:
        self.vllm, self.config, self.model = vllm, host.config(sizes, mode), model or Forward()
        self.manager = vllm.v2.CudaGraphManager(
            self.config, torch.device("cpu"), vllm.mode[mode], 1
        )
        self.x, self.out = torch.zeros(8, 4), torch.zeros(8, 4)
        self.made: list[tuple[int, bool]] = []
        # vLLM 0.24 wants the state of attention beside the forward.
        self.pairs = sys.modules["vllm"].__version__.startswith("0.24.")

    def create(self, desc, warmup):
        self.made.append((desc.num_tokens, warmup))

        def forward(mode):
            key = self.vllm.Key(desc.num_tokens) if mode is self.vllm.mode.PIECEWISE else None
            with step(self.vllm, self.config, mode, key, desc.num_tokens):
                self.out[: desc.num_tokens].copy_(self.model(self.x[: desc.num_tokens]))

        return (forward, None) if self.pairs else forward


def test_the_v2_model_runner_replays_full_graphs_of_graphrt(vllm):
    decoder = Decoder(vllm, [1, 2, 4], "FULL_DECODE_ONLY")
    manager, before = decoder.manager, vllm.counter.num_cudagraph_captured
    manager.capture(decoder.create)
    assert vllm.counter.num_cudagraph_captured == before + 3
    assert [type(graph).__name__ for graph in manager.graphs.values()] == ["FullGraph"] * 3
    assert decoder.made == [(4, True), (4, False), (2, True), (2, False), (1, True), (1, False)]
    calls = decoder.model.calls
    for live in (1, 2, 3, 4, 3, 1):
        decoder.x.normal_()
        desc = manager.dispatch(live, live, 1, 0)
        assert desc.cg_mode is vllm.mode.FULL
        manager.run_fullgraph(desc)
        assert torch.equal(decoder.out[:live], decoder.model.of(decoder.x[:live]))
    assert decoder.model.calls == calls


@pytest.mark.usefixtures("untried")
def test_a_trial_finds_a_changed_number_in_full_graphs_of_the_v2_runner(vllm, monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "first")

    class Scaled(Forward):
        scale = 1.0

        def __call__(self, x):
            return super().__call__(x) * self.scale

    decoder = Decoder(vllm, [2], "FULL_DECODE_ONLY", Scaled())
    manager, model = decoder.manager, decoder.model
    manager.capture(decoder.create)

    def is_right():
        decoder.x.normal_()
        manager.run_fullgraph(manager.dispatch(2, 2, 1, 0))
        return torch.equal(decoder.out[:2], model.of(decoder.x[:2]) * model.scale)

    assert [is_right() for _ in range(3)] == [True] * 3
    calls = model.calls
    assert is_right() and model.calls == calls
    model.scale = 3.0
    with pytest.warns(graphrt.errors.GraphQuarantinedWarning, match="scale"):
        # On Python up to 3.11 some steps late.
        right = [is_right() for _ in range(400)]
    assert all(right[-5:])


def test_full_and_piecewise_graphs_share_a_capture_loop_and_a_pool(vllm):
    config = host.config([2, 4], "FULL_AND_PIECEWISE")
    piece = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.PIECEWISE)
    decoder = Decoder(vllm, [2, 4], "FULL_AND_PIECEWISE", piece)
    decoder.manager.capture(decoder.create)
    assert sorted(each.num_tokens for each in piece.entries) == [2, 4]
    assert len(decoder.manager.graphs) == 2 and piece.sealed
    assert list(_state.state.pools._pools) == [decoder.manager.pool]


def test_graphs_cleared_by_the_manager_are_destroyed_and_can_be_recaptured(vllm):
    decoder = Decoder(vllm, [1, 2], "FULL_DECODE_ONLY")
    manager = decoder.manager
    manager.capture(decoder.create)
    pool = _state.state.pools._pools[manager.pool]
    assert len(pool.keyed(None)) == 2
    manager.graphs.clear()
    assert len(pool.keyed(None)) == 0
    close_unused(vllm)
    manager.capture(decoder.create)
    assert len(pool.keyed(None)) == 2 and list(_state.state.pools._pools.values()) == [pool]


def test_a_graph_context_that_captures_no_forward_raises(vllm):
    decoder = Decoder(vllm, [1], "FULL_DECODE_ONLY")
    graph = decoder_graph(decoder)
    with (
        pytest.raises(graphrt.errors.CaptureError, match="captured no forward"),
        vllm.v2.torch.cuda.graph(graph, decoder.manager.pool),
    ):
        pass


def decoder_graph(decoder) -> Any:
    """A graph as vLLM's loop would have it, which nothing is captured into."""
    made: list[Any] = []

    def create(desc, warmup):
        made.append(decoder.vllm.v2.torch.cuda.CUDAGraph())
        return decoder.create(desc, warmup)

    decoder.manager.capture(create)
    with pytest.raises(graphrt.errors.CaptureError, match="nothing was captured into"):
        made[-1].replay()
    return made[-1]


@pytest.mark.usefixtures("untried")
def test_the_weight_offloader_is_synced_before_and_joined_inside_a_capture(vllm, monkeypatch):
    called: list[str] = []
    offloader = SimpleNamespace(
        sync_prev_onload=lambda: called.append("sync"),
        join_after_forward=lambda: called.append("join"),
    )
    module = sys.modules["vllm.model_executor.offloader.base"]
    monkeypatch.setattr(module, "get_offloader", lambda: offloader)
    config, buffer = host.config([2], "FULL"), torch.zeros(2, 4)
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.FULL)
    capture_all(vllm, config, wrapper, buffer, vllm.mode.FULL, [vllm.Key(2)])
    assert called[:2] == ["sync", "join"]
    called.clear()
    with step(vllm, config, vllm.mode.FULL, vllm.Key(2)):
        wrapper(buffer)
    assert called == ["sync"]
    decoder = Decoder(vllm, [1], "FULL_DECODE_ONLY")
    called.clear()
    decoder.manager.capture(decoder.create)
    assert "join" in called


# Breakable and encoder graphs ---------------------------------------------------------------------


@pytest.fixture
def marked(vllm, monkeypatch):
    """vLLM's mark of functions that break."""
    monkeypatch.setattr(
        vllm.breakable, "is_breakable_cudagraph_enabled", lambda: True, raising=False
    )
    # An operator of CUDA's.
    monkeypatch.setattr(vllm.breakable, "weak_ref_tensor", lambda tensor: tensor, raising=False)
    return vllm.breakable.eager_break_during_capture


@pytest.mark.usefixtures("untried")
def test_breakable_graphs_run_vllms_marked_functions_eagerly_between_pieces(vllm, marked):
    lengths: list[int] = []

    @marked
    def attend(x, out):
        lengths.append(len(x))
        out.copy_(x * 2)

    def model(x, inputs_embeds=None):
        x = x + 1
        out = torch.empty_like(x)
        attend(x, out)
        return out - 3

    config, buffer = host.config([2, 4], "FULL_AND_PIECEWISE"), torch.zeros(4, 4)
    wrapper = vllm.v1.BreakableCUDAGraphWrapper(model, config)
    mixed, uniform = [vllm.Key(4), vllm.Key(2)], vllm.Key(2, 2, True)
    capture_all(vllm, config, wrapper, buffer, vllm.mode.PIECEWISE, mixed)
    capture_all(vllm, config, wrapper, buffer, vllm.mode.FULL, [uniform])
    assert set(wrapper.entries) == {*mixed, uniform}
    lengths.clear()
    for mode, key in [("PIECEWISE", mixed[0]), ("FULL", uniform), ("PIECEWISE", mixed[1])]:
        buffer.normal_()
        with step(vllm, config, vllm.mode[mode], key):
            # Left out where vLLM captures.
            output = wrapper(buffer[: key.num_tokens], inputs_embeds=None)
        assert torch.equal(output, (buffer[: key.num_tokens] + 1) * 2 - 3)
    assert lengths == [4, 2], "a FULL graph has no breaks"
    real, other = wrapper.graph_pool, vllm.platform.graph_pool_handle()
    wrapper.clear_graphs()
    wrapper.graph_pool = other
    assert not wrapper.entries and wrapper.graph_pool is other is not real


def test_breakable_graphs_of_equal_shape_are_told_apart_by_key_fn(vllm):
    config, buffer = host.config([2], "PIECEWISE"), torch.zeros(2, 4)
    theirs = vllm.breakable.BreakableCUDAGraphWrapper.__mro__[2]
    if "key_fn" not in inspect.signature(theirs).parameters:
        pytest.skip("this version of vLLM has no such key")
    wrapper = vllm.v1.BreakableCUDAGraphWrapper(
        lambda x, scale: x * scale, config, vllm.mode.PIECEWISE, lambda x, scale: scale
    )

    def run(x):
        return wrapper(x, scale=2), wrapper(x, scale=3)

    capture_all(vllm, config, run, buffer, vllm.mode.PIECEWISE, [vllm.Key(2)])
    assert set(wrapper.entries) == {(vllm.Key(2), 2), (vllm.Key(2), 3)}
    for scale in (2, 3):
        buffer.normal_()
        with step(vllm, config, vllm.mode.PIECEWISE, vllm.Key(2)):
            assert torch.equal(wrapper(buffer, scale=scale), buffer * scale)
    with step(vllm, config, vllm.mode.FULL, vllm.Key(2)):
        wrapper(buffer, scale=5)
    assert len(wrapper.entries) == 2, "another mode is another wrapper's"


class DecoderReplay:
    """As DeepSeek-V4.1 in vLLM 0.33: a break of the model's graph runs the last layers on fewer
    rows, in a graph of its own, with a forward context from `create_forward_context`."""

    def __init__(self, vllm, marked, sizes) -> None:
        self.vllm, self.contexts, self.sizes = vllm, vllm.contexts, sizes
        self.config = host.config(sizes, "PIECEWISE")
        self.config.compilation_config.static_forward_context = {}
        self.weight = torch.randn(4, 4)
        self.layer_calls = 0
        self.buffer, self.out, self.rows = torch.zeros(8, 4), torch.zeros(8, 4), None
        self.wrapper = vllm.v1.BreakableCUDAGraphWrapper(self.layers, self.config)
        self.replay_layers = marked(self._replay_layers)
        self.model = vllm.v1.BreakableCUDAGraphWrapper(self.forward, self.config)

    def layers(self, x):
        self.layer_calls += 1
        hidden = torch.relu(x @ self.weight)
        return (hidden @ self.weight.T, hidden.sum(-1, keepdim=True))

    def created(self, tokens, mode):
        return self.contexts.create_forward_context(
            {}, self.config, cudagraph_runtime_mode=mode,
            batch_descriptor=self.vllm.Key(num_tokens=tokens),
        )  # fmt: skip

    def capture(self):
        manager = self.vllm.v2.CudaGraphManager(
            self.config, torch.device("cpu"), self.vllm.mode.FULL_AND_PIECEWISE, 1
        )
        pairs = sys.modules["vllm"].__version__.startswith("0.24.")

        def create(desc, warmup):
            context = self.created(desc.num_tokens, self.vllm.mode.NONE)

            def forward(mode):
                asked = dataclasses.replace(context, cudagraph_runtime_mode=mode)
                with self.contexts.override_forward_context(asked):
                    self.wrapper(self.buffer[: desc.num_tokens])

            return (forward, None) if pairs else forward

        manager.capture(create)

    def _replay_layers(self, x):
        if self.rows is None:
            hidden, sums = self.layers(x)
        else:
            tokens = min(size for size in self.sizes if size >= len(self.rows))
            context = self.created(tokens, self.vllm.mode.PIECEWISE)
            with self.contexts.override_forward_context(context):
                torch.index_select(x, 0, self.rows, out=self.buffer[: len(self.rows)])
                hidden, sums = self.wrapper(self.buffer[:tokens])
            filled = torch.zeros(len(x), 4), torch.zeros(len(x), 1)
            for result, part in zip(filled, (hidden, sums), strict=True):
                result[self.rows] = part[: len(self.rows)]
            hidden, sums = filled
        return self.out[: len(x)].copy_(hidden + sums)

    def forward(self, x):
        kept = x * 3
        return self.replay_layers(x + 1) + kept

    def expected(self, x):
        # On as many rows as the graph has: a product of other shapes rounds in another way.
        tokens = min(size for size in self.sizes if size >= len(self.rows))
        padded = torch.zeros(tokens, 4)
        padded[: len(self.rows)] = (x + 1)[self.rows]
        hidden, sums = self.layers(padded)
        result = torch.zeros_like(x)
        result[self.rows] = (hidden + sums)[: len(self.rows)]
        return result + x * 3


def test_contexts_of_create_forward_context_capture_and_replay_graphs_in_a_break(vllm, marked):
    replay = DecoderReplay(vllm, marked, [2, 4])
    x, mode = torch.zeros(8, 4), vllm.mode.PIECEWISE
    replay.capture()
    capture_all(vllm, replay.config, replay.model, x, mode, [vllm.Key(8)])
    assert {key.num_tokens for key in replay.wrapper.entries} == {2, 4}
    for rows in ([1, 5], [0, 2, 7], [3], [1, 5]):
        x.normal_()
        replay.rows = torch.tensor(rows)
        calls = replay.layer_calls
        with step(vllm, replay.config, mode, vllm.Key(8)):
            output = replay.model(x).clone()
        assert replay.layer_calls == calls, "the last layers ran in their graph"
        assert torch.equal(output, replay.expected(x))
    assert len({id(each) for each in _state.state.pools.graph_pools}) == 2
    assert set(graphrt.hosts.vllm.report().reasons) == {graphrt.Reason.HIT}
    replay.wrapper.graph_pool = vllm.platform.graph_pool_handle()
    assert not replay.wrapper.entries and len(replay.model.entries) == 1


@pytest.mark.parametrize("name", ["PIECEWISE", "FULL"])
@pytest.mark.usefixtures("untried")
def test_a_copied_context_of_another_mode_runs_in_that_mode(vllm, name):
    config, forward, buffer = host.config([2], name), Forward(), torch.zeros(2, 4)
    mode, key = vllm.mode[name], vllm.Key(2)
    wrapper = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=mode)
    capture_all(vllm, config, wrapper, buffer, mode, [key])
    with step(vllm, config, mode, key):
        wrapper(buffer)
        assert forward.calls == 1
        current = vllm.contexts._forward_context
        copied = dataclasses.replace(current, cudagraph_runtime_mode=vllm.mode.NONE)
        with vllm.contexts.override_forward_context(copied):
            wrapper(buffer)
        assert forward.calls == 2
        current.cudagraph_runtime_mode = vllm.mode.NONE
        wrapper(buffer)
        assert forward.calls == 3


def test_a_descriptor_that_changes_within_a_step_is_of_the_same_step(vllm):
    """As Gemma 4's fast prefill: later pieces run on fewer tokens, and the first are called again
    in no other step."""
    config, mode = host.config([2, 4], "PIECEWISE"), vllm.mode.PIECEWISE
    first, second, last = (
        vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=mode) for _ in range(3)
    )
    buffer, few = torch.zeros(4, 4), torch.zeros(4, 4)

    def model(x, tokens):
        context = vllm.contexts._forward_context
        hidden, whole = first(x), context.batch_descriptor
        few[:tokens].copy_(hidden[:tokens])
        context.batch_descriptor = dataclasses.replace(whole, num_tokens=tokens)
        part = second(few[:tokens])
        context.batch_descriptor = whole
        return last(hidden), part

    with vllm.v1.graph_capture(device=torch.device("cpu")):
        for size in (4, 2):
            with step(vllm, config, mode, vllm.Key(size)):
                model(buffer[:size], size)
    before = _state.state.pools.steps
    for tokens in (2, 4, 2):
        buffer.normal_()
        with step(vllm, config, mode, vllm.Key(4)):
            whole, part = model(buffer, tokens)
        hidden = first.runnable.of(buffer)
        assert torch.equal(whole, last.runnable.of(hidden))
        assert torch.equal(part, second.runnable.of(hidden[:tokens])) and len(part) == tokens
    assert _state.state.pools.steps == before + 3
    assert [each.runnable.calls for each in (first, second, last)] == [2, 2, 2]
    counts = {key[1].num_tokens: steps for key, steps in graphrt.hosts.vllm.report().steps.items()}
    assert counts == {4: 3, 2: 2}


def test_a_context_without_a_batch_descriptor_is_counted_and_told(vllm, told):
    config, forward, buffer = host.config([2], "PIECEWISE"), Forward(), torch.zeros(2, 4)
    mode = vllm.mode.PIECEWISE
    wrapper = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=mode)
    capture_all(vllm, config, wrapper, buffer, mode, [vllm.Key(2)])
    for _ in range(2):
        with step(vllm, config, mode, vllm.Key(2)):
            vllm.contexts._forward_context.batch_descriptor = None
            wrapper(buffer)
    reasons = graphrt.hosts.vllm.report().reasons
    assert reasons[graphrt.Reason.NO_CONTEXT] == 2 and forward.calls == 3
    (line,) = [line for line in told.messages if "has no batch descriptor" in line]
    assert "asks for a PIECEWISE graph" in line


class Vision:
    """A model with an encoder, as far as vLLM's manager asks."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4)
        self.calls = 0

    def prepare_encoder_cudagraph_capture_inputs(self, budget, *_):
        return SimpleNamespace(values={"pixels": torch.zeros(budget, 4)})

    def encoder_cudagraph_forward(self, values, path="default"):
        self.calls += 1
        return self.of(values["pixels"])

    def of(self, pixels):
        return pixels @ self.weight


def encoder_manager(vllm, budgets, axes=()) -> Any:
    """vLLM's manager of encoder graphs, which has captured them by its own loop."""
    manager = object.__new__(vllm.encoder.EncoderCudaGraphManager)
    manager.__dict__.update(
        model=Vision(), token_budgets=budgets, max_batch_size=2, max_frames_per_batch=0,
        device=torch.device("cpu"), dtype=torch.float32, budget_graphs={},
        path_token_budgets={"default": budgets}, _capture_axes=axes,
    )  # fmt: skip
    with vllm.v1.graph_capture(device=manager.device):
        manager.capture(vllm.platform.graph_pool_handle())
    return manager


def test_encoder_graphs_of_capture_axes_are_told_apart(vllm):
    if sys.modules["vllm"].__version__.startswith("0.24"):
        pytest.skip("vLLM 0.24 has no capture axes")
    manager = encoder_manager(vllm, [2, 4], axes=(("still", "film"),))
    graphs = manager._get_graph_set("default")
    assert set(graphs) == {(size, (axis,)) for size in (2, 4) for axis in ("still", "film")}
    for made in graphs.values():
        made.input_buffers["pixels"].normal_()
        made.graph.replay()
        assert torch.equal(made.output_buffer, manager.model.of(made.input_buffers["pixels"]))
    assert len(graphrt.hosts.vllm.report().graphs) == len(graphs)


def test_encoder_graphs_are_captured_by_graphrt_and_freed_when_the_manager_clears(vllm):
    manager = encoder_manager(vllm, [2, 4])
    graphs, calls = manager._get_graph_set("default"), manager.model.calls
    for budget in (2, 4, 2):
        made = graphs[budget]
        made.input_buffers["pixels"].normal_()
        made.graph.replay()
        expected = manager.model.of(made.input_buffers["pixels"])
        assert torch.equal(made.output_buffer, expected)
    assert manager.model.calls == calls
    dead, pool = weakref.ref(made.graph), _state.state.pools._pools[manager.graph_pool]
    del made
    manager.clear()
    close_unused(vllm)
    assert dead() is None and pool.graphs.closed


# The report ---------------------------------------------------------------------------------------


def test_the_report_lists_piecewise_graphs_per_batch_with_steps_seconds_and_bytes(vllm):
    config, buffer = host.config([2, 4], "PIECEWISE"), torch.zeros(4, 4)
    mode = vllm.mode.PIECEWISE
    pieces = [vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=mode) for _ in range(3)]

    def model(x):
        for piece in pieces:
            x = piece(x)
        return x

    capture_all(vllm, config, model, buffer, mode, [vllm.Key(4), vllm.Key(2)])
    for tokens, steps in ((2, 5), (4, 1)):
        for _ in range(steps):
            with step(vllm, config, mode, vllm.Key(tokens)):
                model(buffer[:tokens])
    for tokens in (9, 9, 1):
        with step(vllm, config, vllm.mode.NONE, None, tokens=tokens, attn={}):
            model(buffer)
    with step(vllm, config, mode, vllm.Key(3)):
        model(buffer[:3])
    report = graphrt.hosts.vllm.report()
    assert [str(graph.descriptor) for graph in report.graphs] == ["4 tokens", "2 tokens"]
    assert {str(key[1]): count for key, count in report.steps.items()} == {
        "4 tokens": 1,
        "2 tokens": 5,
    }
    reasons = {reason.name: count for reason, count in report.reasons.items()}
    # Each of the three pieces had no graph of 3 tokens.
    assert reasons == {"HIT": 6, "TOO_LARGE": 2, "NO_GRAPH": 1, "MISSING_GRAPH": 3}
    assert report.mode is graphrt.GraphMode.PIECEWISE and report.device == "cpu"
    assert all(graph.capture_s > 0 for graph in report.graphs)
    assert sum(graph.pool_bytes or 0 for graph in report.graphs) == report.pool_bytes > 0
    text = str(report)
    assert "PIECEWISE [2 tokens]      5" in text and "Padding" not in text


def test_the_report_lists_graphs_in_the_order_of_the_last_captures():
    table, pool, mode = Table(), graphrt.GraphPool("cpu"), graphrt.GraphMode.FULL
    for sizes in ((2, 4), (4, 2)):
        table.begin()
        for size in sizes:
            table.captured(mode, graphrt.BatchDescriptor(size), pool)
    report = table.report(Counter(), [pool])
    assert [graph.descriptor.num_tokens for graph in report.graphs] == [4, 2]


def test_the_report_counts_full_graph_steps_of_the_v2_runner_beside_pieces(vllm):
    config = host.config([2, 4], "FULL_AND_PIECEWISE")
    piece = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=vllm.mode.PIECEWISE)
    decoder = Decoder(vllm, [2, 4], "FULL_AND_PIECEWISE", piece)
    decoder.manager.capture(decoder.create)
    for _ in range(3):
        decoder.manager.run_fullgraph(decoder.manager.dispatch(2, 2, 1, 0))
    report = graphrt.hosts.vllm.report()
    assert report.mode is graphrt.GraphMode.FULL_AND_PIECEWISE
    full = {
        key[1].num_tokens: count
        for key, count in report.steps.items()
        if key[0] is graphrt.GraphMode.FULL
    }
    assert full == {2: 3, 4: 0} and len(report.graphs) == 4


def test_the_report_counts_encoder_replays_by_token_budget(vllm):
    manager = encoder_manager(vllm, [4])
    for _ in range(2):
        manager._get_graph_set("default")[4].graph.replay()
    (count,) = graphrt.hosts.vllm.report().steps.values()
    assert count == 2


def test_recapturing_a_batch_resets_its_step_count_in_the_report(vllm):
    config, buffer, mode = host.config([2], "FULL"), torch.zeros(2, 4), vllm.mode.FULL
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=mode)
    for _ in range(2):
        wrapper.clear_graphs()
        capture_all(vllm, config, wrapper, buffer, mode, [vllm.Key(2)])
        with step(vllm, config, mode, vllm.Key(2)):
            wrapper(buffer)
    report = graphrt.hosts.vllm.report()
    assert len(report.graphs) == 1 and list(report.steps.values()) == [1]


def test_the_report_variable_makes_each_process_save_its_report(vllm, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHRT_VLLM_REPORT", str(tmp_path / "run.json"))
    config, buffer, mode = host.config([2], "FULL"), torch.zeros(2, 4), vllm.mode.FULL
    wrapper = vllm.v1.CUDAGraphWrapper(Forward(), config, runtime_mode=mode)
    capture_all(vllm, config, wrapper, buffer, mode, [vllm.Key(2)])
    (path,) = tmp_path.iterdir()
    assert path.name == f"run.{os.getpid()}.json"
    assert [graph["tokens"] for graph in load_report(path)["graphs"]] == [2]


# Putting it in and taking it out ------------------------------------------------------------------


def test_uninstall_restores_the_own_wrapper_classes_of_vllm(vllm):
    uninstall()
    assert vllm.v1.CUDAGraphWrapper is vllm.Own and vllm.v2.torch is torch
    path = vllm.platform.get_static_graph_wrapper_cls()
    assert path == "vllm.compilation.cuda_graph.CUDAGraphWrapper"


def test_mode_setting_without_graphs_turns_off_vllms_graphs_too(vllm, monkeypatch, told):
    assert vllm.platform.support_static_graph_mode()
    uninstall()
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    install()
    assert not vllm.platform.support_static_graph_mode()
    assert vllm.v1.CUDAGraphWrapper is vllm.Own and "without graphs" in told.text


def test_an_unknown_vllm_version_is_refused_by_number(vllm, monkeypatch):
    uninstall()
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.30.1")
    with pytest.raises(graphrt.errors.UnsupportedHostError, match=r"0\.30\.1"):
        install()


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("counting", "compilation_counter", SimpleNamespace(), "num_cudagraph_captured"),
        ("contexts", "_forward_context", None, "vllm.forward_context._forward_context"),
        ("v2", "CudaGraphManager", type("CudaGraphManager", (), {"capture": lambda self: 0}),
         "'create_forward_fn'"),
        ("breakable", "eager_break_during_capture", lambda fn: fn, "'add_eager'"),
    ],
)  # fmt: skip
def test_a_vllm_with_a_changed_internal_name_is_refused_at_install(
    vllm, monkeypatch, where, name, value, said
):
    uninstall()
    module = getattr(vllm, where)
    if value is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, value)
    with pytest.raises(graphrt.errors.UnsupportedHostError, match=said):
        install()
    assert vllm.v1.CUDAGraphWrapper is vllm.Own


def test_installing_on_another_vllm_platform_is_refused(vllm, monkeypatch):
    uninstall()
    monkeypatch.setattr(type(vllm.platform), "serves_graphrt", False)
    with pytest.raises(graphrt.errors.UnsupportedHostError, match="graphrt_vllm"):
        install()


def test_the_vllm_platform_plugin_is_offered_only_on_gpus_for_known_versions(vllm, monkeypatch):
    package, platforms = sys.modules["vllm"], vllm.platforms
    monkeypatch.setattr(platforms, "cuda_platform_plugin", lambda: "vllm.platforms.cuda.It")
    assert graphrt.hosts.vllm.platform() == "graphrt.hosts.vllm.GraphrtCudaPlatform"
    monkeypatch.setattr(package, "__version__", "0.24.2")
    assert graphrt.hosts.vllm.platform() is not None
    monkeypatch.setattr(package, "__version__", "0.25.0")
    assert graphrt.hosts.vllm.platform() is None
    monkeypatch.undo()
