"""The captures under way: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from graphrt.ascend.driver import launch_queue
from graphrt.ascend.driver.library import available_streams
from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.update.tasks import Tasks
from graphrt.core.base.errors import NestedCaptureError, StreamBudgetError
from graphrt.core.device.pool_memory import has_captured


class Captures:
    """The stream and the memory of every open capture, and whether its begin succeeded."""

    def __init__(self, npu: Any, tasks: Tasks) -> None:
        self._npu = npu
        self._tasks = tasks
        self._open: dict[Any, tuple[Any, GraphMemory, bool]] = {}
        self._most_taken = 0
        self._free_before: int | None = None

    def begin(self, graph: Any, memory: GraphMemory) -> None:
        if self._npu.is_current_stream_capturing():
            raise NestedCaptureError(
                "the current stream is being captured already",
                expected="a stream outside of any capture",
                advice="do not call graphrt inside torch.npu.graph",
            )
        launch_queue.check()
        free = available_streams()
        # A begin that fails costs a pool, and a side stream that finds no room ends torch_npu's
        # queue of launches; so what one capture took is asked for before the next.
        if free is not None and free < self._most_taken:
            raise StreamBudgetError(
                "the device has too few free streams for another capture",
                got=f"{free} streams",
                expected=f"{self._most_taken}, as many as an earlier capture took",
                advice="capture fewer sizes, or fewer pieces a size",
            )
        handle, stream = memory.handle(), self._npu.current_stream()
        self._tasks.leave(stream, memory)
        self._open[graph] = stream, memory, False
        # "global" would fail this capture for an unsafe call of any other thread.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        self._open[graph] = stream, memory, True
        memory.add(graph)
        self._free_before = free

    def memory_of(self, graph: Any) -> GraphMemory:
        """The memory of an open capture."""
        return self._open[graph][1]

    def is_capturing(self) -> bool:
        """Whether a capture of this platform is open, in any thread."""
        return bool(self._open)

    def end(self, graph: Any) -> None:
        graph.capture_end()
        self._tasks.return_to(self._open.pop(graph)[0])
        free = available_streams()
        if free is not None and self._free_before is not None:
            self._most_taken = max(self._most_taken, self._free_before - free)

    def abort(self, graph: Any) -> None:
        opened = self._open.pop(graph, None)
        if opened is None:
            graph.reset()
            return
        stream, memory, begun = opened
        self._tasks.return_to(stream)
        with self._npu.stream(stream):
            self._tasks.abort(graph)
            # Fails with what broke the capture (507903), but stops the routing all the same,
            # unless it was the begin that failed.
            with suppress(RuntimeError):
                graph.capture_end()
        ended = has_captured(graph)
        graph.reset()
        if ended:
            return
        routed = memory.stop_routing()
        # reset() gives back only the share of a finished capture.
        if begun or routed:
            memory.release_share()
        if routed:
            memory.abandon(graph)
