"""Captures that begin, end or are aborted: the calls made on the device, the pool and the tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_models import Decoder, differing, eager_outputs, replay_all, replayed, runner, steps
from fake_npu import FakeEvent, FakeGraph, FakeNpu, FakeStream

from graphrt import GraphPool, KeyedGraphs, Reason, wrapper_class
from graphrt.ascend import ACLGraphWrapper, AscendPlatform, captures
from graphrt.ascend.captures import AclCaptures
from graphrt.ascend.driver import launch_queue
from graphrt.ascend.options import update_order_of
from graphrt.ascend.update.streams import is_update_stream, new_update_stream
from graphrt.ascend.watchdog import Watchdog
from graphrt.core.base.errors import (
    CaptureError,
    DeviceHangError,
    InvalidOptionError,
    MissingCapabilityError,
    NestedCaptureError,
    StreamBudgetError,
)
from graphrt.observe import ranges


class Told:
    """Stands for the tasks, and for the memory of a pool."""

    def __init__(self, npu: FakeNpu, routed: bool = False) -> None:
        self.npu, self.routed = npu, routed

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any) -> Any:
            said = ", ".join(str(each) for each in args if isinstance(each, FakeStream))
            self.npu.log.append(f"{name}({said})" + f" on {self.npu.current}" * (name == "abort"))
            return {"handle": "pool", "stop_routing": self.routed}.get(name)

        return note


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The free streams of the device, as the next calls ask for them; None where nobody can say."""
    answers: list[int | None] = []
    monkeypatch.setattr(captures, "available_streams", lambda: answers.pop(0) if answers else None)
    return answers


class World:
    def __init__(self, routed: bool = False) -> None:
        self.npu = FakeNpu()
        told: Any = Told(self.npu, routed)
        self.memory = told
        self.captures = AclCaptures(self.npu, told)

    def begin(self, graph: FakeGraph) -> list[str]:
        self.captures.begin(graph, self.memory)
        return self.npu.told()


BEGUN = [
    "handle()",
    "capture(C)",
    "graph.capture_begin(pool, thread_local)",
    "add()",
    "capturing_on(C)",
]


def test_a_capture_begins_thread_local_and_returns_its_stream_at_the_end(free):
    world = World()
    graph = FakeGraph(world.npu)
    assert world.begin(graph) == BEGUN
    assert world.captures.end(graph)
    assert world.npu.told() == ["graph.capture_end on C", "return_to(C)"]
    assert not world.captures.is_any_open()


@pytest.mark.parametrize("routed", [True, False])
def test_a_capture_that_fails_is_ended_on_its_stream_and_reset(free, routed):
    world = World(routed)
    graph = FakeGraph(world.npu)
    world.begin(graph)
    with world.npu.stream(world.npu.pool[0]):
        world.captures.abort(graph)
    ended = ["return_to(C)", "abort() on C", "graph.capture_end on C", "graph.reset"]
    # A capture that ended gives back its share by itself.
    assert world.npu.told() == ended
    assert not world.captures.is_any_open()


@pytest.mark.parametrize("routed", [True, False])
def test_a_capture_that_cannot_be_ended_releases_its_share_of_the_pool(free, routed):
    world = World(routed)
    graph = FakeGraph(world.npu, fails=("capture_end",))
    world.begin(graph)
    with pytest.raises(RuntimeError):
        world.captures.end(graph)
    world.npu.told()
    world.captures.abort(graph)
    assert world.npu.told() == [
        "return_to(C)",
        "abort() on C",
        "graph.capture_end on C",
        "graph.reset",
        "stop_routing()",
        "release_share()",
        *["abandon()"] * routed,
    ]


@pytest.mark.parametrize("routed", [True, False])
def test_a_failed_capture_begin_releases_a_pool_share_only_after_routing(free, routed):
    world = World(routed)
    graph = FakeGraph(world.npu, fails=("capture_begin", "capture_end"))
    with pytest.raises(RuntimeError):
        world.begin(graph)
    world.npu.told()
    world.captures.abort(graph)
    assert world.npu.told()[4:] == ["stop_routing()"] + ["release_share()", "abandon()"] * routed


def test_beginning_a_capture_inside_an_open_capture_is_refused(free):
    world = World()
    world.npu.capturing = True
    with pytest.raises(NestedCaptureError):
        world.begin(FakeGraph(world.npu))
    assert world.npu.told() == []


def test_beginning_a_capture_after_the_launch_queue_ended_is_refused(free, monkeypatch):
    monkeypatch.setattr(launch_queue, "_first", ["gone"])
    world = World()
    with pytest.raises(CaptureError, match="start the process anew"):
        world.begin(FakeGraph(world.npu))
    assert world.npu.told() == []


