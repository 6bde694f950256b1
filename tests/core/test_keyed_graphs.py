"""Keyed graphs captured by several threads, with hooks that raise, and with graphs off."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    HostArg,
    InputSpec,
    KeyedGraphs,
    Reason,
    UpdatableTask,
)
from graphrt.core.batch.context import current_context
from graphrt.core.replay.recording import under_way
from graphrt.errors import (
    CaptureError,
    CaptureSealedError,
    InvalidBatchError,
    InvalidOptionError,
    NestedCaptureError,
    PoolBusyError,
    PoolClosedError,
)
from tests.core.interrupts import Places

D, LAZY = BatchDescriptor(4), GraphOptions(lazy=True)


def in_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Run them at the same time; returns what they raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


class SlowForward:
    """A forward that is left only when it is told to."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(30)
        return torch.ones(4)


@functools.cache
def memory(value: float) -> torch.Tensor:
    """What graphs read, which is the host's to keep."""
    return torch.full((4,), value)


def made(value: float) -> Callable[[], torch.Tensor]:
    x, thread = memory(float(value)), threading.get_ident()

    def forward() -> torch.Tensor:
        assert threading.get_ident() == thread
        return x + 0

    return forward


# Threads ----------------------------------------------------------------------------------------


def test_captures_that_wait_for_another_threads_capture_record_their_own_forwards():
    graphs, slow = KeyedGraphs(GraphPool("cpu")), SlowForward()

    def others() -> None:
        slow.entered.wait(30)
        threading.Timer(0.2, slow.go_on.set).start()
        for value, key in enumerate(("two", "three", "four"), 2):
            graphs.capture(key, made(value))

    assert not in_threads(lambda: graphs.capture("one", slow), others)
    outputs = {key: graphs.replay(key).tolist()[0] for key in graphs}
    assert outputs == {"one": 1, "two": 2, "three": 3, "four": 4}


def test_three_threads_that_capture_and_drop_keys_get_the_right_graphs():
    graphs, start = KeyedGraphs(GraphPool("cpu")), threading.Barrier(3)
    rounds, own = 40, 5

    def serve(first: int) -> None:
        start.wait(30)
        for step in range(rounds):
            for key in range(first, first + own):
                if key in graphs:
                    graphs.drop(key)
                graphs.capture(key, made(key * 1000 + step))
                assert graphs[key].alive
            assert len(list(graphs)) <= 3 * own and len(graphs) <= 3 * own

    assert not in_threads(*(lambda first=first: serve(first) for first in (0, 10, 20)))
    keys = [*range(5), *range(10, 15), *range(20, 25)]
    assert sorted(graphs) == keys
    assert [graphs.replay(key).tolist()[0] for key in keys] == [
        key * 1000 + rounds - 1 for key in keys
    ]
    assert graphs.pool.captures == len(keys) * rounds


def test_three_threads_capturing_the_same_key_make_a_single_graph():
    for _ in range(10):
        graphs, start = KeyedGraphs(GraphPool("cpu")), threading.Barrier(3)

        def capture(graphs: KeyedGraphs = graphs, start: threading.Barrier = start) -> None:
            start.wait(30)
            graphs.capture("key", made(1))

        errors = in_threads(capture, capture, capture)
        assert [type(error) for error in errors] == [CaptureError] * 2
        assert "second time" in str(errors[0])
        assert len(graphs) == graphs.pool.captures == 1


def test_replaying_a_dropped_graph_while_another_thread_captures_raises():
    graphs, slow = KeyedGraphs(GraphPool("cpu")), SlowForward()
    other = KeyedGraphs(GraphPool("cpu"))
    graph = other.capture("old", made(7))
    other.drop("old")

    def replay() -> None:
        slow.entered.wait(30)
        try:
            with pytest.raises(CaptureSealedError):
                graph.replay()
        finally:
            slow.go_on.set()

    assert not in_threads(lambda: other.capture("new", slow), replay)
    assert len(graphs) == 0


def test_a_finalizer_that_drops_a_graph_during_another_capture_does_not_deadlock():
    # Its finalizer asks for what the capture of another KeyedGraphs has, in the other order.
    one, other = KeyedGraphs(GraphPool("cpu")), KeyedGraphs(GraphPool("cpu"))

    class Handle:
        pass

    for step in range(20):
        handle = Handle()
        one.capture(step, made(1))
        weakref.finalize(handle, one.drop, step)
        box = [handle]
        del handle

        def let_go(box: list[Any] = box) -> torch.Tensor:
            box.clear()
            return torch.ones(4)

        errors = in_threads(
            lambda step=step, let_go=let_go: other.capture(step, let_go),
            lambda step=step: one.capture(("also", step), made(2)),
        )
        assert not errors and step not in one
    gc.collect()
    assert len(one) == len(other) == 20


