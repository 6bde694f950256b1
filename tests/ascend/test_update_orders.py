"""What is queued on which stream, and in which order, around a replay: on no device at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_npu import FakeGraph, FakeNpu, FakeStream

from graphrt.ascend.driver import launch_queue
from graphrt.ascend.update import allocations, brackets
from graphrt.ascend.update.brackets import Groups, TaskHandle
from graphrt.ascend.update.deferred import UpdateWindow
from graphrt.ascend.update.streams import (
    is_update_stream,
    leave_stream,
    new_update_stream,
    note_use,
)
from graphrt.ascend.update.tasks import Tasks
from graphrt.core.base.errors import (
    CaptureError,
    DeviceHangError,
    MissingUpdateError,
    PlatformError,
    TaskContractError,
)


class Memory:
    """Stands for the memory of one pool."""


class Update:
    """One task; `fails` is raised where its operator is issued."""

    def __init__(self, npu: FakeNpu, name: str, handle: TaskHandle) -> None:
        self.npu, self.name, self.handle = npu, name, handle
        self.fails: BaseException | None = None
        self.values: dict[str, Any] = {}
        self.does: Callable[[], object] = lambda: None

    def issue(self) -> None:
        self.npu.log.append(f"{self.npu.current} issues {self.name}")
        self.does()
        if self.fails is not None:
            raise self.fails


class Watchdog:
    """Notes what it is told of steps."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, name: str, stream: FakeStream) -> Any:
        self.log.append(f"{name} on {stream}")
        return Step(self.log)

    def drop(self, step: Any) -> None:
        self.log.append("dropped")


class Step:
    is_launched = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def updating(self, task: str) -> None:
        self.log.append(f"updating {task}")

    def signalled(self, stream: FakeStream) -> None:
        self.log.append(f"signalled on {stream}")

    def launched(self, done: Any) -> None:
        self.is_launched = True
        self.log.append("launched")


@pytest.fixture(autouse=True)
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocation": {"all": {"allocated": 0}}}
    monkeypatch.setattr(allocations, "memory_stats", lambda device: stats)


class World:
    """Tasks of one graph, captured on S0 of a pool."""

    def __init__(
        self, order: Any = "replay_first", watchdog: Any = None, *, count: int = 2
    ) -> None:
        self.count = count
        self.npu = FakeNpu()
        self.memory: Any = Memory()
        self.streams = self.npu.pool
        self.tasks = Tasks(
            self.npu,
            order=order,
            strategy="groups",
            watchdog=watchdog,
            streams=lambda: self.streams,
        )
        self.graph = FakeGraph(self.npu)
        self.updates = self.capture(self.graph)

    def capture(self, graph: FakeGraph) -> list[Any]:
        stream = self.npu.pool[0]
        self.tasks.capture(graph, stream, self.memory)
        updates = []
        with self.npu.stream(stream):
            for place in range(self.count):
                self.tasks.begin(graph)
                updates.append(Update(self.npu, f"task {place}", self.tasks.end(graph)))
        self.tasks.return_to(stream)
        return updates

    def replay(self, changed: bool = True) -> list[str]:
        self.npu.told()
        self.tasks.replay(self.graph, self.updates, changed, "graph")
        return self.npu.told()

    @property
    def updating(self) -> FakeStream:
        stream: FakeStream = self.tasks._streams[self.memory].stream
        return stream


ISSUED = [
    "S1 begin group",
    "S1 issues task 0",
    "S1 end",
    "S1 signals signal 0",
    "S1 begin group",
    "S1 issues task 1",
    "S1 end",
    "S1 signals signal 1",
]


def test_a_captured_task_waits_for_and_resets_its_signal_before_its_group():
    world = World()
    one = ["S0 takes signal 0", "S0 resets signal 0", "S0 group begin", "S0 group end"]
    assert world.npu.told() == one + [each.replace("signal 0", "signal 1") for each in one]
    assert [update.handle.group for update in world.updates] == ["group", "group"]


def test_replay_first_launches_then_updates_after_waiting_for_the_previous_replay():
    world = World()
    launch = ["graph.replay on C", "C records event 1"]
    assert world.replay() == [*launch, *ISSUED]
    launch = ["graph.replay on C", "C records event 2"]
    assert world.replay() == ["S1 waits for event 1", *launch, *ISSUED]
    assert world.replay()[0] == "S1 waits for event 2"


