"""Graphs under `max_graphs=` and `graph_bytes=`: which one is captured, and which one goes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import (
    BatchDescriptor,
    Budget,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    InputSpec,
    KeyedGraphs,
    Reason,
    eager_break,
    forward_context,
)
from graphrt.core.capture import limit as limits
from graphrt.cpu import CpuPlatform
from graphrt.cpu.graph import TapeGraph
from graphrt.errors import (
    CaptureError,
    CaptureSealedError,
    GraphsDroppedWarning,
    InvalidOptionError,
    ResourceExhaustedError,
)
from tests import alone
from tests.draws import MORE

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
D4 = BatchDescriptor(4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
WIDTH = 64


class Aborted(Exception):
    """What a step that its host aborts raises."""


class Forward:
    """A forward over inputs of each size, which stay where they are; it may fail in a capture."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to(device)
        self.inputs: dict[int, torch.Tensor] = {}
        self.device, self.fails = device, False
        self(torch.zeros(1, WIDTH, device=device))  # wrappers do not warm up

    def input_of(self, size: int) -> torch.Tensor:
        if size not in self.inputs:
            self.inputs[size] = torch.randn(size, WIDTH, device="cpu").to(self.device)
        return self.inputs[size]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ self.weight)
        if self.fails:
            raise Aborted
        return y @ self.weight


Step = Callable[[int], Any]


def wrapped(
    forward: Forward, mode: GraphMode = FULL, pool: GraphPool | None = None, **limit: int
) -> tuple[GraphWrapper, Step]:
    """A lazy wrapper under a limit, and a step of a size by it."""
    wrapper = GraphWrapper(
        forward,
        mode,
        pool=pool or GraphPool(forward.device),
        options=GraphOptions(lazy=True, **limit),
        breakable=mode is PIECEWISE,
    )

    def step(size: int) -> Any:
        with forward_context(mode, BatchDescriptor(size)):
            return wrapper(forward.input_of(size))

    return wrapper, step


def keyed(forward: Forward, **limit: int) -> tuple[KeyedGraphs, Step]:
    """Graphs by size under a limit, and a step of a size."""
    graphs = KeyedGraphs(GraphPool(forward.device), options=GraphOptions(**limit))

    def step(size: int) -> Any:
        x = forward.input_of(size)  # drawn outside of the capture
        return graphs.run(size, lambda: forward(x))

    return graphs, step


def sizes_of(owner: GraphWrapper | KeyedGraphs) -> list[int]:
    """The sizes that have a graph."""
    if isinstance(owner, KeyedGraphs):
        return sorted(owner)
    return sorted(descriptor.num_tokens for descriptor in owner.entries)


def device_free(device: str) -> int:
    """Free memory of the device by its driver, without what torch's allocator keeps unused."""
    if device == "cpu":
        return 0
    alone.skip_beside_others()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


