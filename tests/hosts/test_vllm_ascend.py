"""Graphs of an engine that is built like vllm-ascend, served by graphrt: equal to eager."""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace

import protocol_engine as host
import pytest
import torch
from protocol_engine import Context, Decoder, Host, Key, Mode

from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.core.base.errors import (
    InvalidUpdateError,
    MissingCapabilityError,
    MissingUpdateError,
    TaskContractError,
)
from graphrt.hosts.vllm_ascend import (
    ACLGraphWrapper,
    Engine,
    GraphParams,
    install,
    install_if_asked,
    installing,
    missing,
    uninstall,
)
from graphrt.hosts.vllm_ascend.entries import Entries
from graphrt.hosts.vllm_ascend.installing import SWITCH
from graphrt.hosts.vllm_ascend.missing import refuse_waiting, refusing_first
from graphrt.hosts.vllm_ascend.operators import Issued, OperatorWatch, _check_lengths
from graphrt.hosts.vllm_ascend.params import not_served

pytestmark = pytest.mark.npu


class Runner:
    """A runner over one model: static inputs, a wrapper, and the update after the call."""

    def __init__(self, *, sizes=(4, 8), kind=None, engine=None, by_lora=False, **decoder):
        self.host = engine or Host()
        self.kind = kind or {}
        name = {(): "_graph_params", (1,): "_draft_graph_params"}.get(
            tuple([1] * len(self.kind)), "_draft_graph_prefill_params"
        )
        self.params = (
            {lora: self.host.params(sizes) for lora in (False, True)}
            if by_lora
            else self.host.params(sizes)
        )
        setattr(self.host, name, self.params)
        self.model = Decoder(self.host, **decoder)
        self.wrapper = self.host.wrapper_class(self.model, self.host.config, Mode.FULL)
        self.x = torch.zeros((max(sizes), host.HEADS, host.WIDTH), dtype=torch.bfloat16).to("npu")
        self.table = torch.zeros((max(sizes), host.PAGES), dtype=torch.int32).to("npu")
        self.stream = torch.npu.Stream()
        self.rng = random.Random(7)
        self.sizes = sizes

    def context(self, key: Key, mode: Mode = Mode.FULL, lens=None, table=None) -> Context:
        lens = [host.MOST_KV] * key.num_tokens if lens is None else lens
        table = self.table[: key.num_tokens] if table is None else table
        return host.contexts(self.model.layers, key, mode, lens, table, **self.kind)

    def capture(self, *keys: Key) -> None:
        for key in keys or [Key(size) for size in sorted(self.sizes, reverse=True)]:
            with self.host.step(self.context(key)):
                self.wrapper(self.x[: key.num_tokens])

    def fill(self, tokens: int) -> list[int]:
        seed = torch.Generator().manual_seed(self.rng.randint(0, 1 << 30))
        self.x[:tokens].copy_(torch.randn(self.x[:tokens].shape, generator=seed).bfloat16())
        self.table.copy_(torch.randint(0, host.BLOCKS, self.table.shape, generator=seed))
        return host.random_lens(self.rng, tokens)

    def eager(self, key: Key, lens, table=None) -> torch.Tensor:
        with self.host.step(self.context(key, Mode.NONE, lens, table)):
            return self.wrapper(self.x[: key.num_tokens]).cpu()

    def update(self, context: Context) -> None:
        tokens = context.batch_descriptor.num_tokens
        self.host.update_full_graph_params(self.model, self.stream, context, tokens)

    def replay(self, key: Key, lens, table=None, *, first: bool = False) -> torch.Tensor:
        context = self.context(key, Mode.FULL, lens, table)
        with self.host.step(context):
            if first:
                self.update(context)
            out = self.wrapper(self.x[: key.num_tokens])
            if not first:
                self.update(context)
        return out.clone()

    def differs(self, steps: int, *, first: bool = False, rebinds: bool = False) -> list[int]:
        wrong = []
        for step in range(steps):
            key = Key(self.rng.choice(self.sizes))
            lens = self.fill(key.num_tokens)
            table = self.table[: key.num_tokens].clone() if rebinds else None
            expected = self.eager(key, lens, table)
            output = self.replay(key, lens, table, first=first)
            del table
            if not torch.equal(output.cpu(), expected):
                wrong.append(step)
        return wrong


