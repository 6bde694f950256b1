"""A stream whose launches go round torch_npu's queue: what fails on it fails in the call itself.

A capture that runs out of streams in its middle ends the queue, and with it the process's work on
the device (see `launch_queue`). On this stream it is an error like any other.

The trap: where this stream waits for another one, it does so at once, while the event may still be
in the queue, and an event that was not recorded yet counts as passed. So the host waits before work
goes over to it, and a forward that makes it wait for side streams cannot be captured on it.
"""

from __future__ import annotations

from typing import Any

from graphrt.ascend.driver.library import available_streams

STREAMS = 4
"""Such streams are made at once, with the first."""


class DirectStreams:
    """One for each device: captures take turns."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self._by_device: dict[int, Any] = {}

    def make(self) -> bool:
        """Make that of the current device; False if streams are too few for it."""
        device, kind = self._npu.current_device(), getattr(self._npu, "SyncLaunchStream", None)
        if kind is None or device in self._by_device:
            return True
        free = available_streams()
        # A try that fails would keep those it got.
        if free is not None and free <= STREAMS:
            return False
        self._by_device[device] = kind()
        return True

    def get(self) -> Any:
        """That of the current device; None where torch_npu has none, or nobody has made it."""
        return self._by_device.get(self._npu.current_device())

    def is_one(self, stream: Any) -> bool:
        """Whether a stream is one of these."""
        return any(stream == each for each in self._by_device.values())
