"""What the errors of a failed CUDA capture mean."""

from __future__ import annotations

import re

from graphrt.core.base.errors import (
    IN_PIECES,
    CaptureError,
    CaptureSyncError,
    PageableCopyError,
    RefusedOpError,
    ResourceExhaustedError,
)
from graphrt.core.base.texts import error_line
from graphrt.core.capture.refusals import LATE
from graphrt.core.device.contract import (
    EndedCaptureError,
    FirstCallError,
    Unexplained,
    error_chain,
)

_REGISTERED = (
    "draw from the default generator, or draw before the step and pass the numbers as an input; a "
    'GraphRunner at check="capture" registers the generators of its forward'
)
_KEEP_OUT = (
    "keep .item(), .cpu(), .tolist(), nonzero and boolean masks out of the captured forward, "
    f"or {IN_PIECES}"
)
_SYNC = (
    "the forward made the host wait for the device, read device data on the host, or allocated "
    "on a stream that is not captured"
)
_NO_COPY = (
    "move tensors of the host to the device before the capture; keep .cpu() out of the captured "
    "forward, or mark the function around it @eager_break"
)
_SMALLER = "capture fewer or smaller sizes, or leave the KV cache less memory"
_LIBRARIES = ("cuda", "cublas", "cudnn", "cufft", "cusolver", "cusparse", "nccl", "triton")
"""Libraries whose errors count as the capture's, though `_CAUSES` does not know their text."""
_SETS_UP = ("triton", "autotun", "cudnn")
"""In errors of those that compile, or try kernels, at the first call of a shape."""

_FAULTS = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
)
"""Failures of a kernel, which the driver reports at whichever call comes next."""

_RERUN = "run the same forward eagerly; if that passes, look for work CUDA cannot capture"

# The first pattern, a regular expression, that is found in the chain of errors decides. So the
# specific ones come first, and the error that every later call repeats comes last.
_CAUSES: tuple[tuple[str, type[CaptureError], str, str], ...] = (
    (
        "cpu tensor is pinned",
        PageableCopyError,
        "a copy between pageable host memory and the device was captured",
        _NO_COPY,
    ),
    (
        "out of memory",
        ResourceExhaustedError,
        "the device ran out of memory",
        _SMALLER,
    ),
    (
        "cublas_status_alloc_failed",
        ResourceExhaustedError,
        "cuBLAS could not allocate memory",
        _SMALLER,
    ),
    (
        "cublas_status_not_initialized",
        FirstCallError,
        "cuBLAS was used for the first time, and cannot be set up inside of a capture",
        "run the forward once before it is captured, on the stream of the capture",
    ),
    (
        "unjoined work",
        CaptureError,
        "a stream that was forked inside the capture was not joined before its end",
        "make the capture stream wait for the side stream at the end of the forward",
    ),
    (
        "uncaptured work in another stream",
        CaptureError,
        "the capture waits for work of a stream that is not being captured",
        "make the side stream wait for the capture stream before it is used",
    ),
    (
        "legacy stream depend on a capturing",
        CaptureError,
        "work was issued on the legacy default stream during the capture",
        "issue it on torch.cuda.current_stream()",
    ),
    (
        "event last recorded in a capturing stream",
        CaptureSyncError,
        "an event of the capture was queried or synchronised on the host",
        "query or synchronise events outside of the captured forward",
    ),
    (
        "not permitted when stream is capturing",
        CaptureSyncError,
        _SYNC,
        _KEEP_OUT,
    ),
    (
        "outside graph capture encountered",
        CaptureError,
        "a random generator is still in the state of an earlier capture",
        "use the default generator, or register yours with the graph",
    ),
    (
        "generator (is not registered|not in capture mode)",
        CaptureError,
        "the forward draws from a random generator that no watched warm-up was given",
        _REGISTERED,
    ),
    (
        "cusolver error",
        RefusedOpError,
        "a routine of cuSOLVER was captured that cannot be: it waits for the device or allocates",
        f"take it out of the forward, or {IN_PIECES}",
    ),
    (
        "cusparse_status",
        RefusedOpError,
        "a routine of cuSPARSE was captured that cannot be",
        f"take it out of the forward, or {IN_PIECES}",
    ),
)


def explain(error: BaseException) -> CaptureError:
    """The cause of a failed capture, looked for in the whole chain of `error`; `Unexplained` for an
    error of the forward's own."""
    messages = [error_line(link) for link in error_chain(error)]
    for pattern, kind, what, advice in _CAUSES:
        for message in messages:
            if re.search(pattern, message.lower()):
                return kind(what, got=message.splitlines()[0], advice=advice)
    for message in messages:
        if "previous error during capture" in message.lower():
            return EndedCaptureError.of(message.splitlines()[0])
        if any(fault in message.lower() for fault in _FAULTS):
            return CaptureError(
                "a kernel failed on the device",
                got=message.splitlines()[0],
                advice="a new process with CUDA_LAUNCH_BLOCKING=1 and GRAPHRT_MODE=NONE: the error "
                "then comes at its line",
                source=LATE,
            )
    for names, kind in (_SETS_UP, FirstCallError), (_LIBRARIES, CaptureError):
        if any(name in message.lower() for message in messages for name in names):
            return kind(f"capture failed: {messages[0]}", advice=_RERUN)
    return Unexplained.of(error)