def test_a_nested_keyed_capture_is_refused_without_a_deadlock():
    graphs = KeyedGraphs(GraphPool("cpu"))
    errors = in_threads(
        lambda: graphs.capture("outer", lambda: graphs.capture("inner", made(1))),
    )
    assert [type(error) for error in errors] == [NestedCaptureError]
    assert not in_threads(lambda: graphs.capture("outer", made(1)))


def test_the_handle_of_a_dropped_graph_cannot_replay_its_keys_new_graph():
    graphs = KeyedGraphs(GraphPool("cpu"))
    for end in (lambda: graphs.drop("key"), graphs.clear_graphs, graphs.pool.clear_graphs):
        old = graphs.capture("key", made(1))
        assert old.alive and repr(old) == "KeyedGraph('key')"
        end()
        assert not old.alive
        graphs.capture("key", made(2))
        assert not old.alive
        with pytest.raises(CaptureSealedError):
            old.replay()
        with pytest.raises(KeyError):
            _ = old.outputs
        graphs.drop("key")


def entries_of(pool: GraphPool) -> int:
    return sum(len(each.entries) for each in pool.holders if isinstance(each, GraphWrapper))


def test_after_an_interrupted_keyed_capture_the_key_can_be_captured():
    at = 0
    while True:
        graphs, interrupt = KeyedGraphs(GraphPool("cpu")), Places(at, lines=True)
        with contextlib.suppress(KeyboardInterrupt):
            interrupt(lambda graphs=graphs: graphs.capture("key", made(1)))
        assert current_context() is None and not under_way, interrupt.where
        if interrupt.seen <= at:
            break
        if "key" not in graphs:
            graphs.capture("key", made(2))
        assert graphs.replay("key").tolist()[0] == graphs["key"].outputs.tolist()[0]
        assert len(graphs) == entries_of(graphs.pool) == 1, interrupt.where
        assert not in_threads(lambda graphs=graphs: graphs.capture("other", made(3)))
        at += 3
    assert at > 100


def test_a_keyed_graph_does_not_keep_its_forward_alive():
    graphs, forward = KeyedGraphs(GraphPool("cpu")), SlowForward()
    forward.go_on.set()
    graphs.capture("key", forward)
    held = weakref.ref(forward)
    del forward
    assert held() is None and graphs.replay("key").tolist() == [1] * 4


# Hooks ------------------------------------------------------------------------------------------


def test_an_on_capture_hook_that_raises_leaves_the_captured_graphs_in_place():
    pool = GraphPool("cpu")
    graphs = KeyedGraphs(pool)
    wrapper, x = GraphWrapper(lambda x: x + 1, "FULL", pool=pool, options=LAZY), torch.zeros(4)

    def refuse(wrapper: Any, descriptor: Any) -> None:
        raise ZeroDivisionError

    pool.on_capture = refuse
    with pytest.raises(ZeroDivisionError):
        graphs.capture("key", made(3))
    with pytest.raises(ZeroDivisionError), ForwardContext(GraphMode.FULL, D):
        wrapper(x)
    pool.on_capture = None
    assert (len(graphs), len(wrapper.entries), pool.captures) == (1, 1, 2)
    assert graphs.replay("key").tolist() == [3] * 4
    with ForwardContext(GraphMode.FULL, D):
        assert wrapper(x).tolist() == [1] * 4
    assert pool.captures == 2 and pool.owner is None


def test_an_on_capture_hook_may_replay_capture_and_clear_graphs():
    pool = GraphPool("cpu")
    graphs = KeyedGraphs(pool)
    wrapper, x = GraphWrapper(lambda x: x + 1, "FULL", pool=pool, options=LAZY), torch.zeros(4)
    told: list[Any] = []

    def serve(size: int) -> torch.Tensor:
        with ForwardContext(GraphMode.FULL, D._replace(num_tokens=size)):
            return wrapper(x)

    def hook(who: Any, descriptor: Any) -> None:
        told.append(descriptor.variant or descriptor.num_tokens)
        if descriptor.variant == "replay":
            told.append(graphs.replay("replay").tolist()[0])
        elif descriptor.variant == "capture":
            graphs.capture("captured inside", made(2))
        elif descriptor.variant == "clear" or descriptor.num_tokens == 16:
            pool.clear_graphs()
        elif descriptor.num_tokens == 4:
            told.append(serve(4).tolist()[0])
            serve(8)

    pool.on_capture = hook
    graphs.capture("replay", made(5))
    graphs.capture("capture", made(6))
    assert told == ["replay", 5, "capture", "captured inside"]
    assert [graphs.replay(key).tolist()[0] for key in graphs] == [5, 6, 2]
    assert not graphs.capture("clear", made(7)).alive and len(graphs) == 0
    told.clear()
    assert serve(4).tolist() == [1] * 4
    assert told == [4, 1, 8] and len(wrapper.entries) == 2
    assert serve(16).tolist() == [1] * 4
    assert not wrapper.entries and pool.owner is None
    assert serve(4).tolist() == [1] * 4


