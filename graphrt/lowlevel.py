"""Sharp tools for those who write adapters of engines and devices: below the stable surface.

What is here may change from one minor release to the next, which the notes of the release say; see
`docs/stability.md`. Nothing of it checks how it is used.
"""

from __future__ import annotations

from graphrt.core.base import frozen_gc
from graphrt.core.capture import Captured, CaptureTransaction, GraphOwner
from graphrt.core.device import GraphWork, PoolMemory, captured_pool, never_destroy
from graphrt.core.replay import (
    CapturedTask,
    Recording,
    TaskedSegment,
    current_capture,
    graphs_of,
    is_inside_capture,
)

__all__ = [
    "CaptureTransaction",
    "Captured",
    "CapturedTask",
    "GraphOwner",
    "GraphWork",
    "PoolMemory",
    "Recording",
    "TaskedSegment",
    "captured_pool",
    "current_capture",
    "frozen_gc",
    "graphs_of",
    "is_inside_capture",
    "never_destroy",
]