USUAL = limits.PACE, limits.REST


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rests, so that few steps show what happens."""
    monkeypatch.setattr(limits, "PACE", 1)
    monkeypatch.setattr(limits, "REST", 1)


@pytest.fixture
def paced(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rests that users have."""
    monkeypatch.setattr(limits, "PACE", USUAL[0])
    monkeypatch.setattr(limits, "REST", USUAL[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("make", [wrapped, keyed])
@pytest.mark.parametrize("limit", [{"max_graphs": 20}, {}], ids=["max_graphs", "graph_bytes"])
def test_300_sizes_under_a_limit_are_right_and_their_memory_stays_level(
    device: str, make: Any, limit: dict[str, int], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="graphrt")
    device_free(device)  # what `graph_bytes` counts, too
    forward, draw = Forward(device), random.Random(0)
    if not limit:  # of four memories two fit, and half a one
        owner, step = make(forward, graph_bytes=1 << 40)
        for size in (1, 300):
            step(size)
        limit = {"graph_bytes": int(1.3 * owner.pool.bytes())}
        owner.pool.close()
    owner, step = make(forward, **limit)
    for size in range(1, 301):
        forward.input_of(size)
    held, captures, free = [], [], []
    for number in range(2000):
        size = draw.randint(1, 300)
        assert torch.equal(step(size), forward(forward.input_of(size)))
        if number % 250 == 249:
            held.append(owner.pool.bytes())
            captures.append(owner.limit_report.captures)
            free.append(device_free(device))
    report = owner.limit_report
    assert max(held[2:]) <= 1.3 * max(held[:2])
    assert min(free[2:]) >= min(free[:2]) - (32 << 20)
    assert report.evictions
    if "max_graphs" in limit:
        assert report.graphs <= 20
        assert max(after - before for before, after in itertools.pairwise(captures)) <= 250 / 50
        lines = [record.message for record in caplog.records if "evicted" in record.message]
        assert len(lines) == report.evictions
        assert "asked for in" in lines[0] and "graphs of 20" in lines[0]
    else:
        taken = report.pool_bytes + (report.executable_bytes or 0)
        assert taken <= limit["graph_bytes"]


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_the_least_used_graph_makes_room_for_a_batch_that_missed_three_times(make: Any):
    owner, step = make(Forward("cpu"), max_graphs=3)
    for size in [9, 4, 4, 4, 4, 5, 5]:
        step(size)
    for _ in range(limits.MISSES - 1):
        step(6)
        assert sizes_of(owner) == [4, 5, 9]
    step(6)
    assert sizes_of(owner) == [4, 6, 9]


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_a_graph_that_is_used_as_much_as_another_was_missed_stays(make: Any):
    owner, step = make(Forward("cpu"), max_graphs=2)
    for size in [9, 4, 4, 4, 4, 6, 6, 6, 6]:
        step(size)
    assert sizes_of(owner) == [4, 9]
    step(6)
    assert sizes_of(owner) == [6, 9]


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_the_largest_graph_stays_however_little_it_is_used(make: Any):
    owner, step = make(Forward("cpu"), max_graphs=2)
    for size in [9, *[3] * 5, *[4] * 6, *[5] * 7, *[6] * 8]:
        step(size)
    assert sizes_of(owner) == [6, 9]
    for size in [10] * 9:
        step(size)
    assert 10 in sizes_of(owner) and len(sizes_of(owner)) == 2


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_uses_before_the_last_steps_do_not_count(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "WINDOW", 12)
    owner, step = make(Forward("cpu"), max_graphs=3)
    for size in [9, *[4] * 50, *[5] * 12, *[6] * 4]:
        step(size)
    assert sizes_of(owner) == [5, 6, 9]


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_an_evicted_graph_rests_although_its_batch_misses(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "REST", 30)
    owner, step = make(Forward("cpu"), max_graphs=2)
    for size in [9, 4, *[5] * 3]:
        step(size)
    assert sizes_of(owner) == [5, 9]
    for _ in range(29):
        step(4)
        assert sizes_of(owner) == [5, 9]
    step(4)
    assert sizes_of(owner) == [4, 9]


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_a_full_owner_captures_once_in_so_many_steps(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "PACE", 40)
    owner, step = make(Forward("cpu"), max_graphs=2)
    for size in [9, 4, *[5] * 3]:
        step(size)
    assert sizes_of(owner) == [5, 9]
    for _ in range(39):
        step(6)
        assert sizes_of(owner) == [5, 9]
    step(6)
    assert sizes_of(owner) == [6, 9]


def test_a_size_class_without_graphs_gives_its_memory_back():
    forward = Forward("cpu")
    wrapper, step = wrapped(forward, max_graphs=3)
    for size in [2000, 2, 3]:
        step(size)
    both = wrapper.pool.bytes()
    wrapper.drop(BatchDescriptor(2000))
    assert 0 < wrapper.pool.bytes() < both
    wrapper.clear_graphs()
    assert wrapper.pool.bytes() == 0
    step(3)
    assert wrapper.pool.bytes() > 0


def test_the_evicted_graph_of_a_size_class_gives_its_memory_back():
    wrapper, step = wrapped(Forward("cpu"), max_graphs=2)
    for size in [2000, 1000]:
        step(size)
    both = wrapper.pool.bytes()
    for _ in range(limits.MISSES):
        step(3)
    assert sizes_of(wrapper) == [3, 2000]
    assert wrapper.pool.bytes() < both - (1000 * WIDTH * 4)


def test_a_pool_has_at_most_four_memories_by_size():
    wrapper, step = wrapped(Forward("cpu"), max_graphs=64)
    for size in [1, 2, 4, 8, 16, 32, 64, 128, 256]:
        step(size)
    assert len(wrapper.pool.classes) == 4


def test_the_graph_with_the_fewest_uses_for_each_byte_that_it_frees_goes():
    residents = [4000, *[1500] * 9, 2, 3]
    unlimited, step = wrapped(Forward("cpu"), max_graphs=9)
    for size in residents:
        step(size)
    limit = unlimited.pool.bytes()
    owner, step = wrapped(Forward("cpu"), graph_bytes=limit)
    for size in residents:
        step(size)
    if sizes_of(owner) != [2, 3, 1500, 4000]:  # full from 1500 on
        for size in [2, 3] * limits.MISSES:
            step(size)
    assert sizes_of(owner) == [2, 3, 1500, 4000]
    for _ in range(30):
        step(1000)
    # 2 and 3 are used less, but neither alone frees anything.
    assert sizes_of(owner) == [2, 3, 1000, 4000]
    assert owner.pool.bytes() <= limit


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_bytes_below_the_first_graph_are_one_warning_and_each_call_returns_its_result(
    make: Any, recwarn: pytest.WarningsRecorder
):
    forward = Forward("cpu")
    owner, step = make(forward, graph_bytes=1000)
    for size in [4, 4, 5, 4, 6, 5]:
        assert torch.equal(step(size), forward(forward.input_of(size)))
        assert owner.pool.bytes() == 0 and sizes_of(owner) == []
    (warning,) = recwarn
    assert warning.category is GraphsDroppedWarning and "takes 262144" in str(warning.message)
    assert owner.limit_report.captures == 3  # a size is not captured again


def test_bytes_below_a_key_that_its_host_captures_are_an_error():
    graphs = KeyedGraphs(GraphPool("cpu"), options=GraphOptions(graph_bytes=1000))
    with pytest.raises(InvalidOptionError, match="takes 262144"):
        graphs.capture("a", lambda: torch.zeros(1) + 1)
    assert graphs.pool.bytes() == 0 and not graphs


@pytest.mark.parametrize("make", [wrapped, keyed])
def test_a_later_graph_that_alone_is_too_large_runs_eagerly_and_evicts_nobody(make: Any):
    forward = Forward("cpu")
    owner, step = make(forward, graph_bytes=1 << 20)
    step(4)
    for _ in range(5):
        assert torch.equal(step(9000), forward(forward.input_of(9000)))
    assert sizes_of(owner) == [4]
    assert owner.limit_report.captures == 2 and owner.limit_report.evictions == 1
    assert owner.pool.bytes() <= 1 << 20


def test_a_destroyed_keyed_graph_is_replayed_never_again():
    graphs, step = keyed(Forward("cpu"), max_graphs=2)
    for size in [9, 4]:
        step(size)
    kept = graphs[4]
    for _ in range(limits.MISSES):
        step(5)
    with pytest.raises(CaptureSealedError, match="destroyed"):
        kept.replay()


def test_a_key_that_its_host_captures_takes_a_place_at_once():
    forward = Forward("cpu")
    graphs, step = keyed(forward, max_graphs=2)
    for size in [9, 4, 4]:
        step(size)
    graphs.capture(5, lambda: forward(forward.input_of(5)))
    assert sorted(graphs) == [5, 9]
    lone = KeyedGraphs(GraphPool("cpu"), options=GraphOptions(max_graphs=1))
    lone.capture(9, lambda: forward(forward.input_of(9)))
    with pytest.raises(ResourceExhaustedError, match="no other graph may make room"):
        lone.capture(4, lambda: forward(forward.input_of(4)))
    assert sorted(lone) == [9]


def test_without_a_limit_a_key_is_captured_at_its_first_run():
    forward = Forward("cpu")
    graphs, step = keyed(forward)
    for size in [4, 5, 4, 5]:
        assert torch.equal(step(size), forward(forward.input_of(size)))
    assert list(graphs) == [4, 5] and graphs.limit_report is None


def test_keys_without_a_size_have_no_largest_graph():
    forward = Forward("cpu")
    graphs = KeyedGraphs(GraphPool("cpu"), options=GraphOptions(max_graphs=1))
    for key in ["a", "b"]:
        graphs.capture(key, lambda: forward(forward.input_of(4)))
    assert list(graphs) == ["b"]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_a_miss_under_a_limit_is_counted_as_one_of_its_dispatcher(mode: GraphMode):
    forward = Forward("cpu")
    wrapper, step = wrapped(forward, mode, max_graphs=1)
    for size in [9, 4, 4]:
        step(size)
    assert wrapper.eager_calls[Reason.MISSING_GRAPH] == 2
    assert wrapper.limit_report is not None and wrapper.limit_report.graphs == 1


def test_pieces_of_one_step_come_and_go_together():
    pool, first, second = GraphPool("cpu"), Forward("cpu"), Forward("cpu")
    options = GraphOptions(lazy=True, max_graphs=3)
    pieces = [GraphWrapper(each, PIECEWISE, pool=pool, options=options) for each in (first, second)]
    middle: dict[int, torch.Tensor] = {}
    draw = random.Random(0)
    for _ in range(600):
        size = draw.randint(1, 8)
        x = first.input_of(size)
        between = middle.setdefault(size, torch.zeros(size, WIDTH))
        with forward_context(PIECEWISE, BatchDescriptor(size)):
            between.copy_(pieces[0](x))
            out = pieces[1](between)
        assert torch.equal(out, second(first(x)))
        assert sizes_of(pieces[0]) == sizes_of(pieces[1])
    assert pieces[0].limit_report.evictions > 3


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("fails_each", [4, 5, 7])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("most", [3, 8])
def test_wrappers_of_one_step_keep_in_step_though_the_model_raises_now_and_then(
    mode: GraphMode, fails_each: int, count: int, most: int
):
    pool, options = GraphPool("cpu"), GraphOptions(lazy=True, max_graphs=most)
    calls, draw = itertools.count(1), random.Random(0)
    x = {size: torch.zeros(size, WIDTH) for size in range(1, 7)}

    def piece(y: torch.Tensor) -> torch.Tensor:
        if next(calls) % fails_each == 0:
            raise Aborted
        return y * 2 + 1

    pieces = [GraphWrapper(piece, mode, pool=pool, options=options) for _ in range(count)]
    served = 0
    for _ in range(500):
        size = draw.randint(1, 6)
        y = x[size].copy_(torch.randn(size, WIDTH))
        with contextlib.suppress(Aborted), forward_context(mode, BatchDescriptor(size)):
            for each in pieces:
                y = each(y)
            assert torch.allclose(y, (x[size] + 1) * 2**count - 1, atol=1e-5)
            served += 1
        assert len({tuple(sizes_of(each)) for each in pieces}) == 1
    assert served > 250 and len(sizes_of(pieces[0])) == min(most, 6)


def test_a_piece_that_only_some_steps_have_takes_back_the_others_ever_less_often():
    pool, forward = GraphPool("cpu"), Forward("cpu")
    options = GraphOptions(lazy=True, max_graphs=3)
    pieces = [GraphWrapper(forward, PIECEWISE, pool=pool, options=options) for _ in range(2)]
    x = forward.input_of(4)
    for number in range(200):
        with forward_context(PIECEWISE, D4):
            y = pieces[0](x)
            if number % 2:
                assert torch.equal(pieces[1](y), forward(forward(x)))
    assert pieces[0].limit_report is not None and pieces[0].limit_report.captures == 8


def test_pieces_with_other_limits_than_those_before_them_run_eagerly_behind_a_replay():
    pool, first, second = GraphPool("cpu"), Forward("cpu"), Forward("cpu")
    pieces = [
        GraphWrapper(
            forward, PIECEWISE, pool=pool, options=GraphOptions(lazy=True, max_graphs=most)
        )
        for forward, most in ((first, 4), (second, 2))
    ]
    middle = {size: torch.zeros(size, WIDTH) for size in range(1, 5)}
    for size in [4, 3, *[2] * 6, *[1, 2, 3] * 6]:
        with forward_context(PIECEWISE, BatchDescriptor(size)):
            middle[size].copy_(pieces[0](first.input_of(size)))
            out = pieces[1](middle[size])
        assert torch.equal(out, second(first(first.input_of(size))))
    assert sizes_of(pieces[0]) == [1, 2, 3, 4] and sizes_of(pieces[1]) == [3, 4]


@pytest.mark.usefixtures("paced")
def test_what_an_evicted_graph_grew_a_shared_memory_by_comes_back():
    """4000 needs more than the memory of 2100 and 2400 has: it goes, and they do too."""
    wrapper, step = wrapped(Forward("cpu"), graph_bytes=4 << 20)
    for size in [4096, 2400, 2100, 300, 2400, 2400, 2100, 2100, 300]:
        step(size)
    assert sizes_of(wrapper) == [300, 2100, 2400, 4096]
    step(4000)
    assert sizes_of(wrapper) == [300, 4096] and wrapper.pool.bytes() < 3 << 20


@pytest.mark.usefixtures("paced")
def test_where_only_the_largest_could_give_memory_back_others_stay_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
):
    forward = Forward("cpu")
    graphs = KeyedGraphs(GraphPool("cpu"), options=GraphOptions(graph_bytes=3 << 20))
    x, huge = forward.input_of(100), forward.input_of(9000)
    with torch.no_grad():
        for _ in range(3):
            for key, given in [(4000, x), (20, x), (3000, huge), (3001, huge)]:
                graphs.run(key, lambda given=given: forward(given))
    assert sizes_of(graphs) == [20, 4000]
    assert caplog.text.count("graph_bytes is exceeded") == 1


def test_where_its_host_has_dropped_a_graph_there_is_room_again():
    unlimited, step = wrapped(Forward("cpu"), max_graphs=9)
    for size in [1100, 9]:
        step(size)
    wrapper, step = wrapped(Forward("cpu"), graph_bytes=unlimited.pool.bytes())
    for size in [1100, 9, 600, 5]:
        step(size)
    assert sizes_of(wrapper) == [9, 1100]
    wrapper.drop(BatchDescriptor(9))
    step(4)
    assert sizes_of(wrapper) == [4, 1100]


def test_a_limit_and_strict_or_a_wrapper_that_is_not_lazy_are_refused():
    with pytest.raises(InvalidOptionError, match="strict"):
        GraphOptions(strict=True, max_graphs=2)
    with pytest.raises(InvalidOptionError, match="lazily"):
        GraphWrapper(Forward("cpu"), FULL, options=GraphOptions(max_graphs=2))
    with pytest.raises(InvalidOptionError, match="max_graphs"):
        GraphOptions(max_graphs=0)


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["full", "piecewise", "keyed"]), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["drop", "clear"]), st.integers(1, 9)),
)


