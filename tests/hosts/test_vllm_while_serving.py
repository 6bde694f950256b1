"""Captures beside vLLM's steps, in loops that call as vLLM's runners do."""
# ruff: noqa: F811 (fixtures are arguments)

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_on_cpu as host
from test_vllm import told, untried, vllm  # noqa: F401  (fixtures)

import graphrt.hosts.vllm
from graphrt import GraphMode
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.vllm import _state, while_serving

pytestmark = [
    pytest.mark.skipif(
        host.IS_INSTALLED, reason="the published runners need a GPU: benchmarks/gpu/vllm_host"
    ),
    pytest.mark.parametrize("vllm", ["0.24.0"], indirect=True),
    pytest.mark.usefixtures("untried"),
]
SIZES = [1, 2, 4, 8, 16]
WIDTH = 4
LIVE_BLOCKS = 17
NULL = 0


class Model(torch.nn.Module):
    """A layer with pages, written by slot, and one with a state, written by block."""

    def __init__(self, contexts: Any) -> None:
        super().__init__()
        self.contexts = contexts
        self.embed = torch.randn(64, WIDTH)
        self.pages = torch.zeros(LIVE_BLOCKS, WIDTH)
        self.state = torch.zeros(LIVE_BLOCKS)
        self.calls = 0
        self.breaks: list[Exception] = []
        """What runs that capture raise."""

    def forward(self, input_ids, positions=None):
        self.calls += 1
        metadata = self.contexts._forward_context.attn_metadata["layer"]
        if self.breaks and _state.state.later._capturing:
            raise self.breaks.pop()
        hidden = self.embed[input_ids]
        # Rows of slot -1 go to the null block.
        self.pages.index_copy_(0, metadata.slots.clamp_min(NULL), hidden)
        self.state.index_add_(0, metadata.table[:, 0], torch.ones(len(input_ids)))
        return hidden * 2


