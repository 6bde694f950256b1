"""What the error codes of CANN mean for a capture, and for a replay."""

from __future__ import annotations

from typing import NamedTuple

from graphrt.core.base.errors import (
    IN_PIECES,
    CaptureError,
    CaptureSyncError,
    DeviceHangError,
    GraphRTError,
    NestedCaptureError,
    PageableCopyError,
    PoolBusyError,
    RefusedOpError,
    ResourceExhaustedError,
    StreamBudgetError,
    TaskContractError,
)


class Cause(NamedTuple):
    """What graphrt raises for an error code of CANN in a capture: class, text and advice."""

    kind: type[CaptureError]
    name: str
    """CANN's name of the code."""
    what: str
    advice: str


class ReplayCause(NamedTuple):
    """Why a replay or an update failed, as `Cause`."""

    kind: type[GraphRTError]
    name: str
    what: str
    advice: str


INVALIDATED = 507903
# Often a consequence of an earlier error; every capture that was broken ends with the second code.
CONSEQUENCES = (107033, INVALIDATED)

_KEEP_OUT = (
    "keep .item(), .cpu(), .tolist(), nonzero and boolean masks out of the captured forward, "
    f"or {IN_PIECES}"
)
_WAITS = "the forward made the host wait for the device, or read device data on the host"
_FEWER = "capture fewer sizes or fewer pieces; `graphrt plan --platform ascend` shows what fits"
_SMALLER = "capture fewer or smaller sizes, or leave the KV cache less memory"
_ONE_GROUP = "begin and end every task inside one segment, and update from one thread at a time"
_ONE_KERNEL = "bracket only the operator whose host arguments change"
_NO_UPDATE = f"use an operator that takes its lengths as a device tensor, or {IN_PIECES}"

NO_STREAMS = Cause(
    StreamBudgetError,
    "NO_STREAM_RESOURCE",
    "the device has no stream left for this graph (all processes on it share them)",
    _FEWER,
)
NO_QUEUES = NO_STREAMS._replace(
    advice=f"{_FEWER}; a driver (HDK) of 25.5.1 or later needs fewer streams a graph"
)
TOO_MANY_AT_ONCE = Cause(
    StreamBudgetError,
    "RESOURCE_ALLOC_FAIL",
    "one graph needs more streams at once than a device can execute (1024)",
    "cut the model into more pieces, or open fewer side streams in it",
)
NO_NOTIFIES = Cause(
    ResourceExhaustedError,
    "NO_NOTIFY_RESOURCE",
    "the device has no notify left, which collectives between streams need",
    "capture fewer sizes, or expand collectives into vector-core kernels "
    "(HCCL_OP_EXPANSION_MODE=AIV)",
)
NO_MEMORY = Cause(
    ResourceExhaustedError, "MEMORY_ALLOCATION", "the device ran out of memory", _SMALLER
)