@pytest.mark.draws
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40 * MORE, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=10, max_size=120),
    limit=st.sampled_from([{"max_graphs": 3}, {"graph_bytes": 800 << 10}, {"max_graphs": 1}]),
)
def test_random_schedules_with_aborts_equal_eager_and_keep_the_largest(
    device: str, actions: list[tuple[str, int]], limit: dict[str, int]
):
    forward = Forward(device)
    pool = GraphPool(device)
    if device != "cpu" and "graph_bytes" in limit:
        limit = {"graph_bytes": 160 << 20}  # a workspace of cuBLAS for each memory
    owners: dict[str, Any] = {
        "full": wrapped(forward, FULL, pool, **limit),
        "piecewise": wrapped(forward, PIECEWISE, pool, **limit),
        "keyed": keyed(forward, **limit),
    }
    largest = dict.fromkeys(owners, 0)
    for action, size in actions:
        if action == "drop":
            owners["full"][0].drop(BatchDescriptor(size))
            owners["keyed"][0].drop(size)
            for name in ("full", "keyed"):
                largest[name] = max(sizes_of(owners[name][0]), default=0)
        elif action == "clear":
            pool.clear_graphs()
            largest |= {"full": 0, "piecewise": 0}
        for name, (owner, step) in owners.items():
            if action == "abort":
                forward.fails = True
                with contextlib.suppress(Aborted):
                    step(size)
                forward.fails = False
            elif action == name:
                assert torch.equal(step(size), forward(forward.input_of(size)))
            held = sizes_of(owner)
            assert len(held) <= limit.get("max_graphs", 99)
            assert max(held, default=0) >= largest[name]
            largest[name] = max(held, default=0)


