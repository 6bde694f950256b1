"""The captures under way: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from graphrt.ascend.memory import GraphMemory, has_captured
from graphrt.ascend.tasks import Tasks
from graphrt.core.errors import NestedCaptureError


class Captures:
    """The stream and the memory of every open capture, and whether its begin succeeded."""

    def __init__(self, npu: Any, tasks: Tasks) -> None:
        self._npu = npu
        self._tasks = tasks
        self._open: dict[Any, tuple[Any, GraphMemory, bool]] = {}

    def begin(self, graph: Any, memory: GraphMemory) -> None:
        if self._npu.is_current_stream_capturing():
            raise NestedCaptureError(
                "the current stream is being captured already",
                expected="a stream outside of any capture",
                advice="do not call graphrt inside torch.npu.graph",
            )
        handle, stream = memory.handle(), self._npu.current_stream()
        self._open[graph] = stream, memory, False
        # "global" would fail this capture for an unsafe call of any other thread.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        self._open[graph] = stream, memory, True
        memory.add(graph)

    def end(self, graph: Any) -> None:
        graph.capture_end()
        del self._open[graph]

    def abort(self, graph: Any) -> None:
        opened = self._open.pop(graph, None)
        if opened is None:
            graph.reset()
            return
        stream, memory, begun = opened
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