@pytest.fixture
def runner():
    made = Runner()
    made.capture()
    return made


def test_200_steps_with_changing_lengths_equal_eager(runner):
    assert runner.differs(200) == []
    assert runner.host.compilation_counter.num_cudagraph_captured == 2
    assert [key.num_tokens for key in runner.wrapper.concrete_aclgraph_entries] == [8, 4]


@pytest.mark.parametrize("first", [False, True], ids=["after the call", "before it"])
@pytest.mark.parametrize(
    "way",
    [{"asks_each_step": True}, {"gives_none": True}, {"layers": 1}],
    ids=["workspace asked each step", "no workspace", "one layer"],
)
def test_replays_with_every_kind_of_update_equal_eager(way, first):
    made = Runner(**way)
    made.capture()
    assert made.differs(25, first=first) == []


def test_block_tables_of_the_last_two_steps_are_kept_alive(runner):
    tables = []
    for _ in range(4):
        lens = runner.fill(8)
        tables.append(runner.table.clone())
        runner.replay(Key(8), lens, tables[-1])
    alive = [weakref.ref(table) for table in tables]
    tables.clear()
    # The last two steps': of the one before, the device may not be through yet.
    assert [each() is not None for each in alive] == [False, False, True, True]


@pytest.mark.parametrize(
    "kind",
    [{"is_draft_model": True}, {"is_draft_model": True, "is_draft_model_prefill": True}],
    ids=["draft", "draft-prefill"],
)
def test_a_draft_whose_block_table_is_another_tensor_each_step_equals_eager(kind):
    """The old tables are given back at once: what the graph reads is kept alive by its task."""
    target = Runner()
    draft = Runner(engine=target.host, kind=kind, seed=1)
    target.capture()
    draft.capture()
    for _ in range(15):
        assert target.differs(1) == []
        assert draft.differs(1, rebinds=True) == []
        torch.npu.empty_cache()


def test_two_graphs_of_equal_token_count_keep_separate_tasks_and_workspaces():
    made = Runner(sizes=(8,))
    plain, lora = Key(8), Key(8, lora=True)
    made.capture(plain, lora)
    for key in (plain, lora, lora, plain):
        lens = made.fill(8)
        expected = made.eager(key, lens)
        assert torch.equal(made.replay(key, lens).cpu(), expected)
    assert made.params.workspaces[8] is None


@pytest.mark.parametrize("first", [False, True], ids=["after the call", "before it"])
def test_graph_params_by_lora_are_read_by_the_getters(first):
    """As vllm-ascend 0.26 keeps them."""
    made = Runner(sizes=(4, 8), by_lora=True)
    keys = [Key(size, lora) for size in (8, 4) for lora in (False, True)]
    made.capture(*keys)
    for key in [*keys, *reversed(keys)]:
        lens = made.fill(key.num_tokens)
        expected = made.eager(key, lens)
        assert torch.equal(made.replay(key, lens, first=first).cpu(), expected)


def test_an_update_of_other_graph_params_than_the_graph_waits_for_raises_with_its_key(runner):
    runner.model.update = lambda *rest: None  # finds no sites there, and signals nobody
    lens, captured = runner.fill(8), runner.params
    runner.host._graph_params = runner.host.params(runner.sizes)
    with pytest.raises(MissingUpdateError, match="num_tokens=8"):
        runner.replay(Key(8), lens)
    torch.npu.synchronize()
    runner.host._graph_params = captured
    del runner.model.update
    assert runner.differs(6) == []