def runner_of(
    forward: Forward, sizes: list[int], mode: str = "FULL", *, lazy: bool = True, **limit: int
) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=sizes,
        platform=forward.device,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        options=GraphOptions(lazy=lazy, **limit),
    )


def captured(runner: GraphRunner, mode: GraphMode = FULL) -> list[int]:
    """The sizes of a mode that have a graph."""
    graphs = runner.report().graphs
    return sorted({each.descriptor.num_tokens for each in graphs if each.mode is mode})


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("device", DEVICES)
def test_a_lazy_runner_of_300_sizes_is_right_and_its_memory_stays_level(device: str):
    forward, draw = Forward(device), random.Random(0)
    runner = runner_of(forward, list(range(1, 301)), max_graphs=20)
    held, captures = [], []
    for number in range(1500):
        size = draw.randint(1, 300)
        x = forward.input_of(size)
        out = runner(x=x)
        expected = forward(x)
        if runner.last_dispatch.descriptor.num_tokens == size:
            assert torch.equal(out, expected)
        else:
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        if number % 250 == 249:
            held.append(runner.pool.bytes())
            captures.append(runner.report().limit.captures)
    assert len(runner.report().graphs) <= 20 and 300 in captured(runner)
    assert max(held[1:]) <= 1.3 * held[0]
    assert max(after - before for before, after in itertools.pairwise(captures)) <= 250 / 50
    line = next(line for line in str(runner.report()).splitlines() if line.startswith("Limit: "))
    assert "20 graphs of 20" in line and "evicted" in line


