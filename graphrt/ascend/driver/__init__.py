"""torch_npu and CANN: what they say of this machine, and what their errors mean."""

from graphrt.ascend.driver.direct_stream import DirectStreams
from graphrt.ascend.driver.explain import explain, explain_replay
from graphrt.ascend.driver.launch_queue import check_queue, has_queue_ended, queue_ended
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
    "device_name",
    "environment_notes",
    "explain",
    "explain_replay",
    "has_queue_ended",
    "has_value_wait",
    "limits",
    "queue_ended",
    "torch_npu",
    "versions",
]