def test_a_capture_is_refused_when_too_few_streams_are_free(free):
    world = World()

    def capture(*counts: int | None) -> None:
        free[:] = counts
        graph = FakeGraph(world.npu)
        world.begin(graph)
        world.captures.end(graph)

    capture(10, 7)
    capture(7, 6)
    capture(3, 0)
    capture(None, None)
    world.npu.told()
    with pytest.raises(StreamBudgetError, match="2 streams"):
        capture(2, 0)
    assert world.npu.told() == []


# The watchdog --------------------------------------------------------------------------------


class Watch:
    """A watchdog whose thread is never started, and one step of it."""

    def __init__(self) -> None:
        self.npu = FakeNpu()
        self.capturing = False
        self.hangs: list[DeviceHangError] = []
        self.dog = Watchdog(self.npu, 0.01, self.hangs.append, lambda: self.capturing)
        self.dog._thread = object()  # type: ignore[assignment]
        self.started, self.done = FakeEvent("started"), FakeEvent("done", is_over=False)

    def step(self, started: FakeEvent | None = None) -> Any:
        step = self.dog.begin("graph", self.npu.current)
        step._started = started or self.started
        step.launched(self.done)
        return step

    def look(self) -> None:
        self.dog._look()


def test_the_watchdog_queries_no_event_during_a_capture():
    watch = Watch()
    watch.step()
    watch.capturing = True
    watch.look()
    assert watch.started.asked == watch.done.asked == 0
    watch.capturing = False
    watch.look()
    assert watch.started.asked and watch.done.asked


def test_the_hang_timeout_counts_from_the_devices_start_of_the_step():
    watch = Watch()
    step = watch.step(FakeEvent("started", is_over=False))
    for _ in range(3):
        watch.look()
        assert step.running_s() == 0.0
    assert watch.hangs == []
    step._started.is_over = True
    deadline_passed(watch)
    assert len(watch.hangs) == 1


def deadline_passed(watch: Watch) -> None:
    watch.look()
    time.sleep(0.02)
    watch.look()


def test_a_hang_is_reported_once_and_raised_by_steps_until_the_device_recovers():
    watch = Watch()
    watch.step()
    deadline_passed(watch)
    watch.look()
    (hang,) = watch.hangs
    for _ in range(2):
        with pytest.raises(DeviceHangError) as caught:
            watch.dog.begin("graph", watch.npu.current)
        assert caught.value is hang
    watch.done.is_over = True
    watch.look()
    assert watch.dog._steps == [] and watch.dog.error is None
    watch.step()


def test_the_hang_report_names_the_task_with_the_missing_signal():
    watch = Watch()
    step = watch.step()
    events = [FakeEvent("first"), FakeEvent("second", is_over=False), FakeEvent("third")]
    for place, event in enumerate(events):
        step.updating(f"layers.{place}")
        step._signals.append((f"layers.{place}", event))
    assert step.blocked_at()[0] == "layers.1"
    events[1].is_over = True
    assert step.blocked_at()[0] == "layers.2"  # the host is still at it
    step.signalled(watch.npu.current)
    assert step.blocked_at()[0] is None


def test_the_watchdog_checks_every_step_and_forgets_finished_steps():
    watch = Watch()
    for _ in range(3):
        watch.step()
    middle = watch.dog._steps[1]
    middle._done = FakeEvent("done early")
    watch.look()
    assert len(watch.dog._steps) == 2 and middle not in watch.dog._steps
    watch.dog.drop(middle)
    watch.dog.drop(watch.dog._steps[0])
    assert len(watch.dog._steps) == 1
    watch.done.is_over = True
    watch.dog.wait()
    assert watch.dog._steps == []


def test_the_watchdog_thread_queries_on_the_device_of_the_step():
    watch = Watch()
    watch.dog._thread = None
    watch.npu.current_device = lambda: 3  # type: ignore[method-assign]
    watch.step()
    deadline = time.monotonic() + 5
    while not watch.hangs and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.dog.close()
    assert "device 3" in watch.npu.log
    assert watch.hangs and not watch.dog._thread.is_alive()  # type: ignore[union-attr]


# The platform --------------------------------------------------------------------------------


class Simple(AscendPlatform):
    """The platform over a `torch.npu` that only takes notes."""

    def __init__(self, npu: Any) -> None:
        super().__init__()
        self.__dict__["_npu"] = npu


class Interrupted(FakeNpu):
    """Whose stream is not put back, as an interrupt in the end of a `with` leaves it."""

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = stream
        yield