def test_update_first_makes_the_replay_wait_for_all_signals():
    world = World("update_first")
    launch = ["C waits for S1", "graph.replay on C"]
    assert world.replay() == [*ISSUED, *launch, "C records event 1"]
    assert world.replay() == ["S1 waits for event 1", *ISSUED, *launch, "C records event 2"]


def ahead(world: World) -> list[str]:
    world.npu.told()
    with world.tasks.updating(world.graph, world.updates) as window:
        for update in world.updates:
            window.signal(update)
    return world.npu.told()


def test_a_launch_waits_for_the_update_ahead_of_it_and_for_no_older_one():
    world = World()
    world.replay()
    signals = ["S1 signals signal 0", "S1 signals signal 1"]
    for older in (1, 3, 5):
        fence, done = older + 1, older + 2
        told = ahead(world)
        assert told == [f"S1 waits for event {older}", *signals, f"S1 records event {fence}"]
        assert not world.tasks.launch(world.graph, world.updates, "graph")
        launch = ["graph.replay on C", f"C records event {done}"]
        assert world.npu.told() == [f"C waits for event {fence}", *launch]
    # One that came after all waits for its own update.
    assert world.tasks.launch(world.graph, world.updates, "graph")


def test_a_second_update_ahead_takes_back_the_first_and_the_launch_waits_for_the_second():
    world = World()
    ahead(world)
    signals = ["S1 signals signal 0", "S1 signals signal 1"]
    taken_back = ["C waits for event 1", *signals, *SETTLED]
    assert ahead(world) == [*taken_back, *signals, "S1 records event 2"]
    assert not world.tasks.launch(world.graph, world.updates, "graph")
    assert world.npu.told()[:2] == ["C waits for event 2", "graph.replay on C"]


def test_a_launch_that_fails_is_settled_and_watched_no_more():
    watchdog = Watchdog()
    world = World(watchdog=watchdog)
    world.graph.fails = ("replay",)
    world.npu.told()
    with pytest.raises(RuntimeError, match="replay fails"):
        world.tasks.launch(world.graph, world.updates, "graph")
    signals = ["S1 signals signal 0", "S1 signals signal 1"]
    assert world.npu.told() == ["graph.replay on C", *signals, *SETTLED]
    assert watchdog.log == ["graph on C", "dropped"]


