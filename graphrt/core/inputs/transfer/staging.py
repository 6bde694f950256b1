"""Page-locked host memory in which the inputs of steps wait for their copy to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from graphrt.core.device import DeviceEvent, Platform

MAX_SLOTS = 64
"""Steps that can be under way before the host waits for the oldest one's copy; less for slots of
which so many would take more than `MAX_BYTES`."""
MAX_BYTES = 32 << 20

_CACHED_VIEWS = 1024


class Window:
    """A flat uint8 tensor and those spans of it that were used."""

    __slots__ = ("_views", "buffer")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, span: tuple[int, int]) -> torch.Tensor:
        """Bytes `span[0]` to `span[1]`."""
        found = self._views.get(span)
        if found is None:
            with torch.inference_mode(False):
                found = self.buffer[span[0] : span[1]]
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            self._views[span] = found
        return found


class Slot:
    """Host memory for the inputs of one step, and the event that says they are copied."""

    __slots__ = ("_event", "_in_use", "_window", "address", "buffer")

    def __init__(self, buffer: torch.Tensor, event: DeviceEvent | None) -> None:
        self.address = buffer.data_ptr()
        self.buffer = buffer
        self._window = Window(buffer)
        self._event = event
        self._in_use = False

    @property
    def free(self) -> bool:
        """Whether the host may write it."""
        return not self._in_use or self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait on the host until it is free."""
        if self._event is not None:
            self._event.synchronize()

    def copy_to(self, slab: Window, spans: Iterable[tuple[int, int]], stream: Any) -> None:
        """Copy the bytes of `spans` to the same places of `slab`, on the current stream, which is
        `stream`."""
        # Without an event nobody could tell when the host may write the memory again.
        asynchronous = self._event is not None
        try:
            for span in spans:
                slab.view(span).copy_(self._window.view(span), non_blocking=asynchronous)
        finally:
            if self._event is not None:
                self._event.record(stream)
                self._in_use = True


class Staging:
    """A ring of slots. It grows while the device is behind, then the host waits, and counts it."""

    def __init__(self, platform: Platform, nbytes: int, max_slots: int = MAX_SLOTS) -> None:
        self.waits = 0
        self._platform = platform
        # Slots are cut from one buffer, so that each begins where a copy is fast.
        self._nbytes = -(-nbytes // 256) * 256
        self._max_slots = max(2, min(max_slots, MAX_BYTES // max(1, nbytes)))
        self._slots: deque[Slot] = deque()

    def take(self) -> Slot:
        """A slot that the host may write now; the oldest one if it is free."""
        slots = self._slots
        if not slots or not slots[0].free:
            if len(slots) < self._max_slots:
                self._grow()
            else:
                self.waits += 1
                slots[0].wait()
        slot = slots.popleft()
        slots.append(slot)
        return slot

    def _grow(self) -> None:
        """Twice as many slots: page-locked memory is slow to get, so it comes in few pieces."""
        more = min(max(1, len(self._slots)), self._max_slots - len(self._slots))
        buffer = self._platform.host_buffer(more * self._nbytes)
        for index in range(more):
            view = buffer[index * self._nbytes : (index + 1) * self._nbytes]
            self._slots.appendleft(Slot(view, self._platform.new_event()))
