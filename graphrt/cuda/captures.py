"""The captures under way: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError, NestedCaptureError
from graphrt.cuda.driver import api as driver
from graphrt.cuda.driver.forks import ForkWatch
from graphrt.cuda.memory import GraphMemory
from graphrt.cuda.update.tasks import Tasks


class Captures:
    """The stream and the memory of every open capture."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._open: dict[Any, tuple[torch.cuda.Stream, GraphMemory]] = {}
        self._forks = ForkWatch()

    def begin(self, graph: Any, memory: GraphMemory) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise NestedCaptureError(
                "the current stream is being captured already",
                expected="a stream outside of any capture",
                advice="do not call graphrt inside torch.cuda.graph",
            )
        handle = memory.handle()
        self._open[graph] = torch.cuda.current_stream(), memory
        # "global" would fail this capture for an unsafe call of any other thread.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        memory.add(graph)
        self._forks.begin()

    def end(self, graph: Any) -> bool:
        """Finish the capture; False if it recorded nothing, and the graph is reset."""
        stream, _ = self._open[graph]
        self._forks.end()
        # capture_end() of an invalidated capture leaves the allocator in a state that depends on
        # the version of torch; abort() leaves a clean one.
        if driver.capture_is_invalidated(stream.cuda_stream):
            raise CaptureError(
                "an error that the forward caught, or did not notice, had ended the capture",
                advice="do not catch errors of device work inside the captured forward",
            )
        self._forks.check_joined(stream.cuda_stream)
        if driver.captured_nodes(stream.cuda_stream) != 0:
            graph.capture_end()
            del self._open[graph]
            return True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            graph.capture_end()
        del self._open[graph]
        graph.reset()
        return False

    def memory_of(self, graph: Any) -> GraphMemory:
        """The memory that an open capture allocates in."""
        return self._open[graph][1]

    def abort(self, graph: Any) -> None:
        self._forks.end()
        self._tasks.abort(graph)
        opened = self._open.pop(graph, None)
        if opened is None:
            graph.reset()
            return
        stream, memory = opened
        with torch.cuda.stream(stream):
            clean = _end_empty(graph, stream.cuda_stream)
        graph.reset()
        if not clean:
            memory.abandon(graph)


def _end_empty(graph: Any, stream: int) -> bool:
    """End a failed capture as an empty one; False if the allocators stay routed into the pool.

    torch undoes what capture_begin() did (routing of both allocators, generators, shares of the
    pool) only where capture_end() succeeds, and that of an invalidated capture fails.
    """
    driver.restart_capture(stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            graph.capture_end()
        return True
    except RuntimeError:
        return False
    finally:
        driver.end_capture(stream)
