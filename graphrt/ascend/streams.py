"""Streams of torch_npu to capture on that graphrt keeps: see `graphrt.core.device.LentStreams`.

torch_npu captures only on its own streams (`ExternalStream` is refused). It has 32, and
`torch.npu.Stream()` hands them out in turn. Another thread could get one that graphrt captures on.
So `torch.npu.Stream()` skips the streams that graphrt keeps. torch_npu has made them anyway, so
they take no further stream of the device.

Limit: C++ code takes streams without `torch.npu.Stream()`, and may get a kept one. So do
`torch.Stream(device="npu")` and new communicators.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from graphrt.core.device.lent_streams import LentStreams, Loan

_MOST = 32
_POOL = "STREAMS_PER_DEVICE"
"""torch_npu's variable: how many streams it has of a device."""


class OwnStreams:
    """The streams that graphrt keeps, of all devices: at most half of torch_npu's. Once that half
    is lent, pools share streams; captures on a device take turns."""

    def __init__(self, npu: Any, is_taken: Callable[[Any], bool]) -> None:
        """No stream is kept for which `is_taken` is true: tasks are updated on it."""
        self._npu = npu
        self._is_taken = is_taken
        # Device -> ids of its streams that graphrt keeps.
        self._kept: dict[int, list[int]] = {}
        # How often a kept stream was handed out once more, as all were lent.
        self._shared = 0
        self._streams = LentStreams(self._make, self._wrapped)
        self._device_type = npu.default_stream().device_type
        self._pass_over_kept()

    def lend(self) -> Any:
        """A stream of the current device. Raises `RuntimeError` where torch_npu has no streams."""
        return self._streams.lend(self._npu.current_device())

    def loan_of(self, stream: Any) -> Loan | None:
        """The loan that keeps other pools from a stream; None if it is not lent."""
        return self._streams.loan_of(stream.device_index, stream.stream_id)

    def _make(self) -> int:
        kept = self._kept.setdefault(self._npu.current_device(), [])
        if 2 * len(kept) < _streams_of_torch():
            # torch_npu hands out all its streams in turn: one of these tries finds a free one.
            for _ in range(_MOST):
                stream = self._npu.Stream()
                if not self._is_taken(stream):
                    kept.append(stream.stream_id)
                    return kept[-1]
        self._shared += 1
        return kept[self._shared % len(kept)]

    def _wrapped(self, number: int) -> Any:
        return self._npu.Stream(
            stream_id=number,
            device_index=self._npu.current_device(),
            device_type=self._device_type,
        )

    def _pass_over_kept(self) -> None:
        cls, kept = self._npu.Stream, self._kept
        new = cls.__new__

        def passing_over(cls: type, device: Any = None, priority: int = 0, **existing: Any) -> Any:
            stream = new(cls, device, priority, **existing)
            if not existing:  # else a new object of an existing stream, named by its id
                for _ in range(_MOST):
                    if stream.stream_id not in kept.get(stream.device_index, ()):
                        break
                    stream = new(cls, device, priority)
            return stream

        cls.__new__ = staticmethod(passing_over)


# Process-wide, as the streams of a device are.
_own: list[OwnStreams] = []
_lock = threading.Lock()


def own_streams(npu: Any, is_taken: Callable[[Any], bool]) -> OwnStreams:
    """The streams that graphrt keeps in this process."""
    with _lock:
        if not _own:
            _own.append(OwnStreams(npu, is_taken))
        return _own[0]


def _streams_of_torch() -> int:
    try:
        return int(os.environ.get(_POOL, _MOST))
    except ValueError:
        return _MOST
