"""Updates that come after the launch of their graph: equal to eager, and never a hang."""

from __future__ import annotations

import gc
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from attention_models import HEADS, PAGES, WIDTH, Decoder, runner, steps
from schedules import need_simulator, python

from graphrt import (
    DEFERRED,
    UNCHANGED,
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    forward_context,
    wrapper_class,
)
from graphrt.ascend import AscendPlatform
from graphrt.core.base.errors import (
    DeviceHangError,
    InvalidUpdateError,
    MissingUpdateError,
    PoolBusyError,
    TaskContractError,
)
from tests.core.interrupts import Places

pytestmark = pytest.mark.npu

SIZE = 8
DESCRIPTOR = BatchDescriptor(SIZE, SIZE, True, query_len=1)


class Host:
    """A host with a wrapper of its own, which updates after the call."""

    def __init__(self, pool: GraphPool | None = None) -> None:
        self.decoder = Decoder(3)
        self.pool = pool or GraphPool()
        options = GraphOptions(lazy=True)
        make = wrapper_class(self.pool.platform)
        self.wrapper = make(self.decoder, "FULL", pool=self.pool, options=options)
        self.x = torch.zeros((SIZE, HEADS, WIDTH), dtype=torch.bfloat16).to("npu")
        self.table = torch.zeros((SIZE, PAGES), dtype=torch.int32).to("npu")
        self.todo = steps(30, most=SIZE, seed=5)
        self.call("FULL", self.todo[0].updates)

    def fill(self, step) -> None:
        reqs = step.batch.num_reqs
        self.x.zero_()
        self.table.zero_()
        self.x[:reqs].copy_(step.values["x"])
        self.table[:reqs].copy_(step.values["block_table"])

    def call(self, mode: str, updates) -> torch.Tensor:
        with forward_context(mode, DESCRIPTOR, updates=updates):
            return self.wrapper(self.x, self.table)

    def differs(self, count: int, updates=None) -> list[int]:
        wrong = []
        for place, step in enumerate(self.todo[:count]):
            self.fill(step)
            expected = self.call("NONE", step.updates).cpu()
            out = self.call("FULL", DEFERRED)
            self.wrapper.update(step.updates if updates is None else updates)
            if not torch.equal(out.cpu(), expected):
                wrong.append(place)
        return wrong


@pytest.fixture
def host():
    return Host()


def steps_in_flight() -> None:
    """For other schedules of the device: no step waits on the host for the one before."""
    host = Host()
    segment = host.wrapper.entries[DESCRIPTOR].parts[0]
    staged = []
    for step in host.todo[:12]:
        host.fill(step)
        staged.append((host.x.clone(), host.table.clone()))
    for ahead in (False, True):
        outputs, expected = [], []
        torch.npu.synchronize()
        for step, (x, table) in zip(host.todo, staged, strict=False):
            host.x.copy_(x)
            host.table.copy_(table)
            if not ahead:
                out = host.call("FULL", DEFERRED)
                host.wrapper.update(step.updates)
            else:
                with host.pool.platform.updating(segment.graph, segment.tasks) as window:
                    for task in segment.tasks:
                        task.values = task.spec.fitted(step.updates["attention"], context())
                        torch.npu.graph_task_update_begin(window.stream, task.handle.group)
                        task.issue()
                        torch.npu.graph_task_update_end(window.stream)
                        window.signal(task)
                out = host.call("FULL", DEFERRED)
            outputs.append(out.clone())
        torch.npu.synchronize()
        for step, (x, table) in zip(host.todo, staged, strict=False):
            host.x.copy_(x)
            host.table.copy_(table)
            expected.append(host.call("NONE", step.updates).cpu())
        assert all(torch.equal(a.cpu(), b) for a, b in zip(outputs, expected, strict=True)), ahead


def context():
    return forward_context("FULL", DESCRIPTOR)


def test_steps_with_deferred_updates_equal_eager(host):
    assert host.differs(30) == []


def test_a_pool_is_taken_until_a_deferred_update_is_in(host, monkeypatch):
    platform, owners = host.pool.platform, []
    update = platform.update_deferred

    def noted(*args, **kwargs):
        update(*args, **kwargs)
        owners.append(host.pool.owner)

    monkeypatch.setattr(platform, "update_deferred", noted)
    host.fill(host.todo[1])
    host.call("FULL", DEFERRED)
    waiting = host.pool.owner
    host.wrapper.update(host.todo[1].updates)
    assert waiting is not None and owners == [waiting] and host.pool.owner is None


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("lazy", marks=pytest.mark.long),
        "lazy-random:3",
        *(pytest.param(f"random:{seed}", marks=pytest.mark.long) for seed in range(1, 21)),
    ],
)
def test_steps_with_deferred_updates_equal_eager_under_every_schedule(schedule):
    need_simulator()
    code = "import test_deferred; test_deferred.steps_in_flight(); print('held')"
    assert python(code, schedule=schedule).splitlines()[-1] == "held"


