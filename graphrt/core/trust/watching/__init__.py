"""What a run of a forward does with memory from outside."""

from graphrt.core.trust.watching.pointers import (
    UnknownBlock,
    UnknownMemory,
    address_of,
    unknown_memory,
)
from graphrt.core.trust.watching.trace import Trace, first_difference
from graphrt.core.trust.watching.watch import Deviation, Use, Watch
from graphrt.core.trust.watching.writes import SavedWrites

__all__ = [
    "Deviation",
    "SavedWrites",
    "Trace",
    "UnknownBlock",
    "UnknownMemory",
    "Use",
    "Watch",
    "address_of",
    "first_difference",
    "unknown_memory",
]
