"""What a run of a forward does with memory from outside."""

from graphrt.core.trust.watching.draws import Draws
from graphrt.core.trust.watching.gradients import WEIGHTS, GradientWatch
from graphrt.core.trust.watching.modes import IssuedWatch, WorkCount, WriteWatch
from graphrt.core.trust.watching.pointers import (
    UnknownBlock,
    UnknownMemory,
    address_of,
    unknown_memory,
)
from graphrt.core.trust.watching.trace import Trace, first_difference, first_other
from graphrt.core.trust.watching.watch import Deviation, Kept, Use, Watch, storage_key
from graphrt.core.trust.watching.writes import SavedWrites, still_there

__all__ = [
    "WEIGHTS",
    "Deviation",
    "Draws",
    "GradientWatch",
    "IssuedWatch",
    "Kept",
    "SavedWrites",
    "Trace",
    "UnknownBlock",
    "UnknownMemory",
    "Use",
    "Watch",
    "WorkCount",
    "WriteWatch",
    "address_of",
    "first_difference",
    "first_other",
    "still_there",
    "storage_key",
    "unknown_memory",
]