CAPTURE_CAUSES: dict[int, Cause] = {
    107024: Cause(
        CaptureError,
        "CAPTURE_DEPENDENCY",
        "the capture waits for an event that was not recorded inside it",
        "record the event on the capture stream first",
    ),
    107025: Cause(
        CaptureError,
        "STREAM_UNJOINED",
        "a stream that was forked inside the capture was not joined before its end",
        "make the capture stream wait for the side stream at the end of the forward",
    ),
    107026: Cause(
        NestedCaptureError,
        "MODEL_CAPTURED",
        "the graph is being captured into already",
        "end that capture first; do not call graphrt inside torch.npu.graph",
    ),
    107027: Cause(CaptureSyncError, "STREAM_CAPTURED", _WAITS, _KEEP_OUT),
    107028: Cause(CaptureSyncError, "EVENT_CAPTURED", _WAITS, _KEEP_OUT),
    107029: Cause(
        CaptureError,
        "STREAM_NOT_CAPTURED",
        "a task was begun, or a capture ended, on a stream that is not being captured",
        "do not change streams inside the forward without making them wait for each other",
    ),
    107030: Cause(
        PageableCopyError,
        "CAPTURE_MODE_NOT_SUPPORT",
        "a call was made that no capture allows, such as a copy from pageable memory",
        "pin the host tensor, or make the copy before the capture",
    ),
    107031: Cause(
        CaptureError,
        "STREAM_CAPTURE_IMPLICIT",
        "work was issued on the default stream during the capture",
        "issue it on torch.npu.current_stream()",
    ),
    107032: Cause(
        CaptureError,
        "CAPTURE_CONFLICT",
        "two captures wait for each other",
        "capture on one stream only",
    ),
    107033: Cause(
        CaptureError,
        "TASK_GROUP_STATUS",
        "a task group was left open, or two threads updated tasks on one stream",
        _ONE_GROUP,
    ),
    107034: Cause(
        CaptureError,
        "TASK_GROUP_INTR",
        "another stream of the capture issued work while a task group was open",
        "issue only the task's own operator between its begin and end",
    ),
    107036: Cause(
        CaptureError,
        "CAPTURE_UNMATCHED",
        "a capture was ended on another stream than the one it began on",
        "leave the current stream at the end of the forward as it was at its beginning",
    ),
    107038: Cause(
        CaptureError,
        "WRONG_THREAD",
        "a capture was ended in another thread than the one that began it",
        "call capture() from one thread, and let the forward start none that captures",
    ),
    107041: Cause(CaptureSyncError, "CAPTURE_MODE_BLOCK_ASYNC", _WAITS, _KEEP_OUT),
    107046: Cause(
        NestedCaptureError,
        "SUB_ACLGRAPH_IS_CAPTURING",
        "a graph inside this one is still being captured",
        "end the inner capture first",
    ),
    207000: Cause(
        CaptureError,
        "FEATURE_NOT_SUPPORT",
        "the driver or CANN is too old for what this capture does",
        "update the driver to 25.0.RC1 or later (26.0.RC1 on 310P and 950), and CANN with it",
    ),
    207001: NO_MEMORY,
    207005: NO_STREAMS._replace(name="RESOURCE_ALLOC_FAIL"),
    207007: Cause(
        ResourceExhaustedError,
        "NO_EVENT_RESOURCE",
        "the device has no event left",
        "capture fewer sizes, or fewer updatable tasks a graph",
    ),
    207008: NO_STREAMS,
    207009: NO_NOTIFIES,
    207010: Cause(
        ResourceExhaustedError,
        "NO_MODEL_RESOURCE",
        "the device can hold no more graphs",
        "capture fewer sizes or fewer pieces",
    ),
    207018: NO_MEMORY._replace(name="DEVICE_OOM"),
    207019: Cause(
        RefusedOpError,
        "FEATURE_NOT_SUPPORT_UPDATE_OP",
        "the operator of a task cannot be updated in a graph",
        _NO_UPDATE,
    ),
    507009: Cause(
        CaptureError,
        "TASK_TYPE_NOT_SUPPORT",
        "a task holds work other than one compute kernel",
        _ONE_KERNEL,
    ),
    INVALIDATED: Cause(
        CaptureError,
        "STREAM_CAPTURE_INVALIDATED",
        "an earlier error, which the forward caught, had ended the capture",
        "let the first error through",
    ),
}

_HANG = ReplayCause(
    DeviceHangError,
    "STREAM_SYNC_TIMEOUT",
    "the device did not finish in time",
    "look for a graph with tasks that was replayed without an update of every task",
)

REPLAY_CAUSES: dict[int, ReplayCause] = {
    107005: ReplayCause(
        TaskContractError,
        "STREAM_MODEL",
        "tasks were updated on a stream that belongs to a graph",
        "let graphrt choose the stream that tasks are updated on",
    ),
    107019: _HANG._replace(name="WAIT_TIMEOUT", what="a wait for an event timed out"),
    107020: _HANG._replace(name="TASK_TIMEOUT", what="a task on the device timed out"),
    107027: ReplayCause(
        TaskContractError,
        "STREAM_CAPTURED",
        "tasks were updated, or a graph replayed, on a stream that is being captured",
        "end the capture first",
    ),
    107033: ReplayCause(
        PoolBusyError,
        "TASK_GROUP_STATUS",
        "two threads updated tasks on one stream",
        _ONE_GROUP,
    ),
    107037: ReplayCause(
        PoolBusyError,
        "MODEL_RUNNING",
        "a graph was destroyed while it was running",
        "synchronise before the graph is dropped",
    ),
    107040: ReplayCause(
        TaskContractError,
        "MODEL_UPDATE_FAILED",
        "the graph refused the update of a task",
        "issue the same operator with the same tensors as at capture",
    ),
    207005: ReplayCause(*TOO_MANY_AT_ONCE),
    207019: ReplayCause(
        TaskContractError,
        "FEATURE_NOT_SUPPORT_UPDATE_OP",
        "the operator of a task cannot be updated in a graph",
        _NO_UPDATE,
    ),
    507000: ReplayCause(
        TaskContractError,
        "INTERNAL_ERROR",
        "the update of a task does not match its capture",
        "issue the same operator, as often as at capture, with outputs and workspace= given, so "
        "that only host values differ; if an operator of the host's own had failed before, "
        "torch_npu's queue of launches has ended and took none of this update: start the process "
        "anew",
    ),
    507009: ReplayCause(
        TaskContractError,
        "TASK_TYPE_NOT_SUPPORT",
        "the update of a task issued work other than one compute kernel",
        _ONE_KERNEL,
    ),
    507046: _HANG,
}
