"""Tasks of captured graphs, and their update around a replay, without a host synchronisation.

A step's update may begin only when the last replay of the same graph is over: a signal that is
given twice before a wait takes it once is lost. So the update stream waits for that replay. This
wait is queued before the new replay. Queued after it, the update stream would wait for the new
replay, which waits for its signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphrt.ascend.driver.explain import explain_replay
from graphrt.ascend.driver.launch_queue import check_queue, has_queue_ended, queue_ended
from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.options import UpdateOrder, UpdateStrategy
from graphrt.ascend.update.allocations import AllocationWatch
from graphrt.ascend.update.brackets import AutoDispatch, Groups, TaskHandle
from graphrt.ascend.update.deferred import (
    Ahead,
    Launch,
    UpdateWindow,
    too_early,
)
from graphrt.ascend.update.streams import UpdateStream, leave_stream, new_update_stream
from graphrt.ascend.watchdog import Watchdog, WatchedStep
from graphrt.core.base.errors import (
    DeviceHangError,
    GraphRTError,
    LaunchQueueError,
    MissingUpdateError,
)
from graphrt.core.device.contract import TaskUpdate


class Tasks:
    """Captures the task groups of a platform's graphs, and updates them around replays.

    `replay` launches a graph and updates its tasks. A host that updates apart from the launch calls
    `launch`, then `update` or `updating`; or `updating` first, where the device needs the update
    before the launch (`update_first`).
    """

    def __init__(
        self,
        npu: Any,
        *,
        order: UpdateOrder,
        strategy: UpdateStrategy,
        watchdog: Watchdog | None,
        streams: Callable[[], Sequence[Any]],
    ) -> None:
        """`streams` returns the streams of the current device on which tasks are updated."""
        self._npu = npu
        self.update_first = order == "update_first"
        self._brackets = Groups(npu) if strategy == "groups" else AutoDispatch(npu)
        self._watchdog = watchdog
        self._streams_to_update_on = streams
        self._allocations = AllocationWatch(npu)
        # Ids of the streams that updates must not run on: those of open captures, and by memory
        # those that its graphs were captured on.
        self._capturing: set[int] = set()
        self._captured_on: WeakKeyDictionary[GraphMemory, set[int]] = WeakKeyDictionary()
        # graph -> the memory that it is captured in.
        self._memories: WeakKeyDictionary[Any, GraphMemory] = WeakKeyDictionary()
        # memory -> the stream on which the tasks of its graphs are updated.
        self._streams: WeakKeyDictionary[GraphMemory, UpdateStream] = WeakKeyDictionary()
        # graph -> the event behind its last replay, for which the next update waits.
        self._replayed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        # graph -> its launch, which waits for an update. Not weak: the device waits for the signals
        # even if the host has dropped the graph.
        self._launched: dict[Any, Launch] = {}
        # graph -> its update, which came before the launch.
        self._ahead: WeakKeyDictionary[Any, Ahead] = WeakKeyDictionary()

    def begin(self, graph: Any) -> None:
        self._brackets.begin(graph)

    def end(self, graph: Any) -> TaskHandle:
        return self._brackets.end(graph)

    def abort(self, graph: Any) -> None:
        """Close what a failed task left open."""
        self._brackets.abort(graph)

    def capture(self, graph: Any, stream: Any, memory: GraphMemory) -> None:
        """Keep updates from `stream`, on which `graph` is captured into `memory`."""
        # Here, as a host may bracket tasks itself, without `begin`.
        self._memories[graph] = memory
        self._capturing.add(stream.npu_stream)
        self._captured_on.setdefault(memory, set()).add(stream.npu_stream)
        leave_stream(stream)

    def return_to(self, stream: Any) -> None:
        """The capture on `stream` is over."""
        self._brackets.settle()
        self._capturing.discard(stream.npu_stream)

    def replay(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool, name: str) -> None:
        """Replay with every task signalled, and updated if `changed`.

        Raises the error of an update, after which the device still comes to an end, and the
        `DeviceHangError` of a step before.
        """
        check_queue()
        current = self._npu.current_stream()
        leave_stream(current)

        def replay(updating: UpdateStream) -> None:
            self._begin(graph, updating, current, updates)
            watched = None if self._watchdog is None else self._watchdog.begin(name, current)
            try:
                if self.update_first:
                    self._update(graph, updating.stream, updates, changed, watched)
                    current.wait_stream(updating.stream)
                    self._launch(graph, current, watched)
                else:
                    self._launch(graph, current, watched)
                    self._update(graph, updating.stream, updates, changed, watched)
            except BaseException:  # `@undoing` written out, as every step with tasks comes here
                self._settle(updating.stream, current, updates)
                if watched is not None and self._watchdog is not None and not watched.is_launched:
                    self._watchdog.drop(watched)
                raise

        self._on_stream(graph, None, current, replay)

    def launch(self, graph: Any, updates: Sequence[TaskUpdate], name: str) -> bool:
        """Replay; True if the graph now waits for `update` or `updating`, False if `updating` came
        before. After an interrupt behind it, `forget` ends the graph.

        Raises `MissingCapabilityError` where the device needs the update first and has none.
        """
        check_queue()
        current = self._npu.current_stream()
        leave_stream(current)
        ahead = self._ahead.get(graph)
        if ahead is None and self.update_first:
            raise too_early(name)

        def launch(updating: UpdateStream) -> None:
            fence = self._replayed.get(graph)
            if ahead is None:
                self._begin(graph, updating, current, updates)
            watched = None if self._watchdog is None else self._watchdog.begin(name, current)
            try:
                if ahead is not None:
                    current.wait_event(ahead.fence)
                self._launch(graph, current, watched)
                if ahead is None:
                    self._launched[graph] = Launch(
                        updating, fence, current, watched, name, get_ident()
                    )
                    updating.is_awaited = True
                else:
                    self._ahead.pop(graph, None)
            except BaseException:  # `@undoing` written out, as every step with tasks comes here
                self._settle(updating.stream, current, updates)
                self._ahead.pop(graph, None)
                self._end(graph)
                if watched is not None and self._watchdog is not None and not watched.is_launched:
                    self._watchdog.drop(watched)
                raise

        self._on_stream(graph, ahead, current, launch)
        return ahead is None

    def update(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        """Update the tasks of a launched graph, if `changed`, and signal them."""
        launch = self._launched[graph]

        def update(updating: UpdateStream) -> None:
            try:
                self._update(graph, updating.stream, updates, changed, launch.watched)
                self._end(graph)
            except BaseException:  # `@undoing` written out, as every step with tasks comes here
                self._settle(updating.stream, launch.stream, updates)
                self._end(graph)
                raise

        self._on_stream(graph, launch, launch.stream, update)

    @contextmanager
    def updating(self, graph: Any, updates: Sequence[TaskUpdate]) -> Iterator[UpdateWindow]:
        """See `AscendPlatform.updating`."""
        check_queue()
        launch = self._launched.get(graph)
        current = self._npu.current_stream() if launch is None else launch.stream
        leave_stream(current)
        while True:
            updating = self._stream_of(graph, launch, current)
            with updating.lock:
                if not self._may_use(updating, launch):
                    continue
                if launch is None:
                    self._begin(graph, updating, current, updates)
                watched = None if launch is None else launch.watched
                window = UpdateWindow(updating.stream, updates, watched)
                try:
                    with self._npu.stream(updating.stream):
                        yield window
                    window.check()
                    if launch is None:
                        self._ahead[graph] = Ahead(updating, updating.stream.record_event())
                    self._end(graph)
                except BaseException as error:
                    # An error between the host's begin and its end leaves the update open.
                    with suppress(RuntimeError):
                        self._npu.graph_task_update_end(updating.stream)
                    self._settle(updating.stream, current, updates)
                    self._ahead.pop(graph, None)
                    self._end(graph)
                    named = _named(error, window.next)
                    if named is not None:
                        raise named from error
                    raise
                return

    def refuse_to_wait(self, device: torch.device) -> None:
        """Raise `MissingUpdateError` where this thread has launched a graph on `device` that waits
        for its update: it would wait for itself."""
        for launch in list(self._launched.values()):
            if launch.thread == get_ident() and launch.stream.device == device:
                raise MissingUpdateError(
                    "graphs cannot be destroyed while a launched graph waits for its update: the "
                    "device would never end",
                    got=f"graph {launch.name}, called with updates=DEFERRED in this thread",
                    expected="its update",
                    advice="update that step first: wrapper.update(updates)",
                )

    def forget(self, graph: Any, updates: Sequence[TaskUpdate]) -> None:
        """End a launch whose update did not come; or take back an update whose launch did not come:
        its signals would start the next one."""
        begun: Launch | Ahead | None = self._launched.get(graph) or self._ahead.get(graph)
        if begun is None:
            return
        current = begun.stream if isinstance(begun, Launch) else self._npu.current_stream()
        leave_stream(current)

        def settle(updating: UpdateStream) -> None:
            self._settle(updating.stream, current, updates)

        self._on_stream(graph, begun, current, settle)
        self._ahead.pop(graph, None)
        self._end(graph)

    def _end(self, graph: Any) -> None:
        """Note that the tasks of `graph` are signalled. Interrupted before that, `forget` signals
        them once more."""
        launch = self._launched.get(graph)
        if launch is not None:
            launch.updating.is_awaited = False
            del self._launched[graph]

    def _begin(
        self,
        graph: Any,
        updating: UpdateStream,
        current: Any,
        updates: Sequence[TaskUpdate],
    ) -> None:
        """Make the update of a step, before its launch, wait for the graph's replay before it."""
        ahead = self._ahead.get(graph)
        if ahead is not None:
            # That update's signals would start this step's tasks, with old arguments.
            current.wait_event(ahead.fence)
            self._settle(updating.stream, current, updates)
            self._ahead.pop(graph, None)
        replayed = self._replayed.get(graph)
        if replayed is not None:
            updating.stream.wait_event(replayed)

    def _launch(self, graph: Any, stream: Any, watched: WatchedStep | None) -> None:
        graph.replay()
        self._replayed[graph] = done = stream.record_event()
        if watched is not None:
            watched.launched(done)

    def _update(
        self,
        graph: Any,
        stream: Any,
        updates: Sequence[TaskUpdate],
        changed: bool,
        watched: WatchedStep | None,
    ) -> None:
        """Issue each task again on `stream`, if `changed`, and signal it; errors name the task."""
        signalled = 0
        watching = none_allocated = changed and self._allocations.looks_at(graph)
        try:
            # An ended queue drops signals without an error, and a launched graph waits for ever.
            check_queue()
            with self._npu.stream(stream):
                for update in updates:
                    if watched is not None:
                        watched.updating(update.name)
                    if watching:
                        allocations_before = self._allocations.begin(stream)
                        self._brackets.issue(graph, stream, update)
                        none_allocated &= self._allocations.check(
                            update.name, stream, allocations_before
                        )
                    elif changed:
                        self._brackets.issue(graph, stream, update)
                    else:
                        update.handle.event.record(stream)
                    signalled += 1
                    if watched is not None:
                        watched.signalled(stream)
            if none_allocated:
                self._allocations.passed(graph)
        except BaseException as error:
            named = _named(error, updates[min(signalled, len(updates) - 1)])
            if named is not None:
                raise named from error
            raise

    def _settle(self, updating: Any, current: Any, updates: Sequence[TaskUpdate]) -> None:
        """Signal every task after a failed step, so that its replay ends; then take the signals
        back, or the next replay would run too early.

        An interrupt may come right after the launch, or after a signal. So it is unknown whether a
        replay waits, and which tasks were signalled: each is signalled, perhaps twice. `current`
        then takes the signals behind the replay. It gives each once more before it waits, as a wait
        without a signal never ends. `reset` alone takes no signal where CANN has a value wait.
        """
        if not self.update_first:
            for update in updates:
                with suppress(RuntimeError):
                    update.handle.event.record(updating)
        current.wait_stream(updating)
        for update in updates:
            with suppress(RuntimeError):
                event = update.handle.event
                event.record(current)
                event.wait(current)
                event.reset(current)
        # Without it the next update could signal before `current` has taken these signals.
        updating.wait_stream(current)

    def _on_stream(
        self,
        graph: Any,
        begun: Launch | Ahead | None,
        current: Any,
        call: Callable[[UpdateStream], object],
    ) -> None:
        """Call `call` with the stream to update on, locked: meanwhile no other thread updates or
        computes on it. It is no context manager, as an interrupt in its end would leave the lock
        taken."""
        while True:
            updating = self._stream_of(graph, begun, current)
            with updating.lock:
                if self._may_use(updating, begun):
                    call(updating)
                    return

    def _stream_of(self, graph: Any, begun: Launch | Ahead | None, current: Any) -> UpdateStream:
        """The stream to update on; a step that has begun goes on with its own, unless pools must
        not use that any more."""
        if begun is not None and not begun.updating.is_left:
            return begun.updating
        return self._update_stream(graph, current)

    def _may_use(self, updating: UpdateStream, begun: Launch | Ahead | None) -> bool:
        """Whether a step may be updated on this stream, which is locked. Another one than that of a
        step which has begun then waits for the step's fence."""
        if updating.is_left:
            return False
        if begun is not None and updating is begun.updating:
            return True
        if updating.is_awaited:
            return False
        if begun is not None and begun.fence is not None:
            updating.stream.wait_event(begun.fence)
        return True

    def _update_stream(self, graph: Any, current: Any) -> UpdateStream:
        memory = self._memories[graph]
        update_stream = self._streams.get(memory)
        if update_stream is None or update_stream.is_left or update_stream.is_awaited:
            avoid = self._capturing | self._captured_on[memory]
            update_stream = new_update_stream(self._streams_to_update_on(), current, avoid)
            self._streams[memory] = update_stream
        return update_stream


def _named(error: BaseException, update: TaskUpdate) -> GraphRTError | None:
    """graphrt's error for one that torch_npu raised in an update; None for any other error."""
    if isinstance(error, LaunchQueueError) or has_queue_ended(error):
        ended = queue_ended()
        hang = DeviceHangError(
            f"task {update.name!r} cannot be signalled, so its replay never ends: {ended.what}",
            got=ended.got,
            expected=ended.expected,
            advice=ended.advice,
        )
        hang.task = update.name
        return hang
    if not isinstance(error, RuntimeError):
        return None
    explained = explain_replay(error)
    if explained is None:
        return None
    # The device waits for this update: a wait for the device in it is the one that does not end.
    is_hang = isinstance(explained, DeviceHangError)
    return type(explained)(
        f"the update of task {update.name!r} failed: {explained.what}",
        got=explained.got,
        expected=explained.expected,
        advice="let the task's issue wait for nothing: no synchronize(), .item() or empty_cache()"
        if is_hang
        else explained.advice,
    )