def test_an_unchanged_update_repeats_the_lengths_of_the_previous_replay(host):
    step = host.todo[3]
    host.fill(step)
    first = host.call("FULL", step.updates).clone()
    second = host.call("FULL", DEFERRED)
    host.wrapper.update(UNCHANGED)
    assert torch.equal(first.cpu(), second.cpu())


def test_a_missing_deferred_update_raises_at_the_next_step_once(host):
    host.call("FULL", DEFERRED)
    with pytest.raises(MissingUpdateError, match="got none"):
        host.call("FULL", host.todo[0].updates)
    torch.npu.synchronize()
    assert host.differs(4) == []


def test_a_step_from_another_thread_does_not_end_a_waiting_step(host):
    host.fill(host.todo[0])
    out = host.call("FULL", DEFERRED)
    with ThreadPoolExecutor(1) as pool, pytest.raises(PoolBusyError):
        pool.submit(host.call, "FULL", host.todo[0].updates).result()
    host.wrapper.update(host.todo[0].updates)
    assert torch.equal(out.cpu(), host.call("NONE", host.todo[0].updates).cpu())


def test_a_capture_raises_for_a_waiting_step_and_the_next_capture_works(host):
    run = runner(Decoder(1), pool=host.pool)
    host.fill(host.todo[0])
    host.call("FULL", DEFERRED)
    with pytest.raises(MissingUpdateError):
        run.capture_next()
    assert run.report().graphs == ()
    run.capture_next()
    assert len(run.report().graphs) == 1


def test_clearing_graphs_while_a_step_waits_raises_and_destroys_nothing(host):
    host.call("FULL", DEFERRED)
    with pytest.raises(MissingUpdateError):
        host.wrapper.clear_graphs()
    host.wrapper.clear_graphs()
    torch.npu.synchronize()


@pytest.mark.parametrize("how", ["close", "clear_graphs", "drop"])
def test_graphs_of_another_pool_are_not_destroyed_while_this_thread_owes_an_update(host, how):
    other = Host(GraphPool())
    destroy = {
        "close": other.pool.close,
        "clear_graphs": other.wrapper.clear_graphs,
        "drop": lambda: other.pool.drop(DESCRIPTOR),
    }[how]
    step = host.todo[0]
    host.fill(step)
    out = host.call("FULL", DEFERRED)
    with pytest.raises(MissingUpdateError, match=r"in this thread[\s\S]*update that step first"):
        destroy()
    assert list(other.wrapper.entries) == [DESCRIPTOR]
    host.wrapper.update(step.updates)
    assert torch.equal(out.cpu(), host.call("NONE", step.updates).cpu())
    assert other.differs(2) == []
    destroy()
    assert not other.wrapper.entries
    assert host.differs(2) == []


def test_an_update_after_its_steps_end_raises_once_in_any_thread(host):
    step = host.todo[0]
    host.fill(step)
    host.call("FULL", DEFERRED)
    assert host.pool.owner.expire()
    late = partial(host.wrapper.update, step.updates)
    with ThreadPoolExecutor(1) as threads, pytest.raises(MissingUpdateError, match="in time"):
        threads.submit(late).result()
    torch.npu.synchronize()
    assert host.differs(2) == []


def test_an_update_that_waits_for_the_device_itself_is_told_so(host):
    issue = host.decoder.task.issue

    def waiting(*args, **kwargs):
        torch.npu.synchronize()
        issue(*args, **kwargs)

    host.fill(host.todo[0])
    host.decoder.task.issue = waiting
    with pytest.raises(DeviceHangError, match=r"layers\.0[\s\S]*wait for nothing"):
        host.call("FULL", host.todo[1].updates)
    host.decoder.task.issue = issue
    assert host.differs(2) == []


def test_a_refused_deferred_update_leaves_the_step_waiting(host):
    step = host.todo[0]
    host.fill(step)
    out = host.call("FULL", DEFERRED)
    for wrong in ({"attention": {}}, {"other": {}}, None, DEFERRED):
        with pytest.raises((InvalidUpdateError, MissingUpdateError)):
            host.wrapper.update(wrong)
    host.wrapper.update(step.updates)
    assert torch.equal(out.cpu(), host.call("NONE", step.updates).cpu())
    with pytest.raises(MissingUpdateError, match="no step waits"):
        host.wrapper.update(step.updates)


