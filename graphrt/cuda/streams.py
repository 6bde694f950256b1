"""Streams of a GPU that are graphrt's own: see `graphrt.core.device.LentStreams`."""

from __future__ import annotations

from functools import partial

import torch

from graphrt.core.device.lent_streams import LentStreams, Loan
from graphrt.cuda.driver.api import driver_available, new_stream


def own_stream() -> torch.cuda.Stream:
    """A stream of the current device that nothing else uses, with the priority of the current one:
    graphs replay a kernel with that of the stream it was captured on. On ROCm, without the CUDA
    driver to make one, it is one of torch's."""
    priority = torch.cuda.current_stream().priority
    if not driver_available():
        return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    if priority not in _streams:
        _streams[priority] = LentStreams(partial(new_stream, priority), _wrapped)
    stream: torch.cuda.Stream = _streams[priority].lend(torch.cuda.current_device())
    return stream


def loan_of(stream: torch.cuda.Stream) -> Loan | None:
    """The loan that keeps other pools from a stream; None for one that graphrt did not lend."""
    loans = (each.loan_of(stream.device_index, stream.cuda_stream) for each in _streams.values())
    return next(filter(None, loans), None)


def _wrapped(handle: int) -> torch.cuda.Stream:
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


# By priority. Process-wide, as the streams of a device are.
_streams: dict[int, LentStreams[int]] = {}
