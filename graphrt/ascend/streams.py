"""Streams of torch_npu that graphrt keeps: to capture on, and to update tasks on.

torch_npu captures and updates only on its own streams (`ExternalStream` is refused). It has 32, and
`torch.npu.Stream()` hands them out in turn. Another thread could get one that graphrt works on: its
operators would come into a capture or an update. So `torch.npu.Stream()` skips the streams that
graphrt keeps. torch_npu has made them anyway, so they take no further stream of the device.

1. With a device's first pool a quarter of its streams is kept for updates; pools share them.
2. Pools keep up to a half to capture on: see `graphrt.core.device.LentStreams`.

Limit: C++ code takes streams without `torch.npu.Stream()`, and may get a kept one. So do
`torch.Stream(device="npu")`, new communicators, and hosts that have almost all streams before.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

from graphrt.core.device.lent_streams import LentStreams, Loan

_MOST = 32
_POOL = "STREAMS_PER_DEVICE"
"""torch_npu's variable: how many streams it has of a device."""


class OwnStreams:
    """The streams that graphrt keeps, of all devices. Once half of torch_npu's are lent for
    captures, pools share streams; captures on a device take turns."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # What graphrt keeps of each device: streams for updates, ids of streams for captures.
        self._for_updates: dict[int, list[Any]] = {}
        self._kept: dict[int, list[int]] = {}
        # How often a kept stream was handed out once more, as all were lent.
        self._shared = 0
        self._streams = LentStreams(self._make, self._wrapped)
        self._device_type = npu.default_stream().device_type
        self._pass_over_kept()

    def lend(self) -> Any:
        """A stream of the current device. Raises `RuntimeError` where torch_npu has no streams."""
        return self._streams.lend(self._npu.current_device())

    def for_updates(self) -> list[Any]:
        """The streams of the current device to update tasks on."""
        with _lock:
            device = self._npu.current_device()
            if device not in self._for_updates:
                count = max(1, _streams_of_torch() // 4)
                self._for_updates[device] = self._unheld(count)
            return self._for_updates[device]

    def loan_of(self, stream: Any) -> Loan | None:
        """The loan that keeps other pools from a stream; None if it is not lent."""
        return self._streams.loan_of(stream.device_index, stream.stream_id)

    def _make(self) -> int:
        self.for_updates()  # before hosts have got them all
        kept = self._kept.setdefault(self._npu.current_device(), [])
        if 2 * len(kept) < _streams_of_torch():
            kept.append(self._unheld(1)[0].stream_id)
            return kept[-1]
        self._shared += 1
        return kept[self._shared % len(kept)]

    def _unheld(self, count: int) -> list[Any]:
        """So many streams of the current device, of which no object exists if there are enough."""
        cls, device = self._npu.Stream, self._npu.current_device()
        frozen = gc.get_freeze_count()
        gc.unfreeze()  # frozen objects are not told, and engines freeze theirs
        objects = [each for each in gc.get_objects() if issubclass(type(each), cls)]
        if frozen:
            gc.freeze()
        held = {each.stream_id for each in objects if each.device_index == device}
        drawn = {each.stream_id: each for each in (cls() for _ in range(_MOST))}
        return sorted(drawn.values(), key=lambda each: each.stream_id in held)[:count]

    def _wrapped(self, number: int) -> Any:
        return self._npu.Stream(
            stream_id=number,
            device_index=self._npu.current_device(),
            device_type=self._device_type,
        )

    def _is_kept(self, device: int, number: int) -> bool:
        updating = self._for_updates.get(device, ())
        return number in self._kept.get(device, ()) or number in [s.stream_id for s in updating]

    def _pass_over_kept(self) -> None:
        cls, new = self._npu.Stream, self._npu.Stream.__new__

        def passing_over(cls: type, device: Any = None, priority: int = 0, **existing: Any) -> Any:
            stream = new(cls, device, priority, **existing)
            if not existing:  # else a new object of an existing stream, named by its id
                for _ in range(_MOST):
                    if not self._is_kept(stream.device_index, stream.stream_id):
                        break
                    stream = new(cls, device, priority)
            return stream

        cls.__new__ = staticmethod(passing_over)


# Process-wide, as the streams of a device are.
_own: list[OwnStreams] = []
_lock = threading.Lock()


def own_streams(npu: Any) -> OwnStreams:
    """The streams that graphrt keeps in this process."""
    with _lock:
        if not _own:
            _own.append(OwnStreams(npu))
        return _own[0]


def _streams_of_torch() -> int:
    try:
        return int(os.environ.get(_POOL, _MOST))
    except ValueError:
        return _MOST
