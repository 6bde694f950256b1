"""A replay that never ends becomes an error that names the graph, the step and the task.

Events are recorded around every watched replay and after every signal, and a thread of its own
queries the events of steps under way: no host synchronisation. Only replays of graphs with tasks
are watched: no other graphs, no eager work, and no collective that hangs outside of such a graph.
A thread that waits inside the driver (`tensor.cpu()`) cannot be woken before CANN's own timeout. So
the error goes to `on_hang` at once, is raised by a waiting `Platform.synchronize()` and by every
later replay with tasks. Without `on_hang` it is a warning too.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from graphrt.core.base.errors import DeviceHangError


class WatchedStep:
    """One watched replay: its events, and how far the host and the update stream got."""

    def __init__(self, graph: str, number: int, device: int, started: Any) -> None:
        self.graph = graph
        self.number = number
        self.device = device
        self.task: str | None = None
        """The task that the host updates now."""
        # The events before and behind the replay; the latter is None before its launch.
        self._started = started
        self._done: Any = None
        # (task, event behind its signal) in the order of the signals.
        self._signals: list[tuple[str, Any]] = []
        # When a query first said that the device runs the step.
        self._seen_s: float | None = None

    def updating(self, task: str) -> None:
        """The host begins to update `task`."""
        self.task = task

    def signalled(self, stream: Any) -> None:
        """The host has queued the signal of its task on the update stream."""
        self._signals.append((self.task or "", stream.record_event()))
        self.task = None

    def launched(self, done: Any) -> None:
        """The graph is queued, and `done` comes after it."""
        self._done = done

    @property
    def is_launched(self) -> bool:
        return self._done is not None

    def is_over(self) -> bool:
        return self._done is not None and bool(self._done.query())

    def running_s(self) -> float:
        """For how long the device has run the step, counted from the first query that said so."""
        if self._seen_s is None:
            if not self._started.query():
                return 0.0
            self._seen_s = time.monotonic()
        return time.monotonic() - self._seen_s

    def blocked_at(self) -> tuple[str | None, str]:
        """The task that the replay waits for, if one is known, and why it waits."""
        for name, event in self._signals:
            if not event.query():
                return name, f"the update stream has not come to the signal of task {name!r}"
        if self.task is not None:
            return self.task, f"the host has not finished the update of task {self.task!r}"
        if self._done is None:
            return None, "the host has not launched the graph"
        if not self._signals:
            return None, "no update of its tasks has come"
        return None, "all tasks are signalled, so something else in the graph does not end"


class Watchdog:
    """Watches steps from a thread that sleeps while there are none."""

    def __init__(
        self,
        npu: Any,
        timeout_s: float,
        on_hang: Callable[[DeviceHangError], object] | None,
        is_capturing: Callable[[], bool],
    ) -> None:
        """`is_capturing` returns True while events may not be queried."""
        self.error: DeviceHangError | None = None
        """The error of a step that has not ended since."""
        self._npu = npu
        self._timeout_s = timeout_s
        self._poll_s = min(timeout_s / 8, 1.0)
        self._on_hang = on_hang
        self._is_capturing = is_capturing
        # The steps under way, and how many were watched so far.
        self._steps: list[WatchedStep] = []
        self._count = 0
        # Notified when a step begins and at the end; held where `_steps` changes.
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, graph: str, stream: Any) -> WatchedStep:
        """Watch a step that is about to be queued on `stream`.

        Raises the `DeviceHangError` of a step before, unless that has ended after all.
        """
        self.check()
        with self._news:
            self._count += 1
            step = WatchedStep(
                graph, self._count, self._npu.current_device(), stream.record_event()
            )
            self._steps.append(step)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="graphrt-watchdog", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
            self._news.notify()
        return step

    def drop(self, step: WatchedStep) -> None:
        """Forget a step that was not launched."""
        with self._news:
            if step in self._steps:
                self._steps.remove(step)

    def check(self) -> None:
        """Raise the `DeviceHangError` of a step that still runs."""
        if self.error is not None:
            self._look()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Wait on the host until no watched step is under way; raises `DeviceHangError`."""
        while self._steps:
            self._look()
            self.check()
            time.sleep(0.0005)

    def close(self) -> None:
        """End the thread."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        device: int | None = None
        while True:
            with self._news:
                while not self._steps and not self._closed:
                    self._news.wait()
                if self._closed:
                    return
                step_device = self._steps[0].device
            if step_device != device:
                device = step_device
                self._npu.set_device(device)
            self._look()
            time.sleep(self._poll_s)

    def _look(self) -> None:
        """Forget the steps that are over, and find one that has run for too long."""
        if self._is_capturing():
            return
        error = None
        with self._news:
            self._steps = [step for step in self._steps if not step.is_over()]
            late = [step for step in self._steps if step.running_s() > self._timeout_s]
            if not late:
                self.error = None
            elif self.error is None:
                error = self.error = self._error(late[0])
        if error is None:
            return
        if self._on_hang is None:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            return
        try:
            self._on_hang(error)
        except Exception as raised:  # the thread goes on, or no later hang would be seen
            said = f"on_hang raised {raised!r}, given: {error}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    def _error(self, step: WatchedStep) -> DeviceHangError:
        task, why = step.blocked_at()
        error = DeviceHangError(
            f"the replay of graph {step.graph} in step {step.number} does not end",
            got=f"{step.running_s():.1f} s on the device; {why}",
            expected=f"at most {self._timeout_s} s (hang_timeout_s)",
            advice="replay graphs with tasks through graphrt only, and let nothing on the update "
            "stream wait for the graph",
        )
        error.graph, error.step, error.task = step.graph, step.number, task
        return error