def test_an_on_capture_hook_may_wait_for_another_threads_keyed_capture():
    graphs = KeyedGraphs(GraphPool("cpu"))

    def hook(wrapper: Any, descriptor: Any) -> None:
        if descriptor.variant == "first":
            assert not in_threads(lambda: graphs.capture("second", made(2)))

    graphs.pool.on_capture = hook
    graphs.capture("first", made(1))
    assert list(graphs) == ["first", "second"]


@pytest.mark.parametrize(
    ("what", "error"),
    [("raise", ZeroDivisionError), ("replay", PoolBusyError), ("clear", PoolBusyError)],
)
def test_an_on_capture_hook_that_fails_in_a_runners_capture_removes_its_graph(what, error):
    pool = GraphPool("cpu")
    graphs = KeyedGraphs(pool)
    graphs.capture("key", made(3))
    runner = GraphRunner(
        lambda x: x * 2,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode="FULL",
        sizes=[2],
        pool=pool,
    )

    def hook(wrapper: Any, descriptor: Any) -> None:
        if what == "raise":
            raise ZeroDivisionError
        (pool.clear_graphs if what == "clear" else graphs["key"].replay)()

    pool.on_capture = hook
    with pytest.raises(error):
        runner.capture()
    pool.on_capture = None
    assert pool.owner is None and graphs.replay("key").tolist() == [3] * 4
    assert runner(x=torch.ones(2, 4)).sum() == 16
    runner.capture()
    assert runner(x=torch.ones(2, 4)).sum() == 16
    assert runner.report().reasons[Reason.HIT] == 1


# Graphs off -------------------------------------------------------------------------------------


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> KeyedGraphs:
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    return KeyedGraphs(GraphPool("cpu"))


def test_with_graphs_off_outputs_are_the_last_result_of_the_forward(off):
    x = torch.zeros(4)
    graph = off.capture("key", lambda: x + 1)
    assert graph.outputs.tolist() == [1] * 4
    x.fill_(5)
    assert graph.replay() is graph.outputs
    assert graph.outputs.tolist() == [6] * 4
    with pytest.raises(CaptureError, match="second time"):
        off.capture("key", lambda: x)


@pytest.mark.parametrize("end", ["pool.clear_graphs", "pool.close", "clear_graphs", "drop"])
def test_with_graphs_off_drop_clear_and_close_end_a_keyed_graph(off, end):
    graph = off.capture("key", made(1))
    held = weakref.ref(graph.outputs)
    {
        "pool.clear_graphs": off.pool.clear_graphs,
        "pool.close": off.pool.close,
        "clear_graphs": off.clear_graphs,
        "drop": lambda: off.drop("key"),
    }[end]()
    assert not graph.alive and "key" not in off and len(off) == 0 and held() is None
    with pytest.raises(CaptureSealedError):
        graph.replay()
    with pytest.raises(KeyError):
        _ = graph.outputs
    with pytest.raises(KeyError):
        off["key"]
    if end == "pool.close":
        with pytest.raises(PoolClosedError):
            off.capture("key", made(2))
    else:
        assert off.capture("key", made(2)).replay().tolist() == [2] * 4


def test_with_graphs_off_a_failed_keyed_capture_leaves_no_graph(off):
    with pytest.raises(ZeroDivisionError):
        off.capture("key", lambda: 1 / 0)
    assert len(off) == 0
    assert off.capture("key", made(2)).replay().tolist() == [2] * 4


def test_with_graphs_off_tasks_get_the_updates_of_each_replay(off):
    got: list[int] = []
    task = UpdatableTask(
        "add",
        lambda *, n: got.append(n),
        {"n": HostArg(None)},
        at_capture=lambda descriptor: {"n": 9},
    )
    graph = off.capture("key", task)
    graph.replay({"add": {"n": 3}})
    graph.replay()
    assert got == [9, 3, 3]


def test_tasks_are_refused_by_run_which_takes_no_updates():
    task = UpdatableTask(
        "add",
        lambda out, *, n: None,
        {"n": HostArg("tokens")},
        at_capture=lambda descriptor: {"n": [1] * descriptor.num_tokens},
    )
    graphs = KeyedGraphs(GraphPool("cpu"))
    with pytest.raises(CaptureError, match=r"run\(\) takes no updates(?s:.*)add(?s:.*)GraphRunner"):
        graphs.run("key", lambda: task(torch.ones(1)))
    assert not graphs
    graphs.capture("key", lambda: task(torch.ones(1)))
    graphs.replay("key", {"add": {"n": [3]}})


def test_a_graph_key_that_is_not_hashable_raises():
    with pytest.raises(InvalidBatchError, match="hashable"):
        KeyedGraphs(GraphPool("cpu")).capture([1], made(1))


@pytest.mark.parametrize("kind", [0, 3, "a", (1,), object(), set()])
def test_a_kind_without_weak_references_is_named(kind: object) -> None:
    """And leaves no graph."""
    graphs = KeyedGraphs(GraphPool("cpu"))
    with pytest.raises(InvalidOptionError, match="weak references"):
        graphs.capture("a", lambda: torch.ones(2), kind=kind)
    assert not graphs