def test_a_launch_that_is_interrupted_behind_its_replay_is_watched_until_its_end(monkeypatch):
    watchdog = Watchdog()
    world = World(watchdog=watchdog)

    def interrupted(step: Step, done: Any) -> None:
        step.is_launched = True
        raise KeyboardInterrupt

    monkeypatch.setattr(Step, "launched", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.tasks.launch(world.graph, world.updates, "graph")
    assert watchdog.log == ["graph on C"]
    assert world.npu.told()[-len(SETTLED) :] == SETTLED


def test_a_launched_step_is_watched_from_its_launch_to_its_last_signal():
    watchdog = Watchdog()
    world = World(watchdog=watchdog)
    world.tasks.launch(world.graph, world.updates, "graph")
    assert watchdog.log == ["graph on C", "launched"]
    world.tasks.update(world.graph, world.updates, False)
    told = [what for n in (0, 1) for what in (f"updating task {n}", "signalled on S1")]
    assert watchdog.log[2:] == told


def test_tasks_left_out_of_an_update_are_named_up_to_four():
    world = World(count=6)
    window = UpdateWindow(world.npu.pool[1], world.updates)
    with pytest.raises(TaskContractError) as caught:
        window.check()
    assert "6 without a signal: task 0, task 1, task 2, task 3, …" in str(caught.value)
    assert window.next is world.updates[0]
    for update in world.updates[:2]:
        window.signal(update)
    with pytest.raises(TaskContractError) as caught:
        window.check()
    assert "4 without a signal: task 2, task 3, task 4, task 5\n" in f"{caught.value}\n"
    assert window.next is world.updates[2]
    for update in world.updates[2:]:
        window.signal(update)
    window.check()
    assert window.next is world.updates[5]
    with pytest.raises(TaskContractError, match="no task"):
        window.signal(world.updates[0])


@pytest.mark.parametrize("order", ["replay_first", "update_first"])
def test_unchanged_tasks_are_signalled_without_a_new_issue(order):
    world = World(order)
    told = world.replay(changed=False)
    assert [each for each in told if each.startswith("S1")] == [
        "S1 signals signal 0",
        "S1 signals signal 1",
    ]


SETTLED = [
    "C waits for S1",
    "C signals signal 0",
    "C takes signal 0",
    "C resets signal 0",
    "C signals signal 1",
    "C takes signal 1",
    "C resets signal 1",
    "S1 waits for C",
]


class Boom(Exception):
    pass


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("order", ["replay_first", "update_first"])
def test_a_failed_update_lets_the_replay_finish_and_leaves_no_signal_set(order, place):
    world = World(order)
    world.updates[place].fails = Boom()
    world.npu.told()
    with pytest.raises(Boom):
        world.tasks.replay(world.graph, world.updates, True, "graph")
    told = world.npu.told()
    until = ISSUED[: 4 * place + 3]
    # The region is closed, and the task itself is not signalled by its update.
    if order == "replay_first":
        signals = ["S1 signals signal 0", "S1 signals signal 1"]
        launch = ["graph.replay on C", "C records event 1"]
        assert told == [*launch, *until, *signals, *SETTLED]
    else:
        assert told == [*until, *SETTLED]
    world.updates[place].fails = None
    last = "S1 signals signal 1" if order == "replay_first" else "C records event 1"
    assert world.replay()[-1] == last


@pytest.mark.parametrize("order", ["replay_first", "update_first"])
def test_a_replay_that_cannot_be_launched_leaves_no_signal_set(order):
    world = World(order)
    world.graph.fails = ("replay",)
    with pytest.raises(RuntimeError, match="replay fails"):
        world.replay()
    assert world.npu.told()[-len(SETTLED) :] == SETTLED


@pytest.mark.parametrize("order", ["replay_first", "update_first"])
def test_the_watchdog_records_every_updated_task_and_the_launch(order):
    watchdog = Watchdog()
    world = World(order, watchdog)
    world.replay()
    tasks = [
        "updating task 0",
        "signalled on S1",
        "updating task 1",
        "signalled on S1",
    ]
    first = order == "replay_first"
    told = ["launched", *tasks] if first else [*tasks, "launched"]
    assert watchdog.log == ["graph on C", *told]
    watchdog.log.clear()
    world.updates[1].fails = Boom()
    with pytest.raises(Boom):
        world.replay()
    # What was launched still has to end, and is watched until it does.
    assert ("dropped" in watchdog.log) is not first
    assert watchdog.log[-1] == ("updating task 1" if first else "dropped")


def test_an_update_error_of_torch_npu_names_the_task():
    world = World(count=4)
    text = "fn:x NPU function error: aclmdlRICaptureTaskUpdateEnd, error code is 507000"
    for place in range(4):
        world.updates[place].fails = RuntimeError(text)
        with pytest.raises(TaskContractError, match=f"task {place}") as caught:
            world.replay()
        assert str(caught.value.__cause__) == text
        world.updates[place].fails = None


def test_after_the_launch_queue_ended_every_replay_is_refused(monkeypatch):
    monkeypatch.setattr(launch_queue, "_first", [])
    world = World()
    world.updates[1].fails = RuntimeError("The process exits for this inner error, and so on")
    with pytest.raises(DeviceHangError, match="task 1") as caught:
        world.replay()
    assert caught.value.task == "task 1"
    world.npu.told()
    for step in (
        lambda: world.tasks.replay(world.graph, world.updates, True, "graph"),
        lambda: world.tasks.launch(world.graph, world.updates, "graph"),
        lambda: ahead(world),
    ):
        with pytest.raises(CaptureError, match="start the process anew"):
            step()
        assert world.npu.told() == []


def test_an_allocating_update_is_detected_at_its_first_issue_of_each_kind(monkeypatch):
    world = World()
    count = [0]
    monkeypatch.setattr(
        allocations, "memory_stats", lambda device: {"allocation": {"all": {"allocated": count[0]}}}
    )
    owners = [0]
    monkeypatch.setattr(world.npu, "memory_snapshot", lambda: [{"stream": each} for each in owners])

    threads = [2]
    monkeypatch.setattr(allocations.threading, "active_count", lambda: threads[0])

    def allocate() -> None:
        count[0] += 1

    def allocate_there() -> None:
        allocate()
        owners.append(world.updating.npu_stream)

    world.updates[1].does = allocate
    # Somebody else's, as the update stream has no memory.
    world.replay()
    world.graph = FakeGraph(world.npu)
    world.updates = world.capture(world.graph)
    world.updates[1].does = allocate_there
    with pytest.raises(TaskContractError, match=r"task 1.*allocated"):
        world.replay()
    # Now the stream has memory of before: whose it is is known if there is one thread.
    world.replay()
    threads[0] = 1
    for _ in range(2):
        with pytest.raises(TaskContractError, match=r"task 1.*allocated"):
            world.replay()
    world.replay(changed=False)
    world.updates[1].does = lambda: None
    world.replay()
    world.updates[1].does = allocate
    world.replay()  # known by now


# Streams -------------------------------------------------------------------------------------


def test_the_update_stream_differs_from_capture_and_replay_streams():
    world = World()
    world.replay()
    assert world.updating.name == "S1"
    # Now another pool is captured on it.
    world.tasks.capture(FakeGraph(world.npu), world.npu.pool[1], Memory())  # type: ignore[arg-type]
    world.replay()
    assert world.updating.name == "S2"
    # And the graph is replayed on that one.
    with world.npu.stream(world.npu.pool[2]):
        told = world.replay()
        assert world.updating.name == "S3"
    assert "graph.replay on S2" in told and "S3 begin group" in told


def test_a_stream_with_an_open_capture_is_never_the_update_stream():
    world = World()
    npu = world.npu
    world.streams = [npu.pool[1]]
    world.tasks.capture(FakeGraph(npu), npu.pool[1], Memory())  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match="no stream to update tasks on"):
        world.replay()
    world.tasks.return_to(npu.pool[1])
    world.replay()
    assert world.updating.name == "S1"


