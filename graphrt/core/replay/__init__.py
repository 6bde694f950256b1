"""What one captured step is, and how it is replayed in its pool."""

from graphrt.core.replay._between import check_between_steps
from graphrt.core.replay._deferred import DEFERRED, Deferred, waiting_step
from graphrt.core.replay._session import CaptureSession
from graphrt.core.replay._turn import Doing, in_turn
from graphrt.core.replay.arguments import BoundArguments
from graphrt.core.replay.eager_part import (
    EagerPart,
    deliver,
    name_of,
    on_own_containers,
    on_own_tensors,
    settle,
)
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.handout import (
    HandedOut,
    Handout,
    expire,
    handing_out,
    handout_of,
    handouts_of,
    is_spare,
    shell_of,
)
from graphrt.core.replay.host_args import UNCHANGED, WORST_CASE, HostArg, HostValues, Updates
from graphrt.core.replay.pool import GraphPool, HoldsGraphs, OnCapture
from graphrt.core.replay.recording import (
    Recording,
    active,
    counted,
    current_capture,
    in_task,
    is_inside_capture,
    issued,
    under_way,
    warming_up,
)
from graphrt.core.replay.segments import (
    HookedSegment,
    Part,
    SegmentHooks,
    TaskedSegment,
    check_hooks,
    graphs_of,
)
from graphrt.core.replay.task_table import check_names
from graphrt.core.replay.tasks import CapturedTask, UpdatableTask

__all__ = [
    "DEFERRED",
    "UNCHANGED",
    "WORST_CASE",
    "BoundArguments",
    "CaptureSession",
    "CapturedTask",
    "Deferred",
    "Doing",
    "EagerPart",
    "Entry",
    "GraphPool",
    "HandedOut",
    "Handout",
    "HoldsGraphs",
    "HookedSegment",
    "HostArg",
    "HostValues",
    "OnCapture",
    "Part",
    "Recording",
    "SegmentHooks",
    "TaskedSegment",
    "UpdatableTask",
    "Updates",
    "active",
    "check_between_steps",
    "check_hooks",
    "check_names",
    "counted",
    "current_capture",
    "deliver",
    "expire",
    "graphs_of",
    "handing_out",
    "handout_of",
    "handouts_of",
    "in_task",
    "in_turn",
    "is_inside_capture",
    "is_spare",
    "issued",
    "name_of",
    "on_own_containers",
    "on_own_tensors",
    "settle",
    "shell_of",
    "under_way",
    "waiting_step",
    "warming_up",
]