def test_a_deferred_update_that_raises_ends_its_step(host):
    issue = host.decoder.task.issue
    calls = []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        issue(*args, **kwargs)

    host.fill(host.todo[0])
    host.call("FULL", DEFERRED)
    host.decoder.task.issue = fail
    with pytest.raises(ZeroDivisionError):
        host.wrapper.update(host.todo[1].updates)
    torch.npu.synchronize()
    with pytest.raises(MissingUpdateError, match="failed half-way"):
        host.call("FULL", UNCHANGED)
    host.decoder.task.issue = issue
    assert host.differs(4) == []


@pytest.mark.parametrize("lines", [False, True], ids=["places", "lines"])
@pytest.mark.parametrize("interrupted", ["call", "update"])
def test_an_interrupt_anywhere_in_a_deferred_step_never_hangs_and_the_next_is_right(
    host, interrupted, lines
):
    def run(name, function):
        return places(function) if name == interrupted else function()

    tracebacks = []  # kept, as a debugger does: they must not hold a lock
    for at in itertools.count():
        places, out = Places(at, lines=lines), None
        step = host.todo[1 + at % 29]
        host.fill(step)
        expected = host.call("NONE", step.updates).cpu()
        update = partial(host.wrapper.update, step.updates)
        try:
            with forward_context("FULL", DESCRIPTOR, updates=DEFERRED):
                out = run("call", partial(host.wrapper, host.x, host.table))
            run("update", update)
        except KeyboardInterrupt as interrupt:
            tracebacks.append(interrupt)
        else:
            assert places.seen <= at and at > 50
            break
        try:
            update()
        except MissingUpdateError:
            pass
        else:
            assert torch.equal(out.cpu(), expected), places.where
        torch.npu.synchronize()
        assert host.pool.owner is None, places.where
        assert not host.pool.platform._tasks._launched, places.where
        assert host.differs(1) == [], places.where
        assert host.call("FULL", UNCHANGED) is not None


def test_a_wrapper_that_is_dropped_before_its_update_leaves_its_pool_to_others(host):
    host.call("FULL", DEFERRED)
    del host.wrapper
    gc.collect()
    torch.npu.synchronize()
    ends = time.monotonic() + 10
    while host.pool.owner is not None and time.monotonic() < ends:
        time.sleep(0.001)
    assert Host(host.pool).differs(2) == []


def test_a_host_window_must_signal_every_task_exactly_once(host):
    platform = host.pool.platform
    assert isinstance(platform, AscendPlatform)
    entry = host.wrapper.entries[DESCRIPTOR]
    segment = entry.parts[0]
    for ahead in (True, False):
        host.fill(host.todo[0])
        before = host.call("FULL", host.todo[0].updates).cpu()

        def update(segment, tasks):
            with platform.updating(segment.graph, segment.tasks) as window:
                for task in tasks:
                    window.signal(task)

        if ahead:
            update(segment, segment.tasks)
            after = host.call("FULL", DEFERRED)
        else:
            after = host.call("FULL", DEFERRED)
            entry.waiting.end_by(host.pool, lambda segment: update(segment, segment.tasks))
        assert torch.equal(after.cpu(), before)
        for wrong in (segment.tasks[:2], [*segment.tasks, segment.tasks[0]]):
            with pytest.raises(TaskContractError):
                update(segment, wrong)
        torch.npu.synchronize()
        assert host.differs(3) == []


def test_a_step_with_its_own_updates_discards_an_update_ahead(host):
    """Its signals would let the tasks run before they are updated."""
    segment = host.wrapper.entries[DESCRIPTOR].parts[0]
    for step in host.todo[:6]:
        with host.pool.platform.updating(segment.graph, segment.tasks) as window:
            for task in segment.tasks:
                window.signal(task)
        host.fill(step)
        expected = host.call("NONE", step.updates).cpu()
        assert torch.equal(host.call("FULL", step.updates).cpu(), expected)
    assert host.differs(4) == []


def test_a_graph_runner_refuses_deferred_updates():
    with runner(Decoder(2)) as run:
        run.capture()
        (step,) = steps(1, most=8)
        with pytest.raises(InvalidUpdateError, match="DEFERRED"):
            run(step.batch, updates=DEFERRED, **step.values)
        assert run(step.batch, updates=step.updates, **step.values) is not None