def test_the_first_step_of_a_lazy_runner_captures_the_largest_of_each_mode():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 2, 4, 8], "FULL_AND_PIECEWISE", max_graphs=3)
    for _ in range(2):
        x = forward.input_of(2)
        torch.testing.assert_close(runner(x=x), forward(x), rtol=1e-4, atol=1e-4)
        assert 8 in captured(runner, FULL) and 8 in captured(runner, PIECEWISE)
    assert len(runner.report().graphs) == 3


def test_bytes_below_the_largest_graph_are_an_error_at_the_first_step_of_a_small_batch():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 9000], graph_bytes=1 << 20)
    with pytest.raises(InvalidOptionError, match=r"FULL \[9000 tokens.* takes"):
        runner(x=forward.input_of(1))
    assert runner.pool.bytes() == 0
    x = forward.input_of(1)
    assert torch.equal(runner(x=x), forward(x))


def test_bytes_below_each_graph_are_an_error_of_one_step_and_of_each_capture():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 2, 4, 9000], graph_bytes=1000)
    with pytest.raises(InvalidOptionError, match="too small for a single graph"):
        runner(x=forward.input_of(1))
    for size in [1, 2, 4, 9000, 3, 1]:
        x = forward.input_of(size)
        assert torch.equal(runner(x=x), forward(x))
    for _ in range(2):
        with pytest.raises(InvalidOptionError, match="too small for a single graph"):
            runner.capture()


