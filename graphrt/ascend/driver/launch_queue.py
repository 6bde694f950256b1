"""torch_npu's launch queue: finds out that it has ended, as it does at the first error in it.

By default (TASK_QUEUE_ENABLE=1) torch_npu hands operators to a thread that launches them. If one
fails there, the thread ends, and some later call raises the error. From then on torch_npu silently
drops every operator, on all streams: results are what was in memory before. Only a new process
helps.

A host may catch that error, so graphrt may never see it. It finds out by the thread's CPU time:

1. When a device is in use, `watch_queue` finds the thread that launches.
2. Steps and captures ask for its CPU time: a thread that has ended has none. A step asks once more
   behind its replay, when its inputs went through the queue. If they took no time, the thread may
   hang since the error (it does where the host waited for the queue).
3. Then events are put into the queue until one takes the thread time; if none does, the queue has
   ended. This is also done for steps that put nothing into the queue, once a millisecond at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from graphrt.ascend.driver.library import torch_npu
from graphrt.core.base.errors import LaunchQueueError
from graphrt.core.base.texts import error_text
from graphrt.core.device.contract import error_chain

_ENDED = "The process exits for this inner error"
_LAUNCHING, _RELEASING = "acl_thread", "release_thread"
_TASKS = Path("/proc/self/task")
_START_TICKS = 19
"""The place of a thread's start in its `stat`, behind its name and state."""
_APART_S = 1e-3
"""The least seconds between two checks by events."""
_EVENTS, _PATIENCE_S = 200, 0.5
"""A queue that takes no time for so many events, over so long, has ended."""

# Process-wide, as the queue is. `_first` is the error that ended it, `_launching` its thread.
_first: list[str] = []
_launching: list[_Launching] = []


class _Launching:
    """The thread of the queue, which launches operators, and its CPU time."""

    __slots__ = ("_begun_ns", "_clock", "_event", "_next_s", "_npu")

    def __init__(self, npu: Any, thread: int) -> None:
        self._npu = npu
        self._event = npu.Event()
        # CPUCLOCK_PERTHREAD and CPUCLOCK_SCHED of Linux.
        self._clock = ~thread << 3 | 6
        # The thread's CPU time when the last step began.
        self._begun_ns = -1
        # When events may be put into the queue again.
        self._next_s = 0.0

    def begin(self) -> None:
        """Ask before a step; raises `LaunchQueueError`."""
        used_ns = self.used_ns()
        if used_ns == self._begun_ns:
            self.give_event()
        self._begun_ns = used_ns

    def end(self) -> None:
        """Ask behind the replay of a step; raises `LaunchQueueError`."""
        if self.used_ns() == self._begun_ns:
            self.give_event()

    def used_ns(self) -> int:
        """The CPU time that the thread has used; raises `LaunchQueueError` if it has ended."""
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            raise _noticed() from None

    def give_event(self) -> None:
        """Put events into the queue; raises `LaunchQueueError` if the thread launches none."""
        if time.monotonic() < self._next_s or self._npu.is_current_stream_capturing():
            return
        if not self.launches():
            raise _noticed()
        self._next_s = time.monotonic() + _APART_S

    def launches(self) -> bool:
        """Whether the thread uses CPU time for events that are put into the queue.

        One event may take no time: a virtual machine's clock leaves out the time that its host took
        away. A queue that has ended takes no time for any number of events.
        """
        before_ns = self.used_ns()
        # Not the current stream: a capture's may be a direct one, whose events bypass the queue.
        stream = self._npu.default_stream()
        until_s = time.monotonic() + _PATIENCE_S
        events = 0
        while events < _EVENTS or time.monotonic() < until_s:
            events += 1
            named(partial(self._event.record, stream))
            named(partial(_wait_for_queue, stream))
            if self.used_ns() != before_ns:
                return True
        return False


class _Thread(NamedTuple):
    """A thread of this process; they sort by their start."""

    start_ticks: int
    number: int
    name: str


def has_queue_ended(error: BaseException | None) -> bool:
    """Whether `error`, or one behind it, says that the queue has ended; remembered if so."""
    for link in error_chain(error) if error is not None else ():
        if isinstance(link, RuntimeError) and _ENDED in error_text(link):
            _first.append(error_text(link).splitlines()[0])
            return True
    return False


def check_queue() -> None:
    """Raise `LaunchQueueError` once the queue has ended."""
    if _first:
        raise queue_ended()
    for launching in _launching:
        launching.begin()


def named(call: Callable[[], object]) -> None:
    """Do a call of torch_npu; raises `LaunchQueueError` if its error is the end of the queue."""
    try:
        call()
    except RuntimeError as error:
        if has_queue_ended(error):
            raise queue_ended() from error
        raise


def check_replayed() -> None:
    """Raise `LaunchQueueError`, behind a replay, if the queue has ended since `check_queue`."""
    for launching in _launching:
        launching.end()


def checked_before(read: Callable[[], int]) -> Callable[[], int]:
    """`read`, which every step calls, after a `check_queue`."""

    def checked() -> int:
        check_queue()
        return read()

    return checked


def watch_queue() -> None:
    """Look for the thread that launches; it gets its name with its first launch.

    There is none with TASK_QUEUE_ENABLE=0, and with several devices a process has several that
    cannot be told apart. Then only an error that graphrt sees says that a queue has ended.
    """
    if _launching:
        return
    threads = _threads_now()
    releasing = [each for each in threads if each.name == _RELEASING]
    if len(releasing) != 1:
        return
    # It is started right before the one that releases. A device's own threads, which it starts,
    # inherit its name; on a busy machine they too are older than the one that releases.
    launching = [each for each in threads if each.name == _LAUNCHING and each < releasing[0]]
    if launching:
        thread = _Launching(torch_npu().npu, min(launching).number)
        # A coarse clock may stand still though the thread works: then it is not watched.
        if all(thread.launches() for _ in range(3)):
            _launching.append(thread)
    elif any(each.name == _LAUNCHING for each in threads) and not _first:
        _first.append("an error from before the first pool of graphs")


def queue_ended() -> LaunchQueueError:
    """The error of a queue that has ended. It is no lack of room: no other size can be captured."""
    return LaunchQueueError(
        "an operator failed in torch_npu's queue of launches, which has ended: no later work of "
        "this process gets to the device",
        got=_first[0] if _first else None,
        expected="operators that do not fail",
        advice="start the process anew; with TASK_QUEUE_ENABLE=0 torch_npu goes on after the error",
    )


def _noticed() -> LaunchQueueError:
    """The same, where the thread's CPU time showed it: first notes torch_npu's own error, if that
    was not raised yet."""
    try:
        _wait_for_queue(torch_npu().npu.default_stream())
    except RuntimeError as error:
        has_queue_ended(error)
    if not _first:
        _first.append("an error that torch_npu has raised before")
    return queue_ended()


def _wait_for_queue(stream: Any) -> None:
    """Wait until the queue is empty; raises the error in it."""
    stream.npu_stream  # noqa: B018 - a property that waits


def _threads_now() -> list[_Thread]:
    threads = []
    try:
        numbers = os.listdir(_TASKS)
    except OSError:  # not Linux
        return []
    for number in numbers:
        try:
            text = (_TASKS / number / "stat").read_text()
        except OSError:  # the thread has ended meanwhile
            continue
        name, _, rest = text[text.index("(") + 1 :].rpartition(")")
        threads.append(_Thread(int(rest.split()[_START_TICKS]), int(number), name.lower()))
    return threads
