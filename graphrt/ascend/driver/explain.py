"""From the error of a failed capture or replay to its cause, as an error of graphrt.

The outermost error seldom is the cause: `capture_end()` reports whatever had happened before as
507903, and Python chains the first error behind it. So the whole chain is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from graphrt.ascend.driver.error_codes import (
    CAPTURE_CAUSES,
    CONSEQUENCES,
    NO_MEMORY,
    NO_NOTIFIES,
    NO_QUEUES,
    NO_STREAMS,
    REPLAY_CAUSES,
    TOO_MANY_AT_ONCE,
    Cause,
)
from graphrt.core.base.errors import (
    IN_PIECES,
    CaptureError,
    CaptureSyncError,
    DeviceHangError,
    GraphRTError,
    RefusedOpError,
)
from graphrt.core.base.texts import error_line, error_text
from graphrt.core.device.contract import Unexplained, error_chain

_CODE = re.compile(r"(?:error code is |\(code )(\d{6})")
# torch_npu refuses these itself, before the device could give a code.
_REFUSED = re.compile(r"Cannot run aclop operators .*Current working aclop is (\w+)|(philox_\w+)")
_TEXTS: tuple[tuple[re.Pattern[str], Cause], ...] = (
    # CANN reports these under more than one code, "Failed to apply for memory" among their texts.
    (re.compile(r"EE1023"), TOO_MANY_AT_ONCE),
    (re.compile(r"0x702001b", re.I), NO_NOTIFIES),
    (re.compile(r"alloc sq cq fail", re.I), NO_QUEUES),
    (
        re.compile(
            r"insufficient_stream_resources|stream resources are insufficient|0x7020023", re.I
        ),
        NO_STREAMS,
    ),
    (re.compile(r"NPU out of memory", re.I), NO_MEMORY),
    # Without support for if-nodes torch_npu only warns, and goes on without a handle.
    (
        re.compile(
            r"AclmdlRI(?:CondHandle|AddCond|CaptureToModel)\w+\([^\n]*error code is [12]07000"
            r"|Failed to find function aclmdlRI(?:CondHandle|AddCond|CaptureToModel)"
        ),
        Cause(
            CaptureError,
            "no if-nodes",
            "the forward has an if-node (torch.cond), which this driver or CANN cannot capture",
            f"update both to versions with software queues, or {IN_PIECES}",
        ),
    ),
    (
        re.compile(r"must be captured on a non-default stream"),
        Cause(
            CaptureError,
            "refused by torch_npu",
            "a capture was begun on the default stream",
            "capture inside `with torch.npu.stream(torch.npu.Stream())`, as graphrt's pools do",
        ),
    ),
    (
        re.compile(r"Do not support TASK_QUEUE_ENABLE = 2"),
        Cause(
            CaptureError,
            "refused by torch_npu",
            "torch_npu captures nothing with TASK_QUEUE_ENABLE=2",
            "start the process with TASK_QUEUE_ENABLE=1",
        ),
    ),
    (
        re.compile(r"already owns a captured graph"),
        Cause(
            CaptureError,
            "refused by torch_npu",
            "a graph that was captured before was captured into again",
            "make a new torch.npu.NPUGraph() for every capture",
        ),
    ),
)
_LIBRARIES = ("acl", "cann", "hccl", "npu")
"""Libraries whose errors count as the capture's, though their code or text is unknown here."""
_MOST_LINES = 12
_BLOCKING = "ASCEND_LAUNCH_BLOCKING"


class _Code(NamedTuple):
    """An error code of CANN, in the text of the error `link`."""

    code: int
    link: BaseException


def explain(error: BaseException, environ: Mapping[str, str] | None = None) -> CaptureError:
    """The cause of a failed capture, looked for in the whole chain of `error`.

    The error says what happened, the code and the original text, and one thing to do. In `environ`
    (by default `os.environ`) ASCEND_LAUNCH_BLOCKING=1 is a cause of host waits.
    """
    chain = list(_chain(error))
    for link in chain:
        refused = _REFUSED.search(error_text(link))
        if refused:
            return RefusedOpError(
                "an ACL graph cannot hold this operator",
                op=refused[1] or refused[2],
                got=_original(link),
                advice=f"replace it, or {IN_PIECES}",
            )
    for pattern, cause in _TEXTS:
        for link in chain:
            if pattern.search(error_text(link)):
                return _explained(cause, _codes([link]), link, environ)
    for code in _codes(chain):
        code_cause = CAPTURE_CAUSES.get(code.code)
        if code_cause is not None:
            return _explained(code_cause, [code], code.link, environ)
    hang = explain_replay(error, environ)
    if isinstance(hang, DeviceHangError):
        # A capture waits for earlier work, and replays its graph once: a hang there is a failure.
        return CaptureError(
            f"a capture waited in vain: {hang.what}",
            got=hang.got,
            advice=hang.advice,
        )
    if any(name in error_text(link).lower() for link in chain for name in _LIBRARIES) or _codes(
        chain
    ):
        return CaptureError(
            f"capture failed: {error_line(error)}",
            advice="run the same forward eagerly; if that passes, look for work that an NPU cannot "
            "capture",
        )
    return Unexplained.of(error)


def explain_replay(
    error: BaseException, environ: Mapping[str, str] | None = None
) -> GraphRTError | None:
    """The cause of a failed replay, update or synchronisation, or None if no code is known.

    An update that does not match its capture is a `TaskContractError`, a device that does not
    finish a `DeviceHangError`, one graph with too many streams a `StreamBudgetError`.
    """
    for code in _codes(_chain(error)):
        cause = REPLAY_CAUSES.get(code.code)
        if cause is None:
            continue
        what, advice = cause.what, cause.advice
        if cause.kind is DeviceHangError and _is_blocking(environ):
            what = f"{what}: with {_BLOCKING}=1 a replay waits for its own end before its tasks run"
            advice = f"unset {_BLOCKING}"
        return cause.kind(
            what, got=f"error {code.code} ({cause.name}): {_original(code.link)}", advice=advice
        )
    return None


def _explained(
    cause: Cause, codes: list[_Code], link: BaseException, environ: Mapping[str, str] | None
) -> CaptureError:
    advice = cause.advice
    if cause.kind is CaptureSyncError and _is_blocking(environ):
        advice = f"unset {_BLOCKING}, which makes every operator wait; then {advice}"
    code = f"error {codes[0].code} " if codes else ""
    return cause.kind(cause.what, got=f"{code}({cause.name}): {_original(link)}", advice=advice)


def _codes(chain: Iterable[BaseException]) -> list[_Code]:
    """The codes of all errors, causes before consequences, outer errors before inner ones."""
    codes = [_Code(int(code), link) for link in chain for code in _CODE.findall(error_text(link))]
    ranks = {code: rank for rank, code in enumerate(CONSEQUENCES, start=1)}
    return sorted(codes, key=lambda each: ranks.get(each.code, 0))


def _original(link: BaseException) -> str:
    lines = [line.rstrip() for line in error_text(link).strip().splitlines() if line.strip()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"({len(lines) - _MOST_LINES} more lines)"]
    return "\n    ".join(lines)


def _is_blocking(environ: Mapping[str, str] | None) -> bool:
    return (os.environ if environ is None else environ).get(_BLOCKING, "0") == "1"


def _chain(error: BaseException) -> Iterator[BaseException]:
    # A `CaptureError` in the chain is of an earlier attempt, in whose `except` block this one was
    # made. The errors behind it are of that attempt too.
    return error_chain(error, leave_out=CaptureError)
