"""The captures of a platform that are under way: begun, ended, or taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graphrt.core.base.errors import NestedCaptureError

Memory = TypeVar("Memory")
"""Memory of graphs: its `handle()` is the allocator pool to capture into now."""


@dataclass
class OpenCapture(Generic[Memory]):
    """A capture that is under way, on a stream, into a handle of the memory; `begun` once its begin
    has succeeded."""

    stream: Any
    memory: Memory
    handle: Any
    begun: bool = False


class Captures(ABC, Generic[Memory]):
    """Begins, ends and takes back the captures of a platform, in an order that leaves no trace of
    one that failed. A subclass says how its device does each.
    """

    def __init__(self) -> None:
        # graph -> its capture, from before its begin until its end or abort.
        self._open: dict[Any, OpenCapture[Memory]] = {}

    def begin(self, graph: Any, memory: Any) -> None:
        """Record this thread's work on the current stream into `graph`; raises
        `NestedCaptureError` if that stream is being captured already."""
        stream = self._stream_to_capture()
        opened = self._open[graph] = OpenCapture(stream, memory, memory.handle())
        self._begin(graph, opened)
        opened.begun = True

    def end(self, graph: Any) -> bool:
        """Finish the capture; False if it recorded nothing, and the graph is dropped.

        If it raises, the capture is open still, for `abort`.
        """
        opened = self._open[graph]
        recorded = self._end(graph, opened)
        del self._open[graph]
        if not recorded:
            self._drop_empty(graph, opened)
        return recorded

    def abort(self, graph: Any) -> None:
        """Take back a capture that failed, or whose begin or end did."""
        opened = self._open.pop(graph, None)
        if opened is None:
            graph.reset()
        else:
            self._take_back(graph, opened)

    def memory_of(self, graph: Any) -> Memory:
        """The memory that an open capture allocates in."""
        return self._open[graph].memory

    def is_any_open(self) -> bool:
        """Whether a capture is open, in any thread."""
        return bool(self._open)

    @abstractmethod
    def _stream_to_capture(self) -> Any:
        """The current stream; raises where no capture may begin on it."""

    @abstractmethod
    def _begin(self, graph: Any, opened: OpenCapture[Memory]) -> None:
        """Begin to record."""

    @abstractmethod
    def _end(self, graph: Any, opened: OpenCapture[Memory]) -> bool:
        """End recording; False if nothing was recorded."""

    def _drop_empty(self, graph: Any, opened: OpenCapture[Memory]) -> None:
        """Destroy a graph that recorded nothing."""
        graph.reset()

    @abstractmethod
    def _take_back(self, graph: Any, opened: OpenCapture[Memory]) -> None:
        """End what is open, whatever state it is in, and reset `graph` where that is safe."""


def nested_capture(by_hand: str) -> NestedCaptureError:
    """The error for a current stream that is being captured already; `by_hand` names what a host
    captures with itself."""
    return NestedCaptureError(
        "the current stream is being captured already",
        expected="a stream outside of any capture",
        advice=f"do not call graphrt inside {by_hand}",
    )