def test_entering_a_stream_orders_the_stream_behind_the_caller_and_back():
    npu = Interrupted()
    platform = Simple(npu)

    def interrupted() -> None:
        with platform.on_stream(npu.pool[0]):
            npu.log.append(f"inside, on {npu.current}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert npu.told() == ["S0 waits for C", "inside, on S0", "C waits for S0"]
    assert npu.current.name == "C"
    platform.order_after(npu.pool[0])
    assert npu.told() == ["C waits for S0"]


@pytest.mark.parametrize("how", ["entered", "made to wait"])
def test_computing_on_an_update_stream_ends_its_use_for_updates(how):
    npu = FakeNpu()
    platform = Simple(npu)
    held = new_update_stream(npu.pool, npu.current, ())
    if how == "entered":
        with platform.on_stream(held.stream):
            assert held.is_left
    else:
        npu.current = held.stream
        platform.order_after(npu.pool[3])
    assert held.is_left and not is_update_stream(held.stream)


@pytest.mark.parametrize(
    ("device", "environment", "order"),
    [
        ("Ascend910B3", {}, "replay_first"),
        ("Ascend310P3", {}, "update_first"),
        ("Ascend910B3", {"ENPU_ENABLE": "true"}, "update_first"),
        ("Ascend910B3", {"ENPU_ENABLE": "True"}, "update_first"),
        ("Ascend910B3", {"ENPU_ENABLE": "false"}, "replay_first"),
        ("Ascend910B3", {"ENPU_ENABLE": ""}, "replay_first"),
    ],
)
def test_the_update_order_follows_the_device_and_the_environment(device, environment, order):
    assert update_order_of(device, environment) == order


def test_the_acl_graph_wrapper_belongs_to_the_ascend_platform():
    assert ACLGraphWrapper.platform_name == "ascend"
    assert issubclass(wrapper_class(AscendPlatform()), ACLGraphWrapper)


@pytest.mark.npu
def test_a_wrapper_without_a_pool_captures_on_an_npu():
    wrapper = ACLGraphWrapper(lambda x: x + 1, "FULL")
    assert wrapper.pool.platform.name == "ascend"
    assert wrapper.pool.platform.device_type == "npu"
    wrapper.pool.close()


def test_an_acl_graph_wrapper_refuses_the_pool_of_another_platform():
    with pytest.raises(InvalidOptionError, match=r"'cpu'[\s\S]*GraphPool\('ascend'\)"):
        ACLGraphWrapper(lambda x: x + 1, "FULL", pool=GraphPool("cpu"))


@pytest.mark.parametrize("options", ["x", {"reserve_streams": 8}])
def test_an_ascend_platform_refuses_options_of_another_type(options):
    with pytest.raises(InvalidOptionError, match="options=AscendOptions"):
        AscendPlatform(options)


class Broken(Decoder):
    """Fails in the middle of its capture, inside of a task or between two."""

    breaks: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        issue = self.task.issue

        def issue_or_fail(*args: Any, **kwargs: Any) -> None:
            issue(*args, **kwargs)
            if torch.npu.is_current_stream_capturing():
                if self.breaks == "task":
                    raise ZeroDivisionError("inside of a task")
                if self.breaks == "sync":
                    torch.npu.synchronize()

        self.task.issue = issue_or_fail


@pytest.mark.npu
@pytest.mark.parametrize(("breaks", "error"), [("task", ZeroDivisionError), ("sync", CaptureError)])
def test_failed_captures_leak_neither_memory_nor_streams_nor_groups(breaks, error):
    from graphrt.ascend.driver.library import available_streams

    decoder = Broken(2)
    todo = steps(4, most=8)

    def figures() -> tuple[Any, ...]:
        torch.npu.empty_cache()
        return torch.npu.memory_reserved(), available_streams()

    with runner(decoder, sizes=(8,)) as run:
        seen = []
        for _ in range(5):
            decoder.breaks = breaks
            with pytest.raises(error):
                run.capture()
            assert not torch.npu.is_current_stream_capturing()
            decoder.breaks = None
            seen.append(figures())
        assert len(set(seen[1:])) == 1, seen
        run.capture()
        assert differing(replay_all(run, todo), eager_outputs(run, todo)) == []
        run.release()
        assert figures() == seen[-1]


@pytest.mark.npu
def test_releasing_graphs_returns_their_memory_to_the_device():
    pool = GraphPool("ascend")
    # Made first: its caches of 2 MB each take a segment of 20 MB, which is the model's.
    decoder = Decoder(2)
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    with runner(decoder, pool=pool) as run:
        run.capture()
        assert pool.bytes() > 0
        assert torch.npu.memory_reserved() > before
        run.release()
    del run  # with its input buffers, which are not the pool's
    pool.close()
    assert torch.npu.memory_reserved() == before


@pytest.mark.npu
def test_ranges_are_refused_before_the_graphs_are_captured_again():
    with runner(Decoder(1), sizes=(8,)) as run:
        run.capture()
        with pytest.raises(MissingCapabilityError, match="kernels"), ranges(run):
            run.recapture()
        (step,) = steps(1, most=8)
        replayed(run, step)
        assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.npu
def test_attention_in_a_graph_by_key_is_advised_to_a_runner():
    x = torch.zeros(4, 2, 128, dtype=torch.bfloat16, device="npu")
    table, decoder = torch.zeros(4, 4, dtype=torch.int32, device="npu"), Decoder(1)
    graphs = KeyedGraphs(GraphPool("ascend"))
    with pytest.raises(CaptureError, match=r"561002(?s:.*)try: GraphRunner"):
        graphs.capture(4, lambda: decoder(x, table))
