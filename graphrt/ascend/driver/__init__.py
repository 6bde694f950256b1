"""torch_npu and CANN: what they say of this machine, and what their errors mean."""

from graphrt.ascend.driver.direct_stream import DirectStreams
from graphrt.ascend.driver.explain import explain, explain_replay
from graphrt.ascend.driver.launch_queue import (
    check_queue,
    check_replayed,
    checked_before,
    has_queue_ended,
    named,
    queue_ended,
    watch_queue,
)
from graphrt.ascend.driver.library import (
    availability,
    available_streams,
    device_name,
    environment_notes,
    has_value_wait,
    limits,
    torch_npu,
    versions,
)

__all__ = [
    "DirectStreams",
    "availability",
    "available_streams",
    "check_queue",
    "check_replayed",
    "checked_before",
    "device_name",
    "environment_notes",
    "explain",
    "explain_replay",
    "has_queue_ended",
    "has_value_wait",
    "limits",
    "named",
    "queue_ended",
    "torch_npu",
    "versions",
    "watch_queue",
]
