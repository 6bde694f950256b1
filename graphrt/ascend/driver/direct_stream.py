"""A stream whose launches bypass torch_npu's queue: an operator that fails on it raises at once.

A capture that runs out of streams in its middle ends the queue, and with it the process's work on
the device (see `launch_queue`). On this stream it is an error like any other.

The trap: a wait of this stream is launched at once, while the event that it waits for may still be
in the queue, and an event that was not recorded yet counts as passed. So the host synchronises
before work moves to it, and a forward that makes it wait for side streams cannot be captured on it.
"""

from __future__ import annotations

from typing import Any

from graphrt.ascend.driver.library import available_streams

STREAMS = 4
"""Such streams are made at once, with the first."""


class DirectStreams:
    """Makes one such stream for each device, once, and returns it: captures on a device take
    turns, so they can share it."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # Index of a device -> its stream.
        self._by_device: dict[int, Any] = {}

    def make(self) -> bool:
        """Make the current device's stream, if torch_npu can; False if too few are free for it."""
        device, kind = self._npu.current_device(), getattr(self._npu, "SyncLaunchStream", None)
        if kind is None or device in self._by_device:
            return True
        free = available_streams()
        # A try that fails would keep the streams that it got.
        if free is not None and free <= STREAMS:
            return False
        self._by_device[device] = kind()
        return True

    def get(self) -> Any:
        """The current device's stream; None where torch_npu has none, or before `make`."""
        return self._by_device.get(self._npu.current_device())

    def is_one(self, stream: Any) -> bool:
        """Whether a stream is one of these."""
        return any(stream == each for each in self._by_device.values())
