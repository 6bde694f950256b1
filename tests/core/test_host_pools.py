"""Hosts with their own contexts and pools: capture sessions, steps, keyed graphs and hooks."""

from __future__ import annotations

import gc
import threading
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
    InputSpec,
    KeyedGraphs,
    Reason,
)
from graphrt.core.replay import recording
from graphrt.errors import (
    CaptureError,
    CaptureSealedError,
    InvalidOptionError,
    MissingCapabilityError,
    NestedCaptureError,
    PoolBusyError,
    PoolClosedError,
)

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
LAZY = GraphOptions(lazy=True)


class Host:
    """An engine with a context of its own, from which wrappers read graphrt's."""

    def __init__(self, mode: GraphMode = PIECEWISE) -> None:
        self.mode = mode
        self.context: ForwardContext | None = None
        self.contexts: dict[int, ForwardContext] = {}

    def read(self) -> ForwardContext | None:
        return self.context

    def begin(self, tokens: int, *, steps: bool = True) -> None:
        context = self.contexts.get(tokens)
        if context is None:
            own = BatchDescriptor(tokens, variant=tokens)
            context = self.contexts[tokens] = ForwardContext(self.mode, own)
        if steps:
            context.begin_step()
        self.context = context

    def wrap(self, function: Any, pool: GraphPool, options: GraphOptions = LAZY) -> GraphWrapper:
        return GraphWrapper(function, self.mode, pool=pool, read_context=self.read, options=options)


def test_all_pieces_after_a_begin_step_count_as_a_single_step():
    host, pool = Host(), GraphPool("cpu")
    pieces = [host.wrap(lambda x: [x + 1], pool) for _ in range(3)]
    x = torch.zeros(4)

    def forward() -> torch.Tensor:
        y = x
        for piece in pieces:
            (y,) = piece(y)
        return y

    with pool.capture_session():
        host.begin(4)
        assert forward().tolist() == [3] * 4
    before = pool.generation
    for value in (5.0, 6.0):
        x.fill_(value)
        host.begin(4)
        assert forward().tolist() == [value + 3] * 4
    assert pool.generation - before == 2


def test_without_begin_step_every_piece_counts_as_a_separate_step():
    host, pool = Host(), GraphPool("cpu")
    pieces = [host.wrap(lambda x: x + 1, pool) for _ in range(3)]
    x = torch.zeros(4)
    for _ in range(2):
        host.begin(4, steps=False)
        before, y = pool.generation, x
        for piece in pieces:
            y = piece(y)
    assert pool.generation - before == 3


def test_a_piece_of_an_overtaken_host_step_is_refused():
    host, pool = Host(), GraphPool("cpu")
    piece, x = host.wrap(lambda x: x + 1, pool), torch.zeros(4)
    for tokens in (4, 8, 4, 8):
        host.begin(tokens)
        piece(x)
    host.begin(4)
    piece(x)
    first = host.context
    host.begin(8)
    piece(x)
    host.context = first
    with pytest.raises(PoolBusyError):
        piece(x)  # the step before, which the one in between has overwritten
    host.begin(8)
    assert piece(x).tolist() == [1] * 4