def test_an_eager_step_behind_a_graph_without_its_update_raises_with_its_key(runner):
    lens = runner.fill(8)
    with runner.host.step(runner.context(Key(8), Mode.FULL, lens)):
        runner.wrapper(runner.x)
    with pytest.raises(MissingUpdateError, match="num_tokens=8"):
        runner.eager(Key(8), lens)
    torch.npu.synchronize()
    assert runner.differs(6) == []


def test_a_capture_with_a_wait_outside_of_graph_params_raises_with_its_key(runner):
    def forward(x):
        event, stream = torch.npu.ExternalEvent(), torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        return runner.model(x) * 2

    wrapper = runner.host.wrapper_class(forward, runner.host.config, Mode.FULL)
    with (
        pytest.raises(TaskContractError, match="num_tokens=8") as raised,
        runner.host.step(runner.context(Key(8))),
    ):
        wrapper(runner.x)
    assert "4 waits" in str(raised.value) and "3 of them" in str(raised.value)
    torch.npu.synchronize()
    assert not wrapper.concrete_aclgraph_entries
    assert runner.differs(4) == []


def launched_alone(runner) -> torch.Tensor:
    with runner.host.step(runner.context(Key(8), Mode.FULL, runner.fill(8))):
        return runner.wrapper(runner.x)


def test_a_wait_for_the_device_behind_a_graph_without_its_update_raises_with_its_key(runner):
    waits = [refusing_first(wait) for wait in (torch.npu.synchronize, runner.stream.synchronize)]
    for wait in waits:
        wait()
        launched_alone(runner)
        with pytest.raises(MissingUpdateError, match="num_tokens=8"):
            wait()
        wait()
        assert runner.differs(2) == []


@pytest.mark.parametrize("late", ["an update", "a step"])
def test_a_graph_that_is_not_updated_in_time_ends_and_the_next_call_raises_with_its_key(
    runner, late, caplog
):
    waited, out = weakref.WeakKeyDictionary(), launched_alone(runner)
    for _ in range(2):
        missing._look(waited, 0.1, 0.2)
    time.sleep(0.3)  # as if the process was stopped: this counts for nothing
    assert not caplog.records
    watching = threading.Thread(target=lambda: missing._look(waited, 0.1, 0.2))
    watching.start()
    out.cpu()  # waits for the device, which no call of Python can end
    watching.join()
    assert "num_tokens=8" in caplog.text
    context = runner.context(Key(8), Mode.FULL, [1] * 8)
    late_calls = {
        "an update": lambda: runner.update(context),
        "a step": lambda: runner.replay(Key(4), [1] * 4),
    }
    with pytest.raises(MissingUpdateError, match="num_tokens=8"):
        late_calls[late]()
    torch.npu.synchronize()
    assert runner.differs(6) == []


def test_an_update_that_waits_on_the_host_itself_is_not_refused(runner):
    runner.model.before_update = lambda layer: refuse_waiting()
    assert runner.differs(4) == []


def test_the_updates_are_watched_by_one_thread_of_the_process(runner):
    Runner(engine=runner.host).capture()
    threads = [each for each in threading.enumerate() if each.name == "graphrt-updates"]
    assert len(threads) == 1


def test_an_update_that_omits_a_layer_raises_without_a_hang(runner):
    runner.model.only = 2
    lens = runner.fill(8)
    with pytest.raises(TaskContractError, match="1 without a signal"):
        runner.replay(Key(8), lens)
    torch.npu.synchronize()
    runner.model.only = None
    assert runner.differs(6) == []


