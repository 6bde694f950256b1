"""ACL captures: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from graphrt.ascend.budget.streams import TORCH_NPU_STREAMS
from graphrt.ascend.driver.launch_queue import check_queue, check_replayed, named, watch_queue
from graphrt.ascend.driver.library import available_streams
from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.update.tasks import Tasks
from graphrt.core.base.errors import StreamBudgetError
from graphrt.core.device.captures import Captures, OpenCapture, nested_capture
from graphrt.core.device.pool_memory import captured_pool


class AclCaptures(Captures[GraphMemory]):
    """Begins, ends and takes back captures. It counts the device's streams that captures took, to
    refuse one that would not find as many."""

    def __init__(self, npu: Any, tasks: Tasks) -> None:
        super().__init__()
        self._npu = npu
        self._tasks = tasks
        # The largest number of streams that a capture has taken.
        self._most_taken = 0
        # How many streams were free before the capture that is open.
        self._free_before: int | None = None

    def _stream_to_capture(self) -> Any:
        if self._npu.is_current_stream_capturing():
            raise nested_capture("torch.npu.graph")
        watch_queue()
        check_queue()
        free = available_streams()
        # Checked before: a begin that fails costs a pool, and a side stream that finds no room ends
        # torch_npu's launch queue.
        if free is not None and free < self._most_taken:
            raise StreamBudgetError(
                "the device has too few free streams for another capture",
                got=f"{free} streams",
                expected=f"{self._most_taken}, as many as an earlier capture took",
                advice="capture fewer sizes, or fewer pieces a size",
            )
        self._free_before = free
        return self._npu.current_stream()

    def _begin(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        self._tasks.capture(graph, opened.stream, opened.memory)
        # "global" would fail this capture for an unsafe call of any other thread.
        graph.capture_begin(pool=opened.handle, capture_error_mode="thread_local")
        opened.memory.add(graph)
        opened.memory.capturing_on(opened.stream)

    def _end(self, graph: Any, opened: OpenCapture[GraphMemory]) -> bool:
        graph.capture_end()
        self._tasks.return_to(opened.stream)
        free = available_streams()
        if free is not None and self._free_before is not None:
            self._most_taken = max(self._most_taken, self._free_before - free)
        return True

    def _take_back(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        memory = opened.memory
        self._tasks.return_to(opened.stream)
        with self._npu.stream(opened.stream):
            self._tasks.abort(graph)
            # Fails with what broke the capture (507903), but stops the routing all the same,
            # unless it was the begin that failed.
            with suppress(RuntimeError):
                graph.capture_end()
        ended = captured_pool(graph) is not None
        graph.reset()
        if ended:
            return
        routed = memory.stop_routing()
        # reset() gives back only the share of a finished capture.
        if opened.begun or routed:
            memory.release_share()
        if routed:
            memory.abandon(graph)


def graph_class(npu: Any) -> Any:
    """torch_npu's NPUGraph, whose replay raises `LaunchQueueError` if the launch queue has ended:
    the copy of the step's inputs may have failed there."""

    class Graph(npu.NPUGraph):  # type: ignore[misc]
        def replay(self) -> None:
            named(super().replay)
            check_replayed()

    return Graph


def event_class(npu: Any) -> Any:
    """torch_npu's Event, whose record raises it too: it comes right behind the copy of inputs."""

    class Event(npu.Event):  # type: ignore[misc]
        def record(self, stream: Any = None) -> None:
            named(partial(super().record, stream))

    return Event


def no_stream() -> StreamBudgetError:
    """The error where torch_npu could make no stream to capture on."""
    return StreamBudgetError(
        "torch_npu could not make the stream to capture on: too few streams of the device are free",
        expected=f"{TORCH_NPU_STREAMS} free streams when the process starts",
        advice="end other processes on the device, or capture fewer graphs there; then restart",
    )