def test_the_capture_stream_of_a_pool_is_never_its_update_stream():
    world = World()
    world.streams = [world.npu.pool[0]]
    with pytest.raises(PlatformError, match="no stream to update tasks on"):
        world.replay()


def test_update_streams_are_chosen_unused_first_then_shared_then_used_streams():
    npu = FakeNpu(streams=4)
    avoid = {npu.pool[0].npu_stream}
    note_use(npu.pool[1])
    streams = [new_update_stream(npu.pool, npu.current, avoid) for _ in range(2)]
    assert [each.stream.name for each in streams] == ["S2", "S3"]
    assert all(is_update_stream(each.stream) for each in streams)
    assert not is_update_stream(npu.pool[1])
    # None is left but the used one: another pool's is better, with the same lock.
    again = new_update_stream(npu.pool, npu.current, avoid)
    assert again in streams
    # The one that was given to a pool longest ago.
    assert again is streams[0]
    assert new_update_stream(npu.pool, npu.current, avoid) is streams[1]
    assert new_update_stream(npu.pool, npu.current, avoid) is streams[0]
    # Not the current one, and not what is avoided, whoever updates on it.
    assert new_update_stream(npu.pool, streams[0].stream, avoid) is streams[1]
    more = avoid | {streams[1].id}
    assert new_update_stream(npu.pool, npu.current, more) is streams[0]
    used = new_update_stream(npu.pool, npu.current, {*more, streams[0].id})
    assert used.stream.name == "S1"
    assert is_update_stream(used.stream)


def test_a_pool_that_shares_a_stream_on_which_a_launched_graph_waits_takes_another_one():
    world, graph, memory = World(), FakeGraph(FakeNpu()), Memory()
    world.streams = world.npu.pool[1:3]
    held = [new_update_stream(world.streams, world.npu.current, ()) for _ in range(2)]
    world.replay()
    assert world.updating.name == "S1"
    world.tasks.launch(world.graph, world.updates, "graph")
    world.tasks.capture(graph, world.npu.pool[0], memory)  # type: ignore[arg-type]
    for _ in range(2):
        world.tasks.replay(graph, world.updates, True, "other")
        assert world.tasks._streams[memory].stream.name == "S2"  # type: ignore[index]
    held[1].is_awaited = True
    with pytest.raises(MissingUpdateError, match="on all streams"):
        world.tasks.replay(graph, world.updates, True, "other")
    world.tasks.update(world.graph, world.updates, True)
    world.tasks.replay(graph, world.updates, True, "other")
    assert world.tasks._streams[memory].stream.name == "S1"  # type: ignore[index]


