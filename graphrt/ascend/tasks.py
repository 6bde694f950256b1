"""Task groups of a capture, and their update while the graph is already running."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from graphrt.core.platform import TaskUpdate


@dataclass(frozen=True)
class TaskHandle:
    """A task group of a graph, and the event for which every replay waits before it."""

    group: Any
    event: Any


class Tasks:
    """All task groups of a platform: the open ones, and what orders the update of the others."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self._open: dict[Any, Any] = {}
        self._replayed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        # Two threads that update on one stream collide (107033), so each has its own.
        self._thread = threading.local()

    def begin(self, graph: Any) -> None:
        stream = self._npu.current_stream()
        event = self._npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        self._npu.graph_task_group_begin(stream)
        self._open[graph] = event

    def end(self, graph: Any) -> TaskHandle:
        event = self._open.pop(graph)
        return TaskHandle(self._npu.graph_task_group_end(self._npu.current_stream()), event)

    def abort(self, graph: Any) -> None:
        """Close the group that a failed task left open."""
        if self._open.pop(graph, None) is not None:
            # Ending a group of an invalidated capture reports what is being handled already.
            with suppress(RuntimeError):
                self._npu.graph_task_group_end(self._npu.current_stream())

    def replay(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        stream = self._update_stream()
        replayed = self._replayed.get(graph)
        if replayed is not None:
            # An event signalled before the previous replay consumed its signal would be lost.
            # Queued before the replay: afterwards the stream would wait for its own signal.
            stream.wait_event(replayed)
        graph.replay()
        self._replayed[graph] = self._npu.current_stream().record_event()
        with self._npu.stream(stream):
            self._update(stream, updates, changed)

    def _update(self, stream: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        signalled = 0
        try:
            for update in updates:
                if changed:
                    self._issue(stream, update)
                update.handle.event.record(stream)
                signalled += 1
        except BaseException:
            # The replay is running and waits for every task: without a signal it never ends.
            for update in updates[signalled:]:
                update.handle.event.record(stream)
            raise

    def _issue(self, stream: Any, update: TaskUpdate) -> None:
        self._npu.graph_task_update_begin(stream, update.handle.group)
        try:
            update.issue()
        except BaseException:
            # Closing it reports that the tasks do not match, but the stream is usable again.
            with suppress(RuntimeError):
                self._npu.graph_task_update_end(stream)
            raise
        self._npu.graph_task_update_end(stream)

    def _update_stream(self) -> Any:
        stream = getattr(self._thread, "stream", None)
        current = self._npu.current_stream()
        # torch_npu hands out 32 streams in turn, so that a "new" one may be the current one, where
        # the signal would queue up behind the replay that waits for it.
        while stream is None or stream == current:
            stream = self._thread.stream = self._npu.Stream()
        return stream
