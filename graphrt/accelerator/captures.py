"""Captures of any device: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphrt.accelerator.memory import GraphMemory
from graphrt.core.base.errors import CaptureError
from graphrt.core.device.captures import Captures, OpenCapture, nested_capture
from graphrt.core.device.pool_memory import captured_pool, never_destroy


class AcceleratorCaptures(Captures[GraphMemory]):
    """Begins and ends captures of any device. A stream whose capture could not be ended is lost: it
    is never used again."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: set[int] = set()
        self._replacements: dict[int, torch.Stream] = {}

    def _stream_to_capture(self) -> torch.Stream:
        """The current stream. Raises `NestedCaptureError` if it is being captured already, and
        `CaptureError` if it is lost and the device has no other."""
        stream = torch.accelerator.current_stream()
        if self.is_lost(stream):
            raise CaptureError(
                "captures that failed could not be ended, and the device has no further stream",
                got=f"{len(self._lost)} streams lost",
                advice="find out why captures fail, and start the process anew",
            )
        if is_capturing(stream):
            raise nested_capture("`with torch.accelerator.Graph()`")
        return stream

    def _begin(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        graph.graph_pool = opened.handle
        # In the device's own error mode: XPU warns about every other one at every capture.
        graph.capture_begin()

    def _end(self, graph: Any, opened: OpenCapture[GraphMemory]) -> bool:
        graph.capture_end()
        opened.memory.add(graph)
        return True  # torch.accelerator does not tell an empty graph from another one

    def _take_back(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        if opened.begun and _ended(graph, opened.stream):
            graph.reset()
            return
        # No call undoes half a begin or a failed end. An allocator may still ask this graph whether
        # an allocation on the stream is part of it, so it must not be destroyed.
        never_destroy(graph)
        opened.memory.abandon(opened.handle)
        self._lost.add(opened.stream.stream_id)

    def new_stream(self) -> torch.Stream:
        """A stream that is not lost."""
        stream = torch.Stream()
        # Devices hand out a fixed number of streams in turn.
        for _ in range(64):
            if not self.is_lost(stream):
                break
            stream = torch.Stream()
        return stream

    def usable(self, stream: torch.Stream) -> torch.Stream:
        """`stream`, or its replacement if it is lost."""
        if not self.is_lost(stream):
            return stream
        other = self._replacements.get(stream.stream_id)
        if other is None or self.is_lost(other):
            other = self._replacements[stream.stream_id] = self.new_stream()
        return other

    def is_lost(self, stream: torch.Stream) -> bool:
        """Whether a capture on this stream could not be ended, so that it may be open still."""
        return stream.stream_id in self._lost


def is_capturing(stream: torch.Stream) -> bool:
    """Whether the stream is being captured; False where the device does not say."""
    try:
        return bool(stream.is_capturing())
    except (AttributeError, RuntimeError):
        return False


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` current, and the caller's device and stream again afterwards."""
    # Not `with stream`: it keeps the stream to restore in the object, which threads may share.
    caller = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(caller)


def _ended(graph: Any, stream: torch.Stream) -> bool:
    """End a failed capture with the part that was recorded; False if the device refuses."""
    if captured_pool(graph) is not None:
        return True  # the end itself failed, after the capture was over
    with current(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:  # the error that ended the capture; the caller handles it
            return captured_pool(graph) is not None
    return True
