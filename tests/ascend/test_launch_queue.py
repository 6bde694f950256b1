"""torch_npu's queue of launches has ended: each step and capture says so, whoever saw the error."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from fake_npu import FakeNpu
from schedules import need_simulator, python

from graphrt.ascend.driver import launch_queue
from graphrt.errors import LaunchQueueError

HOST = "after_an_operator_of_the_host"


@pytest.mark.npu
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            f"{HOST}('FULL', seen=True, waits=False, on_device=False)", marks=pytest.mark.long
        ),
        f"{HOST}('FULL', seen=True, waits=True, on_device=True)",
        f"{HOST}('PIECEWISE', seen=True, waits=True, on_device=False)",
        pytest.param(
            f"{HOST}('FULL_AND_PIECEWISE', seen=False, waits=False, on_device=True)",
            marks=pytest.mark.long,
        ),
        pytest.param("after_an_error_in_staging('FULL')", marks=pytest.mark.long),
        "after_an_error_in_staging('PIECEWISE')",
        "with_tasks()",
        "wrapper_of_a_host()",
    ],
)
def test_no_output_is_handed_out_after_the_launch_queue_ended(call):
    need_simulator()
    out = python(f"import ended_queue; ended_queue.{call}; print('named')", hang_ms=500)
    assert out.splitlines()[-1] == "named"


@pytest.mark.npu
def test_400_steps_of_a_living_launch_queue_raise_no_queue_error():
    need_simulator()
    assert python("import ended_queue; ended_queue.alive(400); print('lives')").endswith("lives\n")


@pytest.mark.npu
def test_a_failed_operator_without_a_launch_queue_ends_nothing():
    need_simulator()
    out = python(
        "import ended_queue; ended_queue.without_a_queue(); print('goes on')",
        environment={"TASK_QUEUE_ENABLE": "0"},
    )
    assert out.splitlines()[-1] == "goes on"


class Queue:
    """A thread that does what it is given, as torch_npu's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given, self.done, self.ends, self.hangs = [threading.Event() for _ in range(4)]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        monkeypatch.setattr(launch_queue, "_first", [])
        monkeypatch.setattr(launch_queue, "_PATIENCE_S", 0.01)
        monkeypatch.setattr(launch_queue, "_noticed", launch_queue.queue_ended)
        monkeypatch.setattr(launch_queue, "_wait_for_queue", self._wait)
        self.npu = npu = FakeNpu()
        npu.Event = lambda: type("Event", (), {"record": lambda self, stream: None})()  # type: ignore[attr-defined]
        assert self.thread.native_id is not None
        self.launching = launch_queue._Launching(npu, self.thread.native_id)
        monkeypatch.setattr(launch_queue, "_launching", [self.launching])

    def _run(self) -> None:
        while not self.ends.is_set():
            self.given.wait()
            self.given.clear()
            self.done.set()

    def _wait(self, stream: object) -> None:
        # What is issued on other streams goes round the queue, as on torch_npu's SyncLaunchStream.
        if stream is self.npu.default_stream():
            self.launch()

    def launch(self) -> None:
        if not self.hangs.is_set():
            self.done.clear()
            self.given.set()
            self.done.wait()

    def rest(self) -> None:
        """Wait until the thread sleeps: it uses time even after it is done, on the way to that."""
        stat = Path(f"/proc/self/task/{self.thread.native_id}/stat")
        used_ns = -1
        while used_ns != (used_ns := self.launching.used_ns()) or ") S " not in stat.read_text():
            time.sleep(0.05)

    def end(self) -> None:
        self.ends.set()
        self.given.set()
        self.thread.join()
        # Python lets go of it a little earlier.
        while os.path.exists(f"/proc/self/task/{self.thread.native_id}"):
            time.sleep(0.001)


@pytest.fixture
def queue(monkeypatch):
    made = Queue(monkeypatch)
    yield made
    made.end()