@pytest.mark.parametrize(
    "limit", [{"options": GraphOptions(max_graphs=2)}, {"budget": Budget(device_bytes=1 << 30)}]
)
def test_pieces_in_another_pool_than_their_runners_are_refused_under_a_limit(limit: Any):
    piece = GraphWrapper(Forward("cpu"), PIECEWISE, pool=GraphPool("cpu"))
    runner = GraphRunner(
        piece,
        mode="PIECEWISE",
        pieces="fx",
        sizes=[4],
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        **limit,
    )
    with pytest.raises(CaptureError, match="in the runner's own pool"):
        runner.capture()


def test_a_batch_of_an_evicted_graph_takes_the_next_larger_one():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 2, 4, 8], max_graphs=2)
    for size in [8, 2, 4, 4, 4]:
        runner(x=forward.input_of(size))
    assert captured(runner) == [4, 8]
    runner(x=forward.input_of(2))
    assert runner.last_dispatch.reason is Reason.HIT
    assert runner.last_dispatch.descriptor.num_tokens == 4
    runner.release()
    assert runner.report().limit.graphs == 0 and runner.pool.bytes() == 0


def test_an_evicted_graph_of_a_runner_comes_back_after_three_misses():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 2, 4, 8], max_graphs=2)
    for size in [8, 2, 4, 4, 4, 2, 2]:
        runner(x=forward.input_of(size))
        assert captured(runner) in ([8], [2, 8], [4, 8])
    assert captured(runner) == [4, 8]
    for _ in range(2):
        runner(x=forward.input_of(2))
    assert captured(runner) == [2, 8]


