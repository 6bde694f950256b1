"""What the error codes of a failed ACL graph capture mean."""

from __future__ import annotations

import re

from graphrt.core.errors import CaptureError, CaptureSyncError, RefusedOpError

_CODE = re.compile(r"(?:error code is |\(code )(\d{6})")
# torch_npu refuses these itself, before the device could give a code.
_REFUSED = re.compile(r"Cannot run aclop operators .*Current working aclop is (\w+)|(philox_\w+)")
_INVALIDATED = 507903
_KEEP_OUT = (
    "keep .item(), .cpu(), .tolist(), nonzero and boolean masks out of the captured forward, "
    "or mark the function around them @eager_break"
)
_STREAMS = "capture fewer sizes, or fewer pieces a size: every graph holds streams of the device"
_SYNC = (
    CaptureSyncError,
    "the forward made the host wait for the device, or read device data on the host",
    _KEEP_OUT,
)
_CAUSES: dict[int, tuple[type[CaptureError], str, str]] = {
    107024: (
        CaptureError,
        "the capture waits for an event that was not recorded inside it",
        "record the event on the capture stream first",
    ),
    107025: (
        CaptureError,
        "a stream that was forked inside the capture was not joined before its end",
        "make the capture stream wait for the side stream at the end of the forward",
    ),
    107027: _SYNC,
    107028: _SYNC,
    107030: (
        CaptureSyncError,
        "a call was made that no capture allows, such as a copy from pageable memory",
        "pin the host tensor, or make the copy before the capture",
    ),
    107031: (
        CaptureError,
        "work was issued on the default stream during the capture",
        "issue it on torch.npu.current_stream()",
    ),
    107032: (CaptureError, "two captures wait for each other", "capture on one stream only"),
    107033: (
        CaptureError,
        "a task group was left open, or two threads updated tasks on one stream",
        "begin and end every task inside one segment",
    ),
    107034: (
        CaptureError,
        "another stream of the capture issued work while a task group was open",
        "issue only the task's own operator between its begin and end",
    ),
    107041: _SYNC,
    207000: (CaptureError, "the driver is too old for graph capture", "update driver and CANN"),
    207001: (CaptureError, "the device ran out of memory", "capture fewer or smaller sizes"),
    207005: (CaptureError, "the device ran out of streams in the middle of a capture", _STREAMS),
    207008: (CaptureError, "the device has no stream left for another capture", _STREAMS),
    207018: (CaptureError, "the device ran out of memory", "capture fewer or smaller sizes"),
    507009: (
        CaptureError,
        "a task holds work other than one compute kernel",
        "bracket only the operator whose host arguments change",
    ),
    _INVALIDATED: (
        CaptureError,
        "an earlier error, which the forward caught, had ended the capture",
        "let the first error through",
    ),
}


def explain(error: BaseException) -> CaptureError:
    """The cause of a failed capture, looked for in the whole chain of `error`."""
    chain = _chain(error)
    for link in chain:
        refused = _REFUSED.search(str(link))
        if refused:
            return RefusedOpError(
                "an operator was issued that has no form an ACL graph can hold",
                op=refused[1] or refused[2],
                advice="replace it, or mark the function around it @eager_break",
            )
    codes = [(int(code), link) for link in chain for code in _CODE.findall(str(link))]
    # capture_end() repeats every earlier failure as "invalidated".
    for code, link in sorted(codes, key=lambda found: found[0] == _INVALIDATED):
        if code in _CAUSES:
            kind, what, advice = _CAUSES[code]
            first_line = str(link).splitlines()[0]
            return kind(what, got=f"error {code}: {first_line}", advice=advice)
    return CaptureError(
        f"capture failed: {type(error).__name__}: {error}",
        advice="run the same forward eagerly; if that passes, look for work that an NPU cannot "
        "capture",
    )


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop(0)
        if link is not None and not any(link is seen for seen in chain):
            chain.append(link)
            pending += [link.__cause__, link.__context__]
    return chain