def test_steps_with_and_without_launches_pass_the_queue_check(queue):
    for turn in range(20):
        launch_queue.check_queue()
        if turn % 3:
            queue.launch()
        launch_queue.check_replayed()


def test_the_queue_check_passes_on_a_stream_that_bypasses_the_queue(queue):
    """As where a segment is replayed on the stream that captures."""
    queue.npu.set_stream(queue.npu.Stream())
    launch_queue.check_queue()
    launch_queue.check_replayed()
    assert not launch_queue._first


def test_a_step_is_refused_when_the_launch_thread_has_ended(queue):
    launch_queue.check_queue()
    queue.end()
    for ask in (launch_queue.check_queue, launch_queue.check_replayed):
        with pytest.raises(LaunchQueueError):
            ask()
    with pytest.raises(LaunchQueueError):
        launch_queue.checked_before(lambda: 7)()


def test_steps_are_refused_for_good_after_a_launch_queue_error(queue):
    launch_queue.check_queue()
    assert launch_queue.has_queue_ended(RuntimeError(f"a failed launch. {launch_queue._ENDED}"))
    for _ in range(2):
        with pytest.raises(LaunchQueueError, match="a failed launch"):
            launch_queue.check_queue()


def test_a_replay_is_refused_when_the_launch_thread_hangs(queue):
    launch_queue.check_queue()
    queue.launch()
    launch_queue.check_replayed()
    queue.hangs.set()
    queue.rest()
    launch_queue.check_queue()
    with pytest.raises(LaunchQueueError):
        launch_queue.check_replayed()


def test_a_launch_thread_whose_clock_stalls_briefly_counts_as_alive(queue, monkeypatch):
    """As on a virtual machine whose host takes the time that the thread used."""
    used_ns = [0] * 7
    monkeypatch.setattr(
        launch_queue._Launching, "used_ns", lambda self: used_ns.pop() if used_ns else 1
    )
    launch_queue.check_queue()
    launch_queue.check_replayed()
    assert not launch_queue._first and not used_ns


def test_the_oldest_thread_before_the_release_thread_is_the_launch_thread(monkeypatch):
    threads = [
        launch_queue._Thread(10, 100, "python"),
        launch_queue._Thread(20, 101, "acl_thread"),
        launch_queue._Thread(20, 102, "release_thread"),
        launch_queue._Thread(20, 103, "acl_thread"),
        launch_queue._Thread(21, 99, "acl_thread"),
    ]
    releasing_late = launch_queue._Thread(23, 105, "release_thread")
    watched: list[int] = []

    class Launching:
        def __init__(self, npu: object, thread: int) -> None:
            watched.append(thread)

        def launches(self) -> bool:
            return True

    monkeypatch.setattr(launch_queue, "_first", [])
    monkeypatch.setattr(launch_queue, "_Launching", Launching)
    monkeypatch.setattr(launch_queue, "torch_npu", lambda: type("T", (), {"npu": None}))

    def look(*queue_threads: launch_queue._Thread) -> list[int]:
        watched.clear()
        monkeypatch.setattr(launch_queue, "_launching", [])
        monkeypatch.setattr(launch_queue, "_threads_now", lambda: list(queue_threads))
        launch_queue.watch_queue()
        return list(watched)

    assert look(*threads) == [101]
    # A thread of the device, started by 101 before the one that releases.
    assert look(*threads[:2], launch_queue._Thread(20, 102, "acl_thread"), releasing_late) == [101]
    assert look(threads[0]) == []  # no queue
    assert look(threads[1]) == []
    assert look(threads[2]) == []  # not named yet, or in a way that nobody knows
    assert look(*threads, launch_queue._Thread(30, 200, "release_thread")) == []
    assert not launch_queue._first
    # It is gone, and those that it had started are there.
    assert look(threads[0], *threads[2:]) == []
    assert launch_queue._first == ["an error from before the first pool of graphs"]


def test_the_list_of_threads_contains_the_main_thread():
    assert os.getpid() in {each.number for each in launch_queue._threads_now()}
