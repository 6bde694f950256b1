"""A replay that does not end is named: which graph, which step, which task."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_models import Decoder, differing, eager_outputs, replayed, runner, steps

from graphrt import GraphOptions, GraphRunner
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.ascend.watchdog import Watchdog, WatchedStep
from graphrt.core.base.errors import DeviceHangError, InvalidOptionError

TIMEOUT_S = 0.5
# A trial waits for its replays, as these tests must not: first steps are replayed alone.
UNTRIED = GraphOptions(check="off")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Watched:
    """A runner of four layers whose platform notes the hangs it sees."""

    def __init__(self) -> None:
        self.hangs: list[DeviceHangError] = []
        self.platform = AscendPlatform(
            AscendOptions(hang_timeout_s=TIMEOUT_S, on_hang=self.hangs.append)
        )
        self.decoder = Decoder(4)
        self.run: GraphRunner = runner(
            self.decoder, sizes=(8,), platform=self.platform, options=UNTRIED
        )
        self.run.capture()
        self.steps = steps(4, most=8)
        self.expected = eager_outputs(self.run, self.steps)

    def replay(self, place: int) -> torch.Tensor:
        return replayed(self.run, self.steps[place])

    def update_stream(self) -> Any:
        return self.platform._tasks._streams[self.run.pool.memory].stream

    def serves(self) -> bool:
        """After the hang is over the steps are right again."""
        until(lambda: self.platform._watchdog is not None and not self.platform._watchdog._steps)
        outputs = [self.replay(place).cpu() for place in range(4)]
        return differing(outputs, self.expected) == []


def external_event(stream: Any) -> Any:
    """An event for which `stream` now waits."""
    event = torch.npu.ExternalEvent()
    event.wait(stream)
    event.reset(stream)
    return event


@pytest.mark.npu
def test_the_watchdog_names_the_task_of_a_stuck_update_stream():
    watched = Watched()
    watched.replay(0)
    other = watched.platform.new_stream()
    blocked = external_event(watched.update_stream())
    watched.replay(1)
    with pytest.raises(DeviceHangError) as caught:
        watched.platform.synchronize()
    error = caught.value
    assert "8 tokens" in str(error.graph) and error.task == "layers.0"
    assert error.step == 3  # after the one of the capture
    assert watched.hangs == [error]
    with pytest.raises(DeviceHangError):
        watched.replay(2)
    blocked.record(other)
    assert watched.serves()


@pytest.mark.npu
def test_the_watchdog_names_the_task_a_stuck_host_is_updating():
    watched = Watched()
    issue, calls, go_on = watched.decoder.task.issue, [0], threading.Event()

    def issue_or_wait(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            go_on.wait(timeout=20)
        issue(*args, **kwargs)

    watched.decoder.task.issue = issue_or_wait
    device = torch.npu.current_device()

    def work() -> None:
        torch.npu.set_device(device)
        watched.replay(0)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: watched.hangs)
    assert watched.hangs[0].task == "layers.2"
    assert "host" in str(watched.hangs[0])
    go_on.set()
    thread.join(timeout=20)
    assert watched.serves()


@pytest.mark.npu
def test_the_watchdog_names_the_graph_of_a_lost_signal():
    watched = Watched()
    (entry,) = watched.run.graphs.owners()[0].entries.values()
    task = entry.tasks[2]
    handle = task.handle

    class Silent:
        def record(self, stream: Any) -> None:
            pass

    task.handle = dataclasses.replace(handle, event=Silent())
    watched.replay(0)
    with pytest.raises(DeviceHangError, match="all tasks are signalled"):
        watched.platform.synchronize()
    task.handle = handle
    handle.event.record(watched.platform.new_stream())
    assert watched.serves()


@pytest.mark.npu
def test_a_hang_without_an_on_hang_callback_is_a_warning():
    platform = AscendPlatform(AscendOptions(hang_timeout_s=TIMEOUT_S))
    with runner(Decoder(2), sizes=(8,), platform=platform, options=UNTRIED) as run:
        run.capture()
        (step,) = steps(1, most=8)
        replayed(run, step)
        update_stream = platform._tasks._streams[run.pool.memory].stream
        blocked = external_event(update_stream)
        replayed(run, step)
        with (
            pytest.warns(RuntimeWarning, match=r"layers\.0"),
            pytest.raises(DeviceHangError),
        ):
            platform.synchronize()
        blocked.record(platform.new_stream())
        until(lambda: platform._watchdog is not None and not platform._watchdog._steps)


def test_an_on_hang_that_raises_is_a_warning_and_the_next_hang_is_told_too():
    told: list[DeviceHangError] = []

    def on_hang(error: DeviceHangError) -> None:
        told.append(error)
        raise ValueError("of the host")

    ended = [False]
    npu = SimpleNamespace(current_device=lambda: 0)
    over = SimpleNamespace(query=lambda: ended[0])
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True))
    watchdog = Watchdog(npu, 1e-6, on_hang, lambda: False)
    watchdog._thread = threading.current_thread()
    for count in (1, 2):
        ended[0] = False
        watchdog.begin(f"graph {count}", stream).launched(over)
        watchdog._look()
        with pytest.warns(RuntimeWarning, match=r"(?s)ValueError.*of the host.*does not end"):
            watchdog._look()
        assert [error.step for error in told] == [*range(1, count + 1)]
        ended[0] = True
        watchdog.check()


def test_a_launched_graph_without_any_update_is_told_from_one_whose_tasks_are_signalled():
    event = SimpleNamespace(query=lambda: True)
    step = WatchedStep("8 tokens", number=1, device=0, started=event)
    assert step.blocked_at() == (None, "the host has not launched the graph")
    step.launched(event)
    assert step.blocked_at() == (None, "no update of its tasks has come")
    step.updating("layers.0")
    step.signalled(SimpleNamespace(record_event=lambda: event))
    assert "all tasks are signalled" in step.blocked_at()[1]


def test_a_step_that_ended_after_all_raises_no_error_though_no_poll_came_since():
    watchdog = Watchdog(None, 60.0, None, lambda: False)
    watchdog.error = DeviceHangError("a step does not end", expected="its end", advice="wait")
    watchdog.check()
    assert watchdog.error is None


@pytest.mark.npu
def test_the_watchdog_never_reports_steps_that_end_in_time():
    watched = Watched()
    todo = steps(60, most=8)
    expected = eager_outputs(watched.run, todo)
    outputs = []
    for step in todo:
        outputs.append(replayed(watched.run, step).cpu())
        time.sleep(0.01)
    assert differing(outputs, expected) == []
    assert watched.hangs == []


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "60", True])
def test_an_invalid_hang_timeout_is_refused(timeout_s):
    with pytest.raises(InvalidOptionError, match="hang_timeout_s"):
        AscendOptions(hang_timeout_s=timeout_s)


def test_an_on_hang_that_cannot_be_called_is_refused():
    with pytest.raises(InvalidOptionError, match="on_hang"):
        AscendOptions(hang_timeout_s=60, on_hang=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UPDATE_ORDER", "record_first"),
        ("UPDATE_STRATEGY", "magic"),
        ("HANG_TIMEOUT_S", "soon"),
    ],
)
def test_invalid_ascend_options_from_the_environment_are_refused(variable, value):
    name = f"GRAPHRT_ASCEND_{variable}"
    with pytest.raises(InvalidOptionError, match=f"^{name} .*(?s:.*)try: {name}="):
        AscendOptions.from_environment({name: value})


def test_ascend_options_are_read_from_the_environment():
    environment = {
        "GRAPHRT_ASCEND_UPDATE_ORDER": "update_first",
        "GRAPHRT_ASCEND_UPDATE_STRATEGY": "auto_dispatch",
        "GRAPHRT_ASCEND_HANG_TIMEOUT_S": "2.5",
    }
    assert AscendOptions.from_environment(environment) == AscendOptions(
        update_order="update_first", update_strategy="auto_dispatch", hang_timeout_s=2.5
    )
    assert AscendOptions.from_environment({}) == AscendOptions()
