"""Errors of torch_npu become named ones, whatever they are chained behind; needs no NPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from graphrt.ascend.driver.error_codes import CAPTURE_CAUSES, REPLAY_CAUSES
from graphrt.ascend.driver.explain import explain, explain_replay
from graphrt.core.base.errors import (
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
from graphrt.core.device.contract import Unexplained


def npu_error(call: str, code: int, text: str = "", recent: str = "") -> RuntimeError:
    """An error as torch_npu words it."""
    return RuntimeError(
        f"{call}:../torch_npu/csrc/core/npu/NPUGraph.cpp:371 NPU function error: {call}, "
        f"error code is {code}\n"
        "[ERROR] 2026-11-21-05:59:38 (PID:7635, Device:0, RankID:-1) ERR00100 PTA call acl api "
        f"failed.\n[Error]: {text}\n        Rectify the fault based on the error information.\n"
        f"{recent}"
    )


def invalidated(first: BaseException) -> RuntimeError:
    """What is left of `first` when it was raised inside `torch.npu.graph`."""
    ended = npu_error("endCaptureErr", 507903, "The stream capture sequence is invalidated.")
    ended.__context__ = first
    return ended


def wrapped(first: BaseException) -> RuntimeError:
    error = RuntimeError("forward failed")
    error.__cause__ = first
    return error


class Case(NamedTuple):
    error: BaseException
    kind: type[GraphRTError]
    says: str
    code: str
    advice: str


BEGIN = "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode)"
NO_STREAM = npu_error(
    BEGIN,
    207008,
    "The stream resources are insufficient.",
    "Insufficient_Stream_Resources(EL0009): The stream resources are insufficient.",
)
SIDE_STREAM = npu_error(
    "aclrtStreamWaitEvent",
    207005,
    "Failed to apply for memory.",
    "[SqCqManage]Alloc sq cq fail, stream_id=1984, retCode=0x7020023",
)
CASCADE = npu_error("aclnnMatmul", 207005, "Failed to apply for resources.")
SYNC = npu_error("AclrtSynchronizeStreamWithTimeout(copy_stream)", 107027)

CAPTURES = {
    "streams at begin": Case(NO_STREAM, StreamBudgetError, "no stream left", "207008", "plan"),
    "streams by text only": Case(
        RuntimeError("Insufficient_Stream_Resources(EL0009)"),
        StreamBudgetError,
        "no stream left",
        "NO_STREAM_RESOURCE",
        "fewer sizes",
    ),
    "if-nodes that CANN refuses": Case(
        npu_error("c10_npu::acl::AclmdlRICondHandleGetCondPtr(handle, &cond_ptr)", 107000),
        CaptureError,
        "has an if-node (torch.cond)",
        "107000",
        "@eager_break",
    ),
    "if-nodes that CANN does not have": Case(
        RuntimeError("Failed to find function aclmdlRICondHandleCreate"),
        CaptureError,
        "has an if-node (torch.cond)",
        "no if-nodes",
        "software queues",
    ),
    "side stream behind 507903": Case(
        invalidated(SIDE_STREAM), StreamBudgetError, "no stream left", "207005", "25.5.1"
    ),
    "cascade behind 507903": Case(
        invalidated(CASCADE), StreamBudgetError, "no stream left", "207005", "fewer sizes"
    ),
    "streams behind two errors": Case(
        wrapped(invalidated(wrapped(SIDE_STREAM))), StreamBudgetError, "stream", "207005", "plan"
    ),
    "cause in the recent messages of 507903": Case(
        npu_error("endCaptureErr", 507903, "", "retCode=0x7020023"),
        StreamBudgetError,
        "no stream left",
        "507903",
        "fewer sizes",
    ),
    "found by the queue of launches, without a code of its own": Case(
        invalidated(
            RuntimeError(
                "The Inner error is reported as above. The process exits for this inner error, "
                "and the current working event is 0x55f427c192d0.\n"
                "[SqCqManage]Alloc sq cq fail, stream_id=1987, retCode=0x7020023"
            )
        ),
        StreamBudgetError,
        "no stream left",
        "Inner error",
        "25.5.1",
    ),
    "notifies under the code of streams": Case(
        npu_error("HcclAllReduce", 207005, "", "retCode=0x702001b"),
        ResourceExhaustedError,
        "no notify left",
        "207005",
        "AIV",
    ),
    "old driver": Case(npu_error(BEGIN, 207000), CaptureError, "too old", "207000", "25.0.RC1"),
    "aclop": Case(
        invalidated(
            RuntimeError(
                "Cannot run aclop operators during NPU graph capture. Current working aclop is "
                "TopKD. If you need this call to be captured, please file an issue."
            )
        ),
        RefusedOpError,
        "operator: TopKD",
        "Current working aclop",
        "@eager_break",
    ),
    "no update for the operator": Case(
        npu_error("AclmdlRICaptureTaskGrpEnd", 207019),
        RefusedOpError,
        "cannot be updated",
        "207019",
        "@eager_break",
    ),
    "unjoined": Case(
        npu_error("endCaptureErr", 107025), CaptureError, "not joined", "107025", "wait"
    ),
    "thread": Case(
        npu_error("endCaptureErr", 107038), CaptureError, "thread", "107038", "one thread"
    ),
    "item": Case(invalidated(SYNC), CaptureSyncError, "wait", "107027", ".item()"),
    "device sync": Case(
        invalidated(npu_error("AclrtSynchronizeDeviceWithTimeout", 107041)),
        CaptureSyncError,
        "wait",
        "107041",
        ".item()",
    ),
    "pageable copy": Case(
        npu_error("aclrtMemcpyAsync", 107030), PageableCopyError, "pageable", "107030", "pin"
    ),
    "default stream": Case(
        RuntimeError(
            "NPU graphs must be captured on a non-default stream. (However, after capture, it's "
            "ok to replay them on the default stream.)"
        ),
        CaptureError,
        "default stream",
        "non-default",
        "torch.npu.Stream()",
    ),
    "recapture": Case(
        RuntimeError(
            "This NPUGraph instance already owns a captured graph. To capture a new graph, create "
            "a new instance."
        ),
        CaptureError,
        "captured before",
        "already owns",
        "new torch.npu.NPUGraph()",
    ),
    "a queue of launches that cannot be captured": Case(
        RuntimeError(
            "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export "
            "TASK_QUEUE_ENABLE=1/0."
        ),
        CaptureError,
        "captures nothing",
        "Do not support",
        "TASK_QUEUE_ENABLE=1",
    ),
    "memory of the allocator": Case(
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61.28 GiB total)"),
        ResourceExhaustedError,
        "memory",
        "2.00 GiB",
        "KV cache",
    ),
    "memory": Case(
        npu_error("aclrtMalloc", 207001), ResourceExhaustedError, "memory", "207001", "smaller"
    ),
    "nothing but 507903": Case(
        npu_error("endCaptureErr", 507903), CaptureError, "caught", "507903", "first error"
    ),
    "nested": Case(
        npu_error("capture_begin", 107026), NestedCaptureError, "already", "107026", "end"
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_each_known_capture_failure_is_explained_with_its_cause_and_advice(name: str) -> None:
    case = CAPTURES[name]
    explanation = explain(case.error, environ={})
    assert type(explanation) is case.kind
    assert case.says in str(explanation)
    assert case.code in str(explanation)
    assert case.advice in str(explanation.advice)


@pytest.mark.parametrize("code", CAPTURE_CAUSES)
def test_each_capture_error_code_keeps_canns_text_and_gives_advice(code: int) -> None:
    cause = CAPTURE_CAUSES[code]
    explanation = explain(npu_error("aclSomething", code, "what CANN said"), environ={})
    assert type(explanation) is cause.kind
    assert f"error {code} ({cause.name})" in str(explanation.got)
    assert "what CANN said" in str(explanation.got) and "NPUGraph.cpp:371" in str(explanation.got)
    assert explanation.what and explanation.advice


def test_the_explanation_names_the_root_cause_before_follow_up_errors() -> None:
    group = npu_error("AclmdlRICaptureTaskGrpEnd", 107033)
    group.__context__ = CASCADE
    assert type(explain(invalidated(group), environ={})) is StreamBudgetError
    assert "107033" in str(explain(invalidated(npu_error("end", 107033)), environ={}))


def test_an_earlier_capture_attempt_in_the_exception_chain_is_no_cause() -> None:
    """The second attempt is made in the handler of the first, so Python chains the two."""
    before = StreamBudgetError("no stream", got=str(NO_STREAM))
    before.__cause__ = NO_STREAM
    second = invalidated(SYNC)
    SYNC.__context__ = before
    try:
        assert type(explain(second, environ={})) is CaptureSyncError
        only = npu_error("endCaptureErr", 507903)
        only.__context__ = before
        assert type(explain(only, environ={})) is CaptureError
    finally:
        SYNC.__context__ = None


def test_a_cyclic_exception_chain_is_explained_without_a_loop() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert "capture failed: RuntimeError: a" in str(explain(first))


def test_the_advice_names_ascend_launch_blocking_only_for_synchronizing_errors() -> None:
    explanation = explain(invalidated(SYNC), environ={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert str(explanation.advice).startswith("unset ASCEND_LAUNCH_BLOCKING")
    other = explain(npu_error("end", 107025), environ={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert "ASCEND_LAUNCH_BLOCKING" not in str(other)


def test_explain_reads_the_environment_of_the_process_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    assert "ASCEND_LAUNCH_BLOCKING" in str(explain(SYNC))


def test_an_error_of_the_forward_is_unexplained_and_keeps_its_text() -> None:
    explanation = explain(ValueError("no such layer"))
    assert type(explanation) is Unexplained
    assert "ValueError: no such layer" in str(explanation)


def test_a_long_error_text_is_cut_to_twenty_lines() -> None:
    text = "\n".join(f"line {n}" for n in range(40))
    explanation = explain(npu_error("aclSomething", 107025, text))
    assert "more lines)" in str(explanation) and len(str(explanation).splitlines()) < 20


def test_an_explanation_keeps_its_class_with_a_source_line_added() -> None:
    """`CaptureError.at` makes a new error of the same class."""
    explanation = explain(invalidated(SIDE_STREAM)).at("model.py:7")
    assert type(explanation) is StreamBudgetError and "at: model.py:7" in str(explanation)


# Replays -----------------------------------------------------------------------------------------

REPLAYS: dict[int, type[GraphRTError]] = {
    107005: TaskContractError,
    107019: DeviceHangError,
    107020: DeviceHangError,
    107027: TaskContractError,
    107033: PoolBusyError,
    107037: PoolBusyError,
    107040: TaskContractError,
    207005: StreamBudgetError,
    207019: TaskContractError,
    507000: TaskContractError,
    507009: TaskContractError,
    507046: DeviceHangError,
}


@pytest.mark.parametrize("code", REPLAY_CAUSES)
def test_each_known_replay_error_code_is_explained_with_advice(code: int) -> None:
    explanation = explain_replay(
        wrapped(npu_error("aclSomething", code, "what CANN said")), environ={}
    )
    assert explanation is not None and type(explanation) is REPLAYS[code]
    assert f"error {code} ({REPLAY_CAUSES[code].name})" in str(explanation)
    assert "what CANN said" in str(explanation) and explanation.advice


def test_a_hang_with_blocking_launches_advises_to_unset_the_variable() -> None:
    hang: Any = npu_error("AclrtSynchronizeDeviceWithTimeout", 507046)
    explanation = explain_replay(hang, environ={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert explanation is not None and explanation.advice == "unset ASCEND_LAUNCH_BLOCKING"


def test_a_hang_in_a_capture_is_explained_as_waiting_in_vain() -> None:
    hang = npu_error("AclrtSynchronizeStreamWithTimeout", 507046)
    explanation = explain(wrapped(hang), environ={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert (
        "waited in vain" in explanation.what
        and explanation.advice == "unset ASCEND_LAUNCH_BLOCKING"
    )
    assert "STREAM_SYNC_TIMEOUT" in str(explain(hang, environ={}))


def test_unknown_replay_errors_get_no_explanation() -> None:
    assert explain_replay(ValueError("no")) is None
    assert explain_replay(npu_error("aclSomething", 107000)) is None