@pytest.mark.parametrize("capture_next", [False, True])
def test_capture_stops_at_a_number_of_graphs_with_the_largest_of_each_mode(
    capture_next: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="graphrt")
    forward = Forward("cpu")
    runner = runner_of(forward, list(range(1, 9)), "FULL_AND_PIECEWISE", lazy=False, max_graphs=5)
    if capture_next:
        while runner.capture_next():
            pass
    else:
        runner.capture()
    assert len(runner.report().graphs) == 5
    assert 8 in captured(runner, FULL) and 8 in captured(runner, PIECEWISE)
    assert runner.report().dropped == () and runner.report().limit.graphs == 5
    assert capture_next or "captured 5 graphs of 5" in caplog.text
    for size in range(1, 9):
        x = forward.input_of(size)
        torch.testing.assert_close(runner(x=x), forward(x), rtol=1e-3, atol=1e-3)
    runner.release()
    runner.capture()
    assert len(runner.report().graphs) == 5


def test_the_graph_of_a_runner_that_serves_the_fewest_steps_goes():
    forward = Forward("cpu")
    runner = runner_of(forward, [1, 2, 4, 8], max_graphs=3)
    for size in [8, 4, 2, *[4] * 9, 1, 1, 1]:
        runner(x=forward.input_of(size))
    assert captured(runner) == [1, 4, 8]


