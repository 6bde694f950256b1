"""Streams of a GPU that are graphrt's own: see `graphrt.core.device.LentStreams`."""

from __future__ import annotations

import torch

from graphrt.core.device.lent_streams import LentStreams, Loan
from graphrt.cuda.driver.api import driver_available, new_stream


def own_stream() -> torch.cuda.Stream:
    """A stream of the current device that nothing else uses. On ROCm, without the CUDA driver to
    make one, it is one of torch's."""
    if not driver_available():
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream: torch.cuda.Stream = _streams.lend(torch.cuda.current_device())
    return stream


def loan_of(stream: torch.cuda.Stream) -> Loan | None:
    """The loan that keeps other pools from a stream; None for one that graphrt did not lend."""
    return _streams.loan_of(stream.device_index, stream.cuda_stream)


def _wrapped(handle: int) -> torch.cuda.Stream:
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


# Process-wide, as the streams of a device are.
_streams = LentStreams(new_stream, _wrapped)