def test_the_least_recently_used_stream_becomes_the_update_stream():
    npu = FakeNpu(streams=3)
    for place in (1, 2, 0):
        note_use(npu.pool[place])
    assert new_update_stream(npu.pool, npu.current, ()).stream.name == "S1"
    note_use(npu.pool[0])
    assert new_update_stream(npu.pool, npu.pool[2], {npu.pool[1].npu_stream}).stream.name == "S0"


def test_streams_used_for_computation_are_chosen_last_for_updates():
    npu = FakeNpu(streams=3)
    for place in (0, 1):
        leave_stream(npu.pool[place])
    assert new_update_stream(npu.pool, npu.current, ()).stream.name == "S2"


def test_an_update_stream_is_released_when_its_holder_is_deleted():
    npu = FakeNpu(streams=1)
    stream = new_update_stream(npu.pool, npu.current, ())
    assert is_update_stream(npu.pool[0])
    del stream
    assert not is_update_stream(npu.pool[0])


# Threads -------------------------------------------------------------------------------------


def blocked(function: Callable[[], object]) -> threading.Thread:
    """A thread that is in `function` and does not come out of it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    return thread


def test_two_threads_that_share_an_update_stream_take_turns():
    world = World()
    world.replay()
    update_stream = world.tasks._streams[world.memory]
    with update_stream.lock:
        world.npu.told()
        thread = blocked(lambda: world.tasks.replay(world.graph, world.updates, True, "graph"))
        assert world.npu.told() == []
    thread.join(timeout=10)
    assert world.npu.told()[-1] == "S1 signals signal 1"


@pytest.mark.parametrize("what", ["a capture", "a replay of another pool"])
def test_using_an_update_stream_waits_for_its_update_and_ends_its_updating(what):
    """What is launched inside of an update would be taken for a part of it."""
    world, other = World(), World()
    world.replay()
    stream = world.updating
    update_stream = world.tasks._streams[world.memory]

    def use() -> None:
        if what == "a capture":
            other.tasks.capture(FakeGraph(other.npu), stream, Memory())  # type: ignore[arg-type]
        else:
            other.npu.current = stream
            other.replay()

    with update_stream.lock:
        other.npu.told()
        thread = blocked(use)
        assert other.npu.told() == []
        # One that has found its stream, and waits for its turn on it.
        late = blocked(world.replay)
    for each in (thread, late):
        each.join(timeout=10)
        assert not each.is_alive()
    world.replay()
    assert world.updating != stream
    assert not is_update_stream(stream)


def test_a_step_whose_update_stream_was_given_up_takes_another_stream():
    world = World()
    world.replay()
    update_stream = world.tasks._streams[world.memory]
    with update_stream.lock:
        world.npu.told()
        told: list[list[str]] = []
        thread = blocked(lambda: told.append(world.replay()))
        update_stream.is_left = True
    thread.join(timeout=10)
    (orders,) = told
    assert "S2 begin group" in orders and "S1 begin group" not in orders
    # Behind the replay before, as ever.
    assert orders[0] == "S2 waits for event 1"


# Brackets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_without_a_value_wait_an_event_is_created_on_another_stream_than_the_capture(
    monkeypatch, first
):
    monkeypatch.setattr(brackets, "has_value_wait", lambda: False)
    npu = FakeNpu(streams=2)
    capturing, side = npu.pool
    npu._turn = itertools.cycle([npu.pool[first], npu.pool[1 - first]])
    with npu.stream(capturing):
        Groups(npu).begin(FakeGraph(npu))
    created = [f"{side} signals signal 0", f"{side} resets signal 0"]
    assert npu.told()[:3] == [*created, f"{capturing} takes signal 0"]


def test_aborting_a_failed_task_twice_closes_its_group_once():
    npu = FakeNpu()
    groups, graph = Groups(npu), FakeGraph(npu)
    groups.abort(graph)
    assert npu.told() == []
    groups.begin(graph)
    npu.told()
    groups.abort(graph)
    groups.abort(graph)
    assert npu.told() == ["C group end"]


def test_an_interrupted_update_is_closed_and_its_signals_settled():
    world = World()
    world.updates[0].fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.replay()
    told = world.npu.told()
    assert told.index("S1 end") == told.index("S1 issues task 0") + 1
    assert told[-len(SETTLED) :] == SETTLED