class Executables(CpuPlatform):
    """The CPU, whose driver takes a MiB for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self._graphs = weakref.WeakSet[TapeGraph]()

    def new_graph(self) -> TapeGraph:
        graph = super().new_graph()
        self._graphs.add(graph)
        return graph

    def driver_bytes(self) -> int:
        return len(self._graphs) << 20


@pytest.mark.parametrize("capture_next", [False, True])
def test_capture_keeps_its_first_graphs_where_executables_reach_the_bytes(capture_next: bool):
    forward = Forward("cpu")
    forward.device = Executables()
    runner = runner_of(forward, [1, 2, 3, 4, 5, 8], lazy=False, graph_bytes=(7 << 20) // 2)
    forward.device = "cpu"
    if capture_next:
        while runner.capture_next():
            pass
    else:
        runner.capture()
    first = [key[1].num_tokens for key in runner.plan.capture_order(limited=True)][:3]
    assert captured(runner) == sorted(first) and first[0] == 8
    limit = runner.report().limit
    assert limit is not None and limit.executable_bytes == 3 << 20
    assert "3.0 MiB of executables" in str(limit) and limit.captures == 4


def test_capture_stops_where_the_pool_has_grown_to_the_bytes():
    forward = Forward("cpu")
    runner = runner_of(forward, [10, 2000], lazy=False, graph_bytes=3 << 20)
    runner.capture()
    assert 2000 in captured(runner)
    full = runner_of(forward, [10, 2000], lazy=False, graph_bytes=runner.pool.bytes() - 1)
    with pytest.raises(InvalidOptionError, match="graph_bytes is too small for a single graph"):
        full.capture()
    assert full.report().graphs == ()


def test_fewer_graphs_than_modes_are_an_error_at_the_start():
    with pytest.raises(InvalidOptionError, match="FULL, PIECEWISE"):
        runner_of(Forward("cpu"), [1, 8], "FULL_AND_PIECEWISE", max_graphs=1)


@pytest.mark.draws
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15 * MORE, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["step", "step", "step", "abort", "drop"]), st.integers(1, 8)),
        min_size=10,
        max_size=60,
    ),
    mode=st.sampled_from(["FULL", "PIECEWISE"]),
    limit=st.sampled_from([{"max_graphs": 3}, {"max_graphs": 1}, {"graph_bytes": 700 << 10}]),
)
def test_random_steps_of_a_lazy_runner_with_aborts_equal_eager_and_keep_the_largest(
    device: str, actions: list[tuple[str, int]], mode: str, limit: dict[str, int]
):
    forward = Forward(device)
    if device != "cpu" and "graph_bytes" in limit:
        limit = {"graph_bytes": 160 << 20}
    runner = runner_of(forward, list(range(1, 9)), mode, **limit)
    largest = 0
    for action, size in actions:
        x = forward.input_of(size)
        if action == "step":
            torch.testing.assert_close(runner(x=x), forward(x), rtol=1e-4, atol=1e-4)
        elif action == "abort":
            forward.fails = True
            with contextlib.suppress(Aborted):
                runner(x=x)
            forward.fails = False
        else:
            runner.pool.drop(BatchDescriptor(size))
            largest = 0
        held = captured(runner, GraphMode[mode])
        assert len(held) <= limit.get("max_graphs", 99)
        assert max(held, default=0) >= largest
        largest = max(held, default=0)


@pytest.mark.cuda
def test_an_eviction_waits_for_the_last_replay_and_not_for_the_device():
    wrapper, step = wrapped(Forward("cuda"), max_graphs=3)
    for size in [9, 4, 5]:  # 4 and 5 share a memory: freeing one waits for the device
        step(size)
    beside, ended = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(2_000_000_000)
        ended.record()
    wrapper.drop(BatchDescriptor(4))
    assert sizes_of(wrapper) == [5, 9] and not ended.query()


@eager_break
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_steps_with_eager_parts_and_shared_outputs_stay_right_under_a_limit(
    device: str, outputs: Any
):
    forward, draw = Forward(device), random.Random(0)

    def broken(x: torch.Tensor) -> torch.Tensor:
        return forward(halved(forward(x)))

    options = GraphOptions(lazy=True, max_graphs=4, outputs=outputs)
    pool = GraphPool(device)
    wrapper = GraphWrapper(broken, PIECEWISE, pool=pool, options=options, breakable=True)
    for _ in range(400):
        size = draw.choice([1, 2, 3, 7, 8, 15, 16, 30, 31, 60])
        with forward_context(PIECEWISE, BatchDescriptor(size)):
            out = wrapper(forward.input_of(size))
        assert torch.equal(out, broken(forward.input_of(size)))
    assert wrapper.limit_report is not None and wrapper.limit_report.evictions > 3


def test_a_moved_wrapper_has_its_limit_in_the_new_pool():
    wrapper, step = wrapped(Forward("cpu"), max_graphs=2)
    step(4)
    old = wrapper.pool
    wrapper.clear_graphs()
    wrapper.move_to(GraphPool("cpu"))
    for size in [9, 4]:
        step(size)
    assert old.bytes() == 0 and len(wrapper.pool.classes) == 2
    wrapper.pool.close()
    assert not wrapper.pool.classes


def test_with_graphs_off_a_limited_key_calls_its_forward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    graphs, step = keyed(Forward("cpu"), max_graphs=2)
    for size in [1, 2, 3, 4]:
        assert step(size).shape == (size, WIDTH)
    assert len(graphs) == 0