class Clock:
    """The time as the captures see it; each reading takes a millisecond."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


def metadata(table: torch.Tensor, slots: torch.Tensor) -> Any:
    return {"layer": SimpleNamespace(table=table, slots=slots)}


class V1:
    """An engine of the V1 runner."""

    def __init__(self, vllm: Any, mode: str) -> None:
        self.model = Model(vllm.contexts)
        self.config = host.config(SIZES, mode)
        self.runner = vllm.v1.GPUModelRunner(self.config, self.model, metadata)
        self.dispatcher = self.runner.cudagraph_dispatcher

    def captured(self) -> list[tuple[str, int]]:
        whole = self.runner.model
        return sorted(
            (wrapper.runtime_mode.name, key.num_tokens)
            for wrapper in (whole, whole.runnable)
            for key in wrapper.entries
        )

    def step(self, ids: list[int], *, is_decode: bool = True) -> torch.Tensor:
        self.runner.block_table.cpu[:, 0] = torch.arange(1, max(SIZES) + 1)
        self.runner.execute_model(
            SimpleNamespace(token_ids=ids, total_num_scheduled_tokens=len(ids), is_decode=is_decode)
        )
        return self.runner.hidden_states

    def blocks(self) -> Any:
        return self.runner.block_table.cpu


class V2:
    """An engine of the V2 runner."""

    def __init__(self, vllm: Any, mode: str) -> None:
        self.model = Model(vllm.contexts)
        self.config = host.config(SIZES, mode)
        self.runner = vllm.v2_runner.GPUModelRunner(self.config, self.model, self.prepare)
        self.dispatcher = self.runner.cudagraph_manager
        self.slots = torch.zeros(max(SIZES), dtype=torch.int64)

    def prepare(self, tokens: int, padded: int, *, for_capture: bool) -> Any:
        table = self.blocks()
        self.slots.fill_(-1)
        if not for_capture:
            table.zero_()
            table[:tokens, 0] = torch.arange(1, tokens + 1)
            self.slots[:tokens] = table[:tokens, 0]
        return metadata(table[:padded], self.slots[:padded])

    def captured(self) -> list[tuple[str, int]]:
        return sorted((each.cg_mode.name, each.num_tokens) for each in self.dispatcher.graphs)

    def step(self, ids: list[int]) -> torch.Tensor:
        self.runner.execute_model(
            SimpleNamespace(token_ids=ids, total_num_scheduled_tokens=len(ids))
        )
        return self.runner.execute_model_state.hidden_states[: len(ids)].clone()

    def blocks(self) -> torch.Tensor:
        return self.runner.block_tables.input_block_tables[0]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(while_serving, "time", made)
    return made


@pytest.fixture
def free(monkeypatch):
    """The free bytes of the device, of which each capture takes one MiB."""
    made = SimpleNamespace(bytes=1 << 40)

    def read() -> int:
        made.bytes -= 1 << 20
        return made.bytes

    monkeypatch.setattr(while_serving, "_free_bytes", read)
    return made


@pytest.fixture(params=[V1, V2])
def start(request, vllm, monkeypatch, clock, free):
    """Starts an engine of vLLM 0.24 that captures while it serves."""
    monkeypatch.setenv("GRAPHRT_VLLM_CAPTURE", "while-serving")
    graphrt.hosts.vllm.uninstall()
    graphrt.hosts.vllm.install()

    def make(mode: str = "FULL_DECODE_ONLY", share: float = 0.1, **config: Any) -> Any:
        _state.state.later.share = share
        engine = request.param(vllm, mode)
        vars(engine.config).update(config)
        engine.worker = sys.modules["vllm.v1.worker.gpu_worker"].Worker()
        engine.worker.model_runner = engine.runner
        # vLLM's V2 runner takes steps of its own before it is ready.
        engine.worker.warm_up = lambda: engine.step([1, 2, 3])
        engine.runner.profile_cudagraph_memory()
        engine.worker.compile_or_warm_up_model()
        engine.at_start = engine.captured()
        return engine

    yield make
    _state.state.later = while_serving.WhileServing(_state.state.pools)


def ids_of(count: int) -> list[int]:
    return [7 * at % 64 for at in range(1, count + 1)]


def step_is_right(engine: Any, count: int, **kind: Any) -> bool:
    ids = ids_of(count)
    return torch.equal(engine.step(ids, **kind), engine.model.embed[torch.tensor(ids)] * 2)


def served(size: int) -> int:
    """The steps of the graph of a size."""
    steps = graphrt.hosts.vllm.report().steps
    return sum(count for (_, batch), count in steps.items() if batch.num_tokens == size)


def full(*sizes: int) -> list[tuple[str, int]]:
    return [("FULL", size) for size in sizes]


def test_vllm_is_ready_with_the_largest_and_the_smallest_graph(start, told):
    engine = start()
    assert engine.at_start == full(1, 16)
    missing = graphrt.hosts.vllm.report().to_dict()["missing"]
    assert sorted(each["tokens"] for each in missing) == [2, 4, 8]
    assert any("ready with 2 of 5 graphs" in line for line in told.messages)


def test_one_graph_is_captured_before_a_step_in_its_share_of_time(start, clock, told):
    engine = start()
    sizes = []
    for _ in range(400):
        before = clock.now
        assert step_is_right(engine, 3)
        sizes.append((before, len(engine.captured())))
    counts = [count for _, count in sizes]
    assert counts[0] == 3 and counts[-1] == 5
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(counts))
    ends = [at for (at, a), (_, b) in itertools.pairwise(sizes) if b > a]
    # A capture reads the clock twice: it takes a millisecond, and nine follow.
    assert ends[1] - ends[0] >= 9e-3
    assert "dispatch" not in vars(engine.dispatcher)
    assert any("captures beside steps are over, with 5 of 5" in line for line in told.messages)
    assert not graphrt.hosts.vllm.report().to_dict()["missing"]


def test_a_graph_that_batches_miss_is_captured_before_others(start, monkeypatch):
    engine = start(share=0.001)
    assert step_is_right(engine, 16)
    first = engine.captured()
    for count in (2, 2, 1, 2):
        assert step_is_right(engine, count)
    assert engine.captured() == first
    _state.state.later.share = 1.0
    _state.state.later._next_s = 0.0
    assert step_is_right(engine, 16)
    assert set(engine.captured()) - set(first) == {("FULL", 2)}


def test_a_batch_whose_graph_is_missing_runs_by_the_next_larger_one(start, clock):
    engine = start()
    _state.state.later._next_s = clock.now + 1e6
    calls = engine.model.calls
    for count in (2, 3, 7, 6, 5, 16, 1):
        assert step_is_right(engine, count)
    assert engine.model.calls == calls and engine.captured() == full(1, 16)
    _state.state.later._next_s, _state.state.later.share = 0.0, 1.0
    while ("FULL", 8) not in engine.captured():
        assert step_is_right(engine, 7)
    steps = served(16), served(8)
    _state.state.later._next_s = float("inf")
    assert step_is_right(engine, 3)
    assert (served(16), served(8)) == (steps[0], steps[1] + 1)


def test_captures_change_no_page_or_state_of_a_live_request(start, monkeypatch):
    engine = start(share=1.0)
    _state.state.later._next_s = float("inf")
    step_is_right(engine, 16)
    _state.state.later._next_s = 0.0
    capture, seen = _state.state.later._capture_next, []

    def checked(runner: Any) -> None:
        before = engine.model.pages[1:].clone(), engine.model.state[1:].clone()
        null, table = engine.model.state[NULL].clone(), engine.blocks().clone()
        capture(runner)
        seen.append(engine.model.state[NULL] > null)
        assert torch.equal(engine.model.pages[1:], before[0])
        assert torch.equal(engine.model.state[1:], before[1])
        assert isinstance(engine, V2) or torch.equal(engine.blocks(), table)

    monkeypatch.setattr(_state.state.later, "_capture_next", checked)
    for _ in range(20):
        assert step_is_right(engine, 16)
    assert seen == [True] * 3 and len(engine.captured()) == 5


def test_captures_are_allowed_within_a_capture_alone(start):
    engine = start(share=1.0)
    monitor = sys.modules["vllm.compilation.monitor"]
    monitor.cudagraph_capturing_enabled = False
    for _ in range(100):
        assert step_is_right(engine, 3)
        assert monitor.cudagraph_capturing_enabled is False
    assert len(engine.captured()) == 5


def test_pieces_and_full_graphs_are_captured_beside_steps(start, monkeypatch):
    engine = start("FULL_AND_PIECEWISE", share=1.0)
    if isinstance(engine, V2):
        pytest.skip("the V2 runner of the stand-in decodes alone")
    pieces = [("PIECEWISE", size) for size in SIZES]
    assert engine.at_start == [*full(1, 16), pieces[0], pieces[-1]]
    for at in range(8):
        assert step_is_right(engine, at + 3, is_decode=bool(at % 2))
    assert engine.captured() == [*full(*SIZES), *pieces]


def test_a_capture_that_fails_is_tried_again_and_then_given_up(start, monkeypatch, told):
    engine = start(share=1.0)
    # Another thread synchronizes: one capture fails once, then all that are left.
    engine.model.breaks = [RuntimeError("operation not permitted when stream is capturing")]
    for _ in range(3):
        assert step_is_right(engine, 3)
    assert len(engine.captured()) == 4 and not graphrt.hosts.vllm.report().dropped
    engine.model.breaks = [RuntimeError("operation not permitted")] * 9
    for _ in range(9):
        assert step_is_right(engine, 3)
    report = graphrt.hosts.vllm.report()
    (dropped,) = report.dropped
    assert dropped.mode is GraphMode.FULL and "not permitted" in dropped.reason
    assert len(engine.captured()) == 4
    calls = engine.model.calls
    # Batches of the size that was given up run by a larger graph.
    assert step_is_right(engine, dropped.descriptor.num_tokens) and engine.model.calls == calls
    assert any("over, with 4 of 5 graphs" in line for line in told.messages)


def test_captures_stop_where_one_runs_out_of_memory(start, told):
    engine = start(share=1.0)
    engine.model.breaks = [torch.OutOfMemoryError("CUDA out of memory")]
    for _ in range(5):
        assert step_is_right(engine, 3)
    assert engine.captured() == full(1, 16)
    (line,) = [line for line in told.messages if "no more graphs" in line]
    assert "CUDA out of memory" in line and len(graphrt.hosts.vllm.report().dropped) == 3


def test_the_device_is_waited_for_before_and_after_a_capture(start, monkeypatch):
    engine, order = start(share=1.0), []
    platform = SimpleNamespace(synchronize=lambda: order.append("wait"))
    monkeypatch.setattr(while_serving, "device_platform", lambda: platform)
    (plan,) = _state.state.later._plans
    capture = plan.capture
    monkeypatch.setattr(plan, "capture", lambda graph: (order.append("capture"), capture(graph)))
    assert step_is_right(engine, 3)
    assert order == ["wait", "capture", "wait"]


def test_captures_of_the_v2_runner_take_no_stream_of_their_own(start, vllm, monkeypatch):
    engine = start(share=1.0)
    if isinstance(engine, V1):
        pytest.skip("the V1 runner opens no session for one graph")
    monkeypatch.setattr(vllm.v2, "graph_capture", None)
    for _ in range(5):
        assert step_is_right(engine, 3)
    assert len(engine.captured()) == 5


@pytest.mark.parametrize("limit", ["estimate", "free"])
def test_captures_stop_where_vllm_left_no_room_for_more(start, free, told, limit):
    engine = start(share=1.0)
    if limit == "estimate":
        _state.state.later._estimate = 2 << 20
    else:
        free.bytes = while_serving._FREE_BYTES + (5 << 20)
    for _ in range(20):
        assert step_is_right(engine, 3)
    assert 2 < len(engine.captured()) < 5
    (line,) = [line for line in told.messages if "no more graphs" in line]
    assert ("vLLM's estimate" in line) is (limit == "estimate")
    report = graphrt.hosts.vllm.report()
    assert len(report.dropped) == 5 - len(engine.captured())
    # Also a batch whose graph will not come runs by one that is there, or eagerly.
    assert step_is_right(engine, 2) and step_is_right(engine, 8)


def test_vllms_estimate_counts_only_if_its_cache_was_sized_by_it(vllm, monkeypatch):
    later = while_serving.WhileServing(_state.state.pools)
    profile = later.around_profile(lambda runner: 7)
    assert profile(None) == 7 and later._estimate == 7
    later._estimate = None
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False)
    assert profile(None) == 7 and later._estimate is None


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("tensor parallelism", {"tensor_parallel_size": 2}),
        ("data parallelism", {"data_parallel_size": 2}),
        ("expert parallelism", {"enable_expert_parallel": True}),
        ("micro-batches", {"use_ubatching": True}),
    ],
)
def test_what_is_not_served_is_named_and_captures_all_at_the_start(start, told, reason, config):
    parallel = vars(host.config(SIZES, "FULL").parallel_config) | config
    engine = start(parallel_config=SimpleNamespace(**parallel))
    assert engine.at_start == full(*SIZES)
    assert any(
        "all graphs are captured at the start" in line and reason in line for line in told.messages
    )
    assert step_is_right(engine, 3) and not _state.state.later._goes_on


def test_adapters_of_live_requests_keep_their_slots_in_captures(start, monkeypatch):
    engine = start(share=1.0, lora_config=object())
    assert engine.at_start == full(1, 16)
    manager = engine.runner.lora_manager = sys.modules[
        "vllm.lora.worker_manager"
    ].LRUCacheWorkerLoRAManager()
    adapters, forward, dummies = manager._adapter_manager, engine.model.forward, []

    def with_adapters(*args: Any, **kwargs: Any) -> Any:
        if _state.state.later._capturing:
            # As vLLM's dummy runs: an adapter of a number of its own in each slot.
            for number in (1, 2):
                manager.add_dummy_lora(number, rank=8)
            manager.set_active_adapters({1, 2}, (1, 2, 0))
            dummies.append(adapters.slots)
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", with_adapters)
    for _ in range(6):
        manager.set_active_adapters({7, 2}, (7, 2, 2))
        assert adapters.lora_index_to_id == [2, 7] and adapters.slots == [1, 0, 0]
        assert step_is_right(engine, 3)
    assert len(engine.captured()) == 5 and dummies
    assert all(each == [0, 1, -1] for each in dummies)
    assert "set_active_adapters" not in vars(manager) and "add_dummy_lora" not in vars(manager)


def test_destroyed_graphs_are_not_captured_beside_steps(start):
    engine = start()
    calls = engine.model.calls
    _state.state.weights._destroy()
    for count in (3, 16):
        assert step_is_right(engine, count)
    assert engine.captured() == [] and engine.model.calls == calls + 2
    assert not graphrt.hosts.vllm.report().to_dict()["missing"]


def test_dummy_steps_of_the_v2_runner_capture_nothing(start):
    engine = start()
    if isinstance(engine, V1):
        pytest.skip("the V1 runner's dummy runs are no steps")
    for _ in range(20):
        step = SimpleNamespace(token_ids=[1], total_num_scheduled_tokens=1)
        engine.runner.execute_model(step, dummy_run=True)
    assert engine.captured() == full(1, 16)


def test_a_graph_in_quarantine_stands_in_for_no_other(start, clock):
    engine = start()
    if isinstance(engine, V1):
        pytest.skip("wrappers of the V1 runner know their quarantine")
    _state.state.later._next_s = clock.now + 1e6
    manager = engine.dispatcher
    (largest,) = [graph for desc, graph in manager.graphs.items() if desc.num_tokens == 16]
    largest._trials = SimpleNamespace(has_failed=True)
    calls = engine.model.calls
    assert step_is_right(engine, 3) and engine.model.calls == calls + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRAPHRT_VLLM_CAPTURE", "lazy"),
        ("GRAPHRT_VLLM_CAPTURE_SHARE", "0"),
        ("GRAPHRT_VLLM_CAPTURE_SHARE", "1.5"),
        ("GRAPHRT_VLLM_CAPTURE_SHARE", "ten"),
    ],
)
def test_other_values_of_the_variables_are_refused_at_the_start(vllm, monkeypatch, name, value):
    monkeypatch.setenv("GRAPHRT_VLLM_CAPTURE", "while-serving")
    monkeypatch.setenv(name, value)
    graphrt.hosts.vllm.uninstall()
    with pytest.raises(UnsupportedHostError, match=value):
        graphrt.hosts.vllm.install()


def test_another_version_of_vllm_captures_all_at_the_start(vllm, monkeypatch, told):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.0")
    monkeypatch.setenv("GRAPHRT_VLLM_CAPTURE", "while-serving")
    graphrt.hosts.vllm.uninstall()
    graphrt.hosts.vllm.install()
    assert any("at the start, as this is vLLM 0.33.0" in line for line in told.messages)
    assert not hasattr(vllm.v1.GPUModelRunner.execute_model, "__wrapped__")
