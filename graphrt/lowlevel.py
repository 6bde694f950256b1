"""Sharp tools for those who write adapters of engines and devices: below the stable surface.

What is here may change from one minor release to the next, which the notes of the release say; see
`docs/stability.md`. Nothing of it checks how it is used.
"""

from __future__ import annotations

from graphrt._homes import at_home
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.capture.recorder import OutputBuffer
from graphrt.core.device.contract import GraphWork
from graphrt.core.device.pool_memory import PoolMemory, captured_pool, never_destroy
from graphrt.core.replay.entry import Segment, graphs_of
from graphrt.core.replay.recording import Recording, current_capture, frozen_gc, is_inside_capture
from graphrt.core.replay.tasks import CapturedTask

__all__ = [
    "CaptureTransaction",
    "CapturedTask",
    "GraphWork",
    "OutputBuffer",
    "PoolMemory",
    "Recording",
    "Segment",
    "captured_pool",
    "current_capture",
    "frozen_gc",
    "graphs_of",
    "is_inside_capture",
    "never_destroy",
]

at_home(__name__, *map(globals().__getitem__, __all__))