@pytest.mark.parametrize("first", [False, True], ids=["after the call", "before it"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_after_an_update_raised_the_next_steps_equal_eager(runner, layer, first):
    def fail(at):
        if at == layer:
            raise ZeroDivisionError("in the host's own code")

    runner.model.before_update = fail
    lens = runner.fill(4)
    with pytest.raises(ZeroDivisionError):
        runner.replay(Key(4), lens, first=first)
    torch.npu.synchronize()
    runner.model.before_update = lambda at: None
    assert runner.differs(8, first=first) == []


def test_a_step_without_an_update_raises_at_the_next_step(runner):
    lens = runner.fill(8)
    with runner.host.step(runner.context(Key(8), Mode.FULL, lens)):
        runner.wrapper(runner.x)
    with pytest.raises(MissingUpdateError, match="got none"):
        runner.replay(Key(4), lens[:4])
    torch.npu.synchronize()
    assert runner.differs(6) == []


def test_an_update_whose_call_never_came_is_used_by_no_later_call(runner):
    for key in (Key(8), Key(4), Key(8)):
        context = runner.context(key, Mode.FULL, runner.fill(key.num_tokens))
        with runner.host.step(context):
            runner.update(context)
    assert runner.differs(6) == []
    assert runner.differs(6, first=True) == []


def test_an_update_before_the_call_of_another_step_does_not_start_this_step(runner):
    for _ in range(3):
        stale = runner.context(Key(8), Mode.FULL, runner.fill(8))
        with runner.host.step(stale):
            runner.update(stale)
        lens = runner.fill(8)
        out = runner.replay(Key(8), lens)
        assert torch.equal(out.cpu(), runner.eager(Key(8), lens))


def test_an_update_without_a_workspace_uses_the_captured_workspace():
    made = Runner(gives_none=True)
    made.capture()
    assert made.differs(3) == []
    for entry in made.wrapper._graphs.entries.values():
        for task in entry.tasks:
            site = task.handle.record
            assert site.issued.workspace.data_ptr() == site.before.workspace.data_ptr()


def test_the_host_keeps_no_scratch_tensor_alive_after_its_capture(monkeypatch):
    made, asked = Runner(), []
    scratch = host.scratch

    def noted():
        memory = scratch()
        asked.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(host, "scratch", noted)
    made.capture()
    assert [each() for each in asked] == [None, None]  # one for each size
    assert made.differs(4) == []


def test_a_negative_length_is_refused_and_later_steps_equal_eager(runner):
    lens = runner.fill(8)
    with pytest.raises(InvalidUpdateError, match="negative length"):
        runner.replay(Key(8), [-1, *lens[1:]])
    torch.npu.synchronize()
    assert runner.differs(6) == []


def test_signalling_a_task_event_outside_of_its_update_raises(runner):
    entry = runner.wrapper._graphs.entries[runner.wrapper._descriptors[Key(8)]]
    with pytest.raises(TaskContractError, match="outside of its update"):
        entry.tasks[0].handle.record.event.record(runner.stream)


def test_sleep_clears_all_graphs_and_wake_up_recaptures(runner):
    entry = runner.wrapper.concrete_aclgraph_entries[Key(8)]
    assert isinstance(entry.aclgraph, torch.npu.NPUGraph)
    assert entry.output.shape == runner.x.shape
    for wrapper in list(runner.host._acl_graph_wrappers):
        wrapper.concrete_aclgraph_entries.clear()
        wrapper.first_run_finished = False
    for column in (runner.params.events, runner.params.handles, runner.params.attn_params):
        for tokens in column:
            column[tokens] = []
    assert len(runner.wrapper._graphs.entries) == 0
    runner.capture()
    assert runner.differs(6) == []
    runner.wrapper.concrete_aclgraph_entries = {}
    assert len(runner.wrapper._graphs.entries) == 0


def test_of_two_wrappers_with_graphs_of_one_key_the_launched_one_is_updated():
    made = Runner(sizes=(8,))
    first = made.wrapper, made.model
    second = Decoder(made.host)
    both = [first, (made.host.wrapper_class(second, made.host.config, Mode.FULL), second)]
    for made.wrapper, made.model in both:
        made.capture()
    for made.wrapper, made.model in [*both, *reversed(both)]:
        assert made.differs(2) == []


def test_sites_whose_operators_are_not_seen_are_captured_and_updated(monkeypatch):
    """Those of a library that does not go through torch's dispatch."""
    monkeypatch.setattr(OperatorWatch, "take", lambda self: [])
    made = Runner(sizes=(8,))
    made.capture()
    assert made.differs(2) == []


def test_a_capture_leaves_the_wait_of_external_events_as_it_was():
    before = torch.npu.ExternalEvent.wait
    Runner(sizes=(8,)).capture()
    assert torch.npu.ExternalEvent.wait is before


@pytest.mark.parametrize("under_way", ["_capturing", "_updating"])
def test_workspaces_by_index_and_by_get_are_those_of_the_graph_under_way(monkeypatch, under_way):
    params = GraphParams({8: []}, {8: "the host's"}, {8: []}, {8: []})
    sites = SimpleNamespace(workspaces={8: "the graph's"})
    found = sites if under_way == "_capturing" else [SimpleNamespace(sites=sites)]
    monkeypatch.setattr(GraphParams, under_way, lambda *rest: found)
    assert params.workspaces[8] == params.workspaces.get(8) == "the graph's"
    assert params.workspaces.get(4) is params.workspaces[4] is None
    monkeypatch.undo()
    assert params.workspaces[8] == params.workspaces.get(8) == "the host's"


def test_the_graph_params_of_a_context_are_those_that_attention_asks_for():
    getters = ("get_graph_params", "get_draft_graph_params", "get_draft_graph_prefill_params")
    module = SimpleNamespace(**{name: lambda name=name: name for name in getters})
    main, draft, prefill = getters
    for said, expected in (
        ({}, main),
        ({"is_draft_model": False, "is_draft_model_prefill": True}, main),
        ({"is_draft_model": True}, draft),
        ({"is_draft_model": True, "is_draft_model_prefill": False}, draft),
        ({"is_draft_model": True, "is_draft_model_prefill": True}, prefill),
    ):
        assert Engine(module).params_of(SimpleNamespace(**said)) == expected


def test_a_graph_is_taken_out_only_while_no_step_is_under_way():
    busy, dropped = [True], []

    def check() -> None:
        if busy:
            raise RuntimeError("under way")

    entries = Entries(check, dropped.append)
    entries.add("key", None)
    with pytest.raises(KeyError):
        del entries["other"]
    with pytest.raises(RuntimeError, match="under way"):
        del entries["key"]
    assert list(entries) == ["key"] and dropped == []
    busy.clear()
    del entries["key"]
    assert list(entries) == [] and dropped == ["key"]


def test_a_wrapper_without_a_capture_runs_steps_of_other_modes():
    made = Runner()
    lens = made.fill(4)
    eager = made.eager(Key(4), lens)
    made.capture()
    assert torch.equal(made.replay(Key(4), lens).cpu(), eager)


@pytest.mark.parametrize(
    ("kind", "cache", "table"),
    [
        ("_npu_paged_attention", "key_cache", "block_table"),
        ("npu_multi_head_latent_attention", "ctkv", "block_tables"),
    ],
)
def test_lengths_of_atb_beyond_the_block_table_are_refused_and_others_taken(kind, cache, table):
    arguments = ("query", cache, table, "context_lens")
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
    function = SimpleNamespace(_schema=schema)
    blocks = torch.zeros((6, 128, 1, 64)), torch.zeros((2, 3), dtype=torch.int32)
    for longest in (1, 384):
        _check_lengths(Issued(function, (torch.zeros(2, 8), *blocks, [5, longest]), {}))
    with pytest.raises(InvalidUpdateError, match="beyond its block table") as caught:
        _check_lengths(Issued(function, (torch.zeros(2, 8), *blocks, [5, 385]), {}))
    assert "at most 384 each" in str(caught.value)


def test_a_capture_after_the_engine_ended_capturing_raises(runner):
    runner.host.capturing_enabled = False
    with (
        pytest.raises(RuntimeError, match="capturing is over"),
        runner.host.step(runner.context(Key(3))),
    ):
        runner.wrapper(runner.x[:3])
    assert runner.differs(2) == []


def test_the_wrapper_forwards_attributes_and_has_unwrap_and_runtime_mode(runner):
    runner.model.extra = "the runnable's"
    assert runner.wrapper.extra == "the runnable's"
    assert runner.wrapper.unwrap() is runner.model
    assert runner.wrapper.runtime_mode is Mode.FULL
    with pytest.raises(AttributeError, match="nothing_like_it not found"):
        _ = runner.wrapper.nothing_like_it
    runner.host.envs.VLLM_LOGGING_LEVEL = "DEBUG"
    debugged = runner.host.wrapper_class(runner.model, runner.host.config, Mode.FULL)
    with pytest.raises(AttributeError, match="nothing_like_it not exists in the runnable: Decoder"):
        _ = debugged.nothing_like_it
    with pytest.raises(AssertionError):
        runner.host.wrapper_class(runner.model, runner.host.config, Mode.NONE)


def test_a_piece_with_weak_outputs_gives_right_values_in_both_graph_modes():
    engine = Host()
    options = host.Options(weak_ref_output=True)
    piece = engine.wrapper_class(lambda x: x * 2 + 1, engine.config, Mode.PIECEWISE, options)
    x = torch.ones(4).to("npu")
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with engine.step(Context(Key(4), Mode.PIECEWISE, {})):
            out = piece(x)
        assert out.cpu().tolist() == [value * 2 + 1] * 4
    with engine.step(Context(Key(4), Mode.FULL, {})):
        assert piece(x).cpu().tolist() == [7.0] * 4


@pytest.mark.parametrize("weak", [True, False])
def test_only_a_weak_output_of_a_capturing_call_frees_its_memory(weak):
    engine = Host()
    options = host.Options(weak_ref_output=weak)
    piece = engine.wrapper_class(lambda x: x * 2, engine.config, Mode.PIECEWISE, options)
    x = torch.ones(1 << 20).to("npu")
    before = torch.npu.memory_allocated()
    with engine.step(Context(Key(4), Mode.PIECEWISE, {})):
        out = piece(x)
    assert out.shape == x.shape
    assert (torch.npu.memory_allocated() - before < x.nbytes) is weak


def test_an_update_first_device_refuses_updates_after_the_launch(runner):
    platform = runner.wrapper._graphs.pool.platform
    options = AscendOptions(update_order="update_first")
    strict = type(platform)(options) if isinstance(platform, AscendPlatform) else None
    assert strict is not None
    tasks = platform._tasks
    before, tasks.update_first = tasks.update_first, True
    try:
        lens = runner.fill(8)
        with (
            pytest.raises(MissingCapabilityError, match="before the launch"),
            runner.host.step(runner.context(Key(8), Mode.FULL, lens)),
        ):
            runner.wrapper(runner.x)
        assert runner.differs(8, first=True) == []
    finally:
        tasks.update_first = before


def test_graph_params_without_a_capture_behave_as_plain_lists():
    """As vllm-ascend's second model runner uses them, which captures by itself."""
    params = GraphParams({4: []}, {4: None}, {4: []}, {4: []})
    params.events[4].append("event")
    params.workspaces[4] = "scratch"
    assert params.events[4] == ["event"]
    assert params.workspaces.get(4) == "scratch"
    assert params.handles.get(5) is None
    with pytest.raises(KeyError):
        params.handles[5]


def test_a_graph_that_is_captured_without_the_wrapper_is_named_in_the_log_once(caplog):
    not_served.cache_clear()
    params, stream = GraphParams({4: []}, {4: None}, {4: []}, {4: []}), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    for event in range(2):
        params.events[4].append(event)
    assert not caplog.records
    with torch.npu.graph(graph, stream=stream):
        for event in range(2):
            params.events[4].append(event)
    assert params.events[4] == [0, 1, 0, 1]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not served: graphs captured without its ACLGraphWrapper" in caplog.text


def test_graphs_of_encoders_are_named_in_the_log_once(caplog):
    not_served.cache_clear()
    engine = Host()
    for served in (False, True, True):
        engine.config.compilation_config.cudagraph_mm_encoder = served
        engine.wrapper_class(abs, engine.config, Mode.FULL)
    assert caplog.text.count("not served: graphs of encoders") == 1


def test_the_plugin_switch_is_off_by_default_and_refuses_unknown_values(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    install_if_asked()
    monkeypatch.setenv(SWITCH, "perhaps")
    with pytest.raises(ImportError, match="has a wrong value"):
        install_if_asked()


@pytest.fixture
def published(monkeypatch):
    """A module with the names of vllm-ascend 0.26's module of graphs."""

    class ACLGraphWrapper:
        def __init__(
            self,
            runnable,
            vllm_config,
            runtime_mode,
            cudagraph_options=None,
            *,
            use_eagle=False,
            enable_enpu=False,
        ):
            pass

        def unwrap(self):
            pass

    def update_full_graph_params(
        attn_backend, update_stream, forward_context, num_tokens, vllm_config
    ):
        pass

    fields = ["events", "workspaces", "handles", "attn_params"]
    module = ModuleType(installing.MODULE)
    vars(module).update(
        vars(Host()),
        ACLGraphWrapper=ACLGraphWrapper,
        GraphParams=dataclasses.make_dataclass("GraphParams", fields),
        update_full_graph_params=update_full_graph_params,
        get_forward_context=lambda: None,
        validate_cudagraph_capturing_enabled=lambda: None,
        get_graph_params=lambda: None,
        get_draft_graph_params=lambda: None,
        get_draft_graph_prefill_params=lambda: None,
    )
    del module._graph_params, module._draft_graph_params, module._draft_graph_prefill_params
    monkeypatch.setitem(sys.modules, installing.MODULE, module)
    for parent in ("vllm_ascend", "vllm_ascend.compilation"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.26.0rc1")
    yield module
    uninstall()


def test_a_newer_vllm_ascend_with_the_same_names_is_served(published):
    install()
    assert published.GraphParams is GraphParams
    assert issubclass(published.ACLGraphWrapper, ACLGraphWrapper)
    assert published.update_full_graph_params.__wrapped__
    npu = torch.npu

    def waits():
        return [npu.synchronize, npu.Stream.synchronize, npu.Event.synchronize, npu.empty_cache]

    installed = waits()
    uninstall()
    assert [wait.__wrapped__ for wait in installed] == waits()


def test_a_vllm_ascend_that_has_begun_to_capture_is_refused(published):
    published.get_draft_graph_params = lambda: GraphParams({}, {}, {}, {})
    with pytest.raises(ImportError, match="get_draft_graph_params"):
        install()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("get_draft_graph_params", None, "get_draft_graph_params"),
        ("update_full_graph_params", lambda graph: None, "'update_stream'"),
        (
            "GraphParams",
            dataclasses.make_dataclass("GraphParams", ["events", "tasks"]),
            r"GraphParams\('events', 'tasks'\)",
        ),
    ],
)
def test_a_vllm_ascend_with_changed_names_is_refused_at_install(published, name, value, said):
    if value is None:
        delattr(published, name)
    else:
        setattr(published, name, value)
    with pytest.raises(ImportError, match=said):
        install()


def test_a_wrapper_that_updates_its_graphs_itself_is_refused_at_install(published):
    """As that of vllm-ascend 0.30, whose attention fills no `GraphParams`."""

    class ACLGraphWrapper(published.ACLGraphWrapper):
        def __init__(self, *args, update_stream=None):
            pass

        def set_attn_backend(self, backend):
            pass

    published.ACLGraphWrapper = ACLGraphWrapper
    said = r"'update_stream' of ACLGraphWrapper; .*ACLGraphWrapper\.set_attn_backend\(\)"
    with pytest.raises(ImportError, match=said):
        install()