def test_interleaved_steps_of_two_threads_in_a_pool_raise_pool_busy():
    pool, hosts = GraphPool("cpu"), [Host(), Host()]
    pieces = [host.wrap(lambda x: x + 1, pool) for host in hosts]
    x = torch.zeros(4)
    for host, piece in zip(hosts, pieces, strict=True):
        host.begin(4)
        piece(x)
    errors: list[Exception] = []
    turn = threading.Barrier(2)

    def serve(host: Host, piece: GraphWrapper, after: int) -> None:
        try:
            host.begin(4)
            for call in range(2):
                for step in range(2):
                    turn.wait(10)
                    if step == after:
                        piece(x)
                turn.wait(10)
                del call
        except PoolBusyError as error:
            errors.append(error)
            turn.abort()
        except threading.BrokenBarrierError:
            pass

    threads = [
        threading.Thread(target=serve, args=(host, piece, place))
        for place, (host, piece) in enumerate(zip(hosts, pieces, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1


def test_the_busy_error_of_a_pool_whose_owner_changes_names_the_first_owner():
    pool, context = GraphPool("cpu"), object()

    class Ending:
        @property
        def refusal(self) -> Any:
            # It was looked up: the next step has the pool by now.
            pool.owner = context
            return lambda pool: None

    pool.owner = Ending()
    error = pool.busy_error(context)
    assert isinstance(error, PoolBusyError) and "Ending" in str(error)
    pool.owner = None


def test_a_context_kept_across_steps_gets_a_slot_without_promising_a_graph():
    host, pool = Host(FULL), GraphPool("cpu")
    strict = GraphOptions(lazy=True, strict=True)
    one, other = host.wrap(lambda x: x + 1, pool, strict), host.wrap(lambda x: x + 2, pool, strict)
    x = torch.zeros(4)
    with pool.capture_session():
        host.begin(4)
        one(x)
        assert host.context.slot == -1
    for tokens in (4, 8, 4):
        host.begin(tokens)
        if tokens == 4:
            assert one(x).tolist() == [1] * 4
    numbers = {context.slot for context in host.contexts.values()}
    assert host.context.slot >= 0 and not host.context.announced and len(numbers) == 2
    host.begin(8)
    for wrapper in (one, other):
        with pytest.raises(CaptureSealedError):
            wrapper(x)
    never = host.wrap(lambda x: x, pool, GraphOptions(strict=True))
    with pytest.raises(CaptureSealedError) as error:
        never(x)
    assert "slot" not in str(error.value)
    kept = ForwardContext(FULL, BatchDescriptor(4), slot=3)
    kept.begin_step()
    kept.begin_step()
    assert kept.slot == 3 and kept.announced


def test_begin_step_inside_an_entered_context_is_refused():
    context = ForwardContext(PIECEWISE, BatchDescriptor(4))
    with context, pytest.raises(InvalidOptionError, match="inside of `with` this context"):
        context.begin_step()
    context.begin_step()
    with context:  # it may be both, one after the other
        pass
    assert context.token is None


def test_containers_returned_by_a_replay_can_be_edited_by_the_caller():
    host, pool = Host(FULL), GraphPool("cpu")
    wrapper = host.wrap(lambda x: [x + 1, (x + 2, 3)], pool)
    nested = host.wrap(lambda x: {"a": [x + 1], "b": x}, pool)
    x = torch.zeros(4)
    for _ in range(3):
        host.begin(4)
        output = wrapper(x)
        assert [output[0].tolist(), output[1][0].tolist(), output[1][1]] == [[1] * 4, [2] * 4, 3]
        output.clear()
        other = nested(x)
        assert other["a"].pop().tolist() == [1] * 4
        other.clear()


# Sessions ---------------------------------------------------------------------------------------


def test_lazy_wrappers_capture_inside_a_session_and_are_sealed_at_its_end():
    host, pool = Host(FULL), GraphPool("cpu")
    strict = GraphOptions(lazy=True, strict=True)
    early, other = host.wrap(lambda x: x + 1, pool, strict), GraphPool("cpu")
    early.seal()
    x = torch.zeros(4)
    with pool.capture_session() as session:
        host.begin(4)
        early(x)
        late, moved = host.wrap(lambda x: x + 2, pool, strict), host.wrap(lambda x: x, other)
        late(x)
        moved.move_to(pool)
        moved(x)
        assert session.captures == 3
        assert session.pool_bytes == pool.bytes() > 0
        with pool.capture_session() as inner:
            pass
        assert inner.captures == 0 and not early.sealed
    assert [each.sealed for each in (early, late, moved)] == [True] * 3
    host.begin(8)
    with pytest.raises(CaptureSealedError):
        early(x)


def test_a_capture_session_that_raises_seals_wrappers_and_unfreezes_garbage_collection():
    host, pool = Host(FULL), GraphPool("cpu")
    wrapper = host.wrap(lambda x: x + 1, pool)
    with pytest.raises(ZeroDivisionError), pool.capture_session():
        raise ZeroDivisionError
    assert wrapper.sealed and gc.isenabled() and gc.get_freeze_count() == 0
    pool.close()
    with pytest.raises(PoolClosedError), pool.capture_session():
        pass


def test_a_wrapper_that_is_not_lazy_does_not_capture_in_a_session():
    host, pool = Host(FULL), GraphPool("cpu")
    wrapper = host.wrap(lambda x: x + 1, pool, GraphOptions())
    with pool.capture_session():
        host.begin(4)
        wrapper(torch.zeros(4))
    assert not wrapper.entries and not wrapper.sealed


def counted_gc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphrt asks Python's collector from now on."""
    counted: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            counted.append(name)
            return getattr(gc, name)

    monkeypatch.setattr(recording, "gc", Watched())
    return counted


@pytest.mark.parametrize("frozen_by_host", [False, True])
def test_captures_in_a_session_do_not_freeze_the_heap_again(frozen_by_host, monkeypatch):
    by_nobody = recording._FROZEN_BY_NOBODY  # fewer than a heap has
    counted = counted_gc(monkeypatch)
    monkeypatch.setattr(recording, "_FROZEN_BY_NOBODY", 0 if frozen_by_host else 10**9)
    monkeypatch.setattr(recording, "_frozen_by_host", False)
    host, pool = Host(FULL), GraphPool("cpu")
    with pool.capture_session():
        wrappers = [host.wrap(lambda x: x + 1, pool) for _ in range(5)]
        once = list(counted)
        for wrapper in wrappers:
            host.begin(4)
            wrapper(torch.zeros(4))
        assert counted == once
    assert counted.count("get_freeze_count") == 1
    assert counted.count("freeze") == (not frozen_by_host)
    with pool.capture_session():
        pass
    # A host that has frozen its heap is not asked again: that takes 80 ms.
    assert counted.count("get_freeze_count") == (1 if frozen_by_host else 2)
    assert gc.get_freeze_count() < by_nobody


# Counter, hook, clearing ------------------------------------------------------------------------


def test_the_pool_counts_successful_captures_and_calls_on_capture():
    host, pool = Host(FULL), GraphPool("cpu")
    told: list[Any] = []
    pool.on_capture = lambda wrapper, descriptor: told.append((wrapper, descriptor.num_tokens))
    wrapper, graphs = host.wrap(lambda x: x + 1, pool), KeyedGraphs(pool)
    x = torch.zeros(4)
    for tokens in (4, 8, 4):
        host.begin(tokens)
        wrapper(x)
    graphs.capture("key", lambda: x + 1)
    assert pool.captures == 3
    assert told[:2] == [(wrapper, 4), (wrapper, 8)]
    failing = host.wrap(lambda x: x + 1 / 0, pool)
    host.begin(16)
    with pytest.raises(ZeroDivisionError):
        failing(x)
    assert pool.captures == 3


def test_clear_graphs_destroys_all_graphs_which_can_be_captured_again():
    host, pool = Host(FULL), GraphPool("cpu")
    wrapper, graphs = host.wrap(lambda x: x + 1, pool), KeyedGraphs(pool)
    x = torch.zeros(4)
    for _ in range(2):
        with pool.capture_session():
            host.begin(4)
            wrapper(x)
            graph = graphs.capture("key", lambda: x + 2)
        assert len(wrapper.entries) == len(graphs) == 1
        pool.clear_graphs()
        assert "key" not in graphs
        assert len(wrapper.entries) == len(graphs) == 0
        with pytest.raises(CaptureSealedError, match="destroyed"):
            graph.replay()
    with ForwardContext(FULL, BatchDescriptor(1)) as context:
        pool.owner = context
        with pytest.raises(PoolBusyError):
            pool.clear_graphs()
        pool.owner = None


def test_a_runner_whose_graphs_were_cleared_runs_eagerly_until_they_are_captured_again():
    pool = GraphPool("cpu")
    runner = GraphRunner(
        lambda x: x * 2,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode="FULL",
        sizes=[2],
        pool=pool,
    )
    runner.capture()
    for value in (1.0, 3.0):
        pool.clear_graphs()
        assert runner(x=torch.full((2, 4), value)).sum() == 16 * value
    reasons = runner.report().reasons
    assert (reasons[Reason.NOT_CAPTURED], reasons[Reason.HIT]) == (2, 0)
    runner.capture()
    assert runner(x=torch.full((2, 4), 5.0)).sum() == 80
    assert runner.report().reasons[Reason.HIT] == 1


# Keyed graphs -----------------------------------------------------------------------------------


def test_capturing_a_keyed_graph_has_the_effect_of_a_single_call():
    graphs, count = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    graph = graphs.capture("key", lambda: count.add_(1))
    assert count.tolist() == [1] * 4
    for _ in range(3):
        graph.replay()
    assert count.tolist() == [4] * 4
    assert graphs["key"] is graph and list(graphs) == ["key"]


def test_capturing_a_key_twice_raises_and_drop_destroys_its_graph():
    graphs, x = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    for key in range(3):
        graphs.capture(key, lambda key=key: x + key)
    with pytest.raises(CaptureError, match="second time"):
        graphs.capture(1, lambda: x)
    graphs.drop(1)
    graphs.drop("unknown")
    graphs.capture("other", lambda: x + 7)
    assert [graphs.replay(key).tolist()[0] for key in graphs] == [0, 2, 7]
    with pytest.raises(KeyError):
        graphs.replay(1)


def test_a_failed_keyed_capture_leaves_no_graph_and_can_be_repeated():
    graphs, x = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    with pytest.raises(ZeroDivisionError):
        graphs.capture("key", lambda: x + 1 / 0)
    assert len(graphs) == 0
    assert graphs.capture("key", lambda: x + 1).replay().tolist() == [1] * 4


def test_capturing_or_replaying_a_keyed_graph_inside_a_capture_is_refused():
    graphs, x = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    inner = graphs.capture("inner", lambda: x + 1)
    with pytest.raises(NestedCaptureError, match="no trace"):
        graphs.capture("outer", inner.replay)
    with pytest.raises(NestedCaptureError):
        graphs.capture("outer", lambda: KeyedGraphs(graphs.pool).capture("inner", lambda: x + 1))
    assert list(graphs) == ["inner"]


def test_pieces_inside_of_a_keyed_forward_become_part_of_its_graph():
    host, pool = Host(), GraphPool("cpu")
    piece, x = host.wrap(lambda x: [x + 1], pool), torch.zeros(4)
    host.begin(4)
    graphs = KeyedGraphs(pool)
    graph = graphs.capture("key", lambda: piece(x)[0] * 2)
    x.fill_(3)
    assert graph.replay().tolist() == [8] * 4
    assert not piece.entries


def test_a_keyed_graph_with_graphs_off_calls_its_forward(monkeypatch):
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    graphs, x = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    graph = graphs.capture("key", lambda: x + 1)
    x.fill_(1)
    assert graph.replay().tolist() == [2] * 4 and graphs.pool.captures == 0


# Pools of the host's ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"device": "cuda"}, InvalidOptionError),
        ({"handle": (0, 1)}, InvalidOptionError),
        ({"stream": object()}, MissingCapabilityError),
    ],
)
def test_a_cpu_pool_refuses_a_foreign_device_handle_or_stream(wrong, error):
    with pytest.raises(error):
        GraphPool("cpu", **wrong)


def test_a_pool_cannot_use_the_handle_of_a_closed_pool():
    pool = GraphPool("cpu")
    handle = pool.handle
    pool.close()
    with pytest.raises(PoolClosedError):
        GraphPool("cpu", handle=handle)
    with pytest.raises(PoolClosedError):
        _ = pool.handle


def test_a_cpu_pool_reports_the_device_given_at_construction():
    assert GraphPool("cpu", device="cpu").device == torch.device("cpu")


def test_a_capture_session_entered_twice_ends_at_its_first_exit():
    pool = GraphPool("cpu")
    wrapper = GraphWrapper(lambda x: x, "FULL", pool=pool, options=GraphOptions(lazy=True))
    session = pool.capture_session()
    with session, pool.capture_session():
        session.__enter__()
        assert not wrapper.sealed
    assert not pool.holders._sessions and wrapper.sealed
    with session:
        assert session.captures == 0
    assert not pool.holders._sessions
