"""A step, and whatever changes graphs, has the pool to itself from its first look to its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import (
    Batch,
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    Host,
    InputSpec,
    KeyedGraphs,
    Reason,
    eager_break,
)
from graphrt.core.capture.guard import hand_back, withhold
from graphrt.core.replay.pool import in_turn
from graphrt.errors import InvalidInputError, PoolBusyError, PoolClosedError, VerificationError
from tests.threads.load import KINDS, run

# Threads and their runners are collected often, beside the tests of all other files.
pytestmark = pytest.mark.usefixtures("frozen_heap")
FULL = GraphMode.FULL


def runner_of(forward: Callable[..., Any], **arguments: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=arguments.pop("mode", "FULL"),
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        platform=arguments.pop("platform", "cpu"),
        **arguments,
    )


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returned or raised in another thread."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert results, "it hangs"
    return results[0]


CHANGES: dict[str, Callable[[GraphRunner], object]] = {
    "release": GraphRunner.release,
    "capture": GraphRunner.capture,
    "capture_next": GraphRunner.capture_next,
    "capture_next, a share": lambda runner: runner.capture_next(share=1),
    "recapture": GraphRunner.recapture,
    "recapture, outdated": lambda runner: runner.recapture(only_outdated=True),
    "close": GraphRunner.close,
    "weights_changed": GraphRunner.weights_changed,
    "verify": lambda runner: runner.verify(x=torch.ones(2, 4)),
    "step": lambda runner: runner(x=torch.ones(3, 4)),
    "pool.clear_graphs": lambda runner: runner.pool.clear_graphs(),
    "pool.drop": lambda runner: runner.pool.drop(BatchDescriptor(2)),
    "pool.close": lambda runner: runner.pool.close(),
    "wrapper.drop": lambda runner: runner.graphs.owners()[0].drop(BatchDescriptor(2)),
    "wrapper.clear_graphs": lambda runner: runner.graphs.owners()[0].clear_graphs(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [2, 9])
def test_changes_from_another_thread_during_a_step_raise_pool_busy(
    monkeypatch: pytest.MonkeyPatch, change: str, rows: int
) -> None:
    runner = runner_of(lambda x: x * 2)
    runner.capture()
    runner(x=torch.ones(2, 4))
    dispatch, results = runner.dispatcher.dispatch, []

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        answer = dispatch(*args, **kwargs)
        monkeypatch.undo()
        results.append(in_thread(lambda: CHANGES[change](runner)))
        return answer

    monkeypatch.setattr(runner.dispatcher, "dispatch", dispatched)
    x = torch.rand(rows, 4)
    assert torch.equal(runner(x=x), x * 2)
    assert isinstance(results[0], PoolBusyError)
    assert runner.last_dispatch.reason is (Reason.HIT if rows == 2 else Reason.TOO_LARGE)
    assert runner.pool.owner is None and torch.equal(runner(x=x), x * 2)
    assert sum(runner.report().reasons.values()) == 3


@pytest.mark.parametrize("change", CHANGES)
def test_changes_from_another_thread_during_a_capture_raise_pool_busy(change: str) -> None:
    results: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread() and asks:
            results.append(in_thread(lambda: CHANGES[change](runner)))
        return x * 2

    asks = False
    runner = runner_of(forward)
    runner.capture()
    asks = True
    runner.recapture()
    asks = False
    assert results and all(isinstance(each, PoolBusyError) for each in results)
    x = torch.rand(3, 4)
    assert torch.equal(runner(x=x), x * 2)


def test_a_recapture_holds_the_pool_from_beginning_to_end() -> None:
    owners: list[object] = []

    class Noting(GraphPool):
        """Notes whose turn it is, one after the other."""

        @property
        def owner(self) -> object:
            return owners[-1]

        @owner.setter
        def owner(self, owner: object) -> None:
            owners.append(owner)

    runner = runner_of(lambda x: x * 2, pool=Noting("cpu"), platform=None)
    runner.capture()
    owners[:] = [None]
    runner.recapture()
    assert [place for place, owner in enumerate(owners) if owner is None] == [0, len(owners) - 1]


def test_a_step_refused_by_a_busy_pool_changes_no_state() -> None:
    runner = runner_of(lambda x: x * 2, options=GraphOptions(check="off"))
    runner.capture()
    slot = runner.slot(Batch(2))
    slot["x"].fill_(3)
    before = runner.dispatcher.counts(), runner.report().live_tokens, runner.last_dispatch
    with pytest.raises(PoolBusyError, match="another"):
        in_turn(runner.pool, "another", lambda: runner(slot))
    assert before == (
        runner.dispatcher.counts(),
        runner.report().live_tokens,
        runner.last_dispatch,
    )
    assert runner(slot).tolist() == [[6.0] * 4] * 2


def test_a_wrapper_looks_up_its_graph_while_holding_the_pool() -> None:
    pool = GraphPool("cpu")
    context = ForwardContext(FULL, BatchDescriptor(4))
    results: list[Any] = []

    class Slots(dict):
        """Has another thread destroy the graph as it is looked up."""

        def get(self, slot: Any, default: Any = None) -> Any:
            entry = super().get(slot, default)
            results.append(in_thread(lambda: wrapper.drop(BatchDescriptor(4))))
            return entry

    wrapper = GraphWrapper(
        lambda x: x + 1,
        FULL,
        pool=pool,
        read_context=lambda: context,
        options=GraphOptions(lazy=True),
    )
    x = torch.zeros(4)
    wrapper(x)
    wrapper(x)
    wrapper._graphs.by_slot = Slots(wrapper._graphs.by_slot)
    assert wrapper(x).tolist() == [1] * 4
    assert isinstance(results[0], PoolBusyError) and wrapper.entries


def test_two_threads_replaying_a_key_get_results_or_pool_busy() -> None:
    graphs, x = KeyedGraphs(GraphPool("cpu")), torch.zeros(4)
    graph = graphs.capture("key", lambda: x + 1)
    with pytest.raises(PoolBusyError):
        in_turn(graphs.pool, "another thread", graph.replay)
    assert graph.replay().tolist() == [1] * 4
    errors: list[BaseException] = []

    def replay() -> None:
        for _ in range(2000):
            try:
                graph.replay()
            except PoolBusyError:
                pass
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=replay) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors and graphs.pool.owner is None


# Steps that raised -------------------------------------------------------------------------------


class Raises(Exception):
    pass


class Failing:
    """A runner whose forward and bind raise when they are told to."""

    def __init__(self, **arguments: Any) -> None:
        self.now = False
        self.runner = runner_of(self.forward, host=Host(bind=self.bind), **arguments)
        self.runner.capture()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def bind(self, *what: Any) -> None:
        if self.now:
            raise Raises


@pytest.mark.parametrize("check", ["off", "capture", "always"])
@pytest.mark.parametrize("outputs", ["pool", "clone"])
def test_a_step_that_raised_is_not_counted_as_a_hit(check: str, outputs: str) -> None:
    failing = Failing(options=GraphOptions(check=check, outputs=outputs))
    runner, x = failing.runner, torch.ones(2, 4)
    for _ in range(3):
        runner(x=x)
    hits = runner.report().reasons[Reason.HIT]
    failing.now = True
    with pytest.raises(Raises):
        runner(x=x)
    with pytest.raises(InvalidInputError):
        runner(Batch(2), x=torch.ones(1, 4))
    reasons = runner.report().reasons
    assert (reasons[Reason.HIT], reasons[Reason.FAILED]) == (hits, 2)
    assert runner.last_dispatch.reason is Reason.FAILED
    assert sum(runner.report().steps.values()) == hits
    failing.now = False
    assert runner(x=x).tolist() == [[2.0] * 4] * 2
    assert runner.report().reasons[Reason.HIT] == hits + 1
    assert runner.report().live_tokens == 2 * (hits + 1)


def test_a_raising_step_of_a_quarantined_graph_is_counted_once() -> None:
    number = [1]

    def forward(x: Tensor) -> Tensor:
        if number[0] == 3:
            raise Raises
        return x * number[0]

    runner = runner_of(forward, options=GraphOptions(strict=True))
    runner.capture()
    number[0] = 2
    for _ in range(2):
        with pytest.raises(VerificationError):
            runner(x=torch.ones(2, 4))
    reasons = runner.report().reasons
    assert reasons[Reason.HIT] == 0 and sum(reasons.values()) == 2
    runner = runner_of(forward)
    runner.capture()
    number[0] = 1
    with pytest.warns(match="eagerly from here on"):
        runner(x=torch.ones(2, 4))
    number[0] = 3
    with pytest.raises(Raises):
        runner(x=torch.ones(2, 4))
    reasons = runner.report().reasons
    assert (reasons[Reason.HIT], reasons[Reason.QUARANTINED]) == (0, 2)
    assert sum(reasons.values()) == 2


# Ends that were interrupted ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reset_graphs", "release_memory"])
def test_a_second_close_of_a_runner_completes_an_interrupted_close(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    runner = runner_of(lambda x: x * 2)
    runner.capture()
    pool, platform = runner.pool, runner.platform

    def interrupted(*what: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(platform, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.close()
    assert pool.owner is None
    released, memory = [], pool.memory
    monkeypatch.setattr(platform, "release_memory", released.append)
    runner.close()
    assert pool.closed and released == [memory]
    runner.close()
    assert len(released) == 1
    with pytest.raises(PoolClosedError):
        runner(x=torch.ones(2, 4))


@pytest.mark.parametrize("where", ["reset_graphs", "release_memory"])
def test_a_second_close_of_a_pool_completes_an_interrupted_close(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pool, released = GraphPool("cpu"), []
    graphs = KeyedGraphs(pool)
    graphs.capture("key", lambda: torch.zeros(4) + 1)

    def interrupted(*what: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.platform, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    memory = pool.memory
    monkeypatch.setattr(pool.platform, "release_memory", released.append)
    for _ in range(2):
        pool.close()
    assert pool.closed and released == [memory]


# All of it at once -------------------------------------------------------------------------------


def check(steps: int, kinds: list[str], device: str = "cpu") -> None:
    totals = run(steps, kinds, device=device)
    assert not totals.wrong, str(totals)
    assert totals.steps >= steps and {*totals.done} == {
        "capture_next",
        "release",
        "recapture",
        "verify",
    }, str(totals)


@pytest.mark.parametrize(
    "kinds",
    # Four runners at once have every kind.
    [*(pytest.param([kind], marks=pytest.mark.long) for kind in KINDS), list(KINDS)],
    ids=" ".join,
)
def test_threads_get_right_values_while_graphs_are_captured_and_dropped(kinds: list[str]) -> None:
    check(1000, kinds)


@pytest.mark.long
@pytest.mark.parametrize("kinds", [["lazy"], list(KINDS)], ids=["1 runner", "4 runners"])
def test_100_000_steps_in_8_threads_give_right_values(kinds: list[str]) -> None:
    check(100_000, kinds)


@pytest.mark.cuda
@pytest.mark.parametrize("kinds", [["lazy"], list(KINDS)], ids=["1 runner", "4 runners"])
def test_20_000_steps_in_8_threads_on_a_gpu_give_right_values(kinds: list[str]) -> None:
    check(20_000, kinds, "cuda")


def test_a_thread_that_asks_a_capture_for_its_name_as_its_segment_ends_gets_pool_busy_error():
    """Its look at the context has begun when the context gets its own class back."""
    pool = GraphPool("cpu")
    with ForwardContext(FULL, BatchDescriptor(4), metadata="the host's", query_len=2) as context:
        pool.owner = context
        withhold(context)
        look = type(context).__getattribute__
        hand_back(context)
        assert look(context, "mode") is FULL
        assert (look(context, "metadata"), look(context, "query_len")) == ("the host's", 2)
        with pytest.raises(AttributeError):
            look(context, "refusal")
        assert isinstance(pool.busy_error(None), PoolBusyError)
        pool.owner = None


def test_threads_that_find_a_pool_busy_with_captures_get_pool_busy_error_alone():
    """Segments begin and end all the time, so contexts change their class under other threads."""

    @eager_break
    def part(x: Tensor) -> Tensor:
        return x + 1

    def forward(x: Tensor) -> Tensor:
        for _ in range(20):
            x = part(x * 1)
        return x

    served = runner_of(forward, mode="PIECEWISE", pieces="breakable")
    others, stop = list[BaseException](), threading.Event()

    def step() -> None:
        while not stop.is_set():
            try:
                served(x=torch.ones(3, 4))
            except PoolBusyError:
                continue
            except BaseException as error:
                others.append(error)

    threads = [threading.Thread(target=step) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(5):
            with suppress(PoolBusyError):
                served.recapture()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        sys.setswitchinterval(interval)
    assert others == []
