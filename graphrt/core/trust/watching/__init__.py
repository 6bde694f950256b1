"""What a run of a forward does with memory from outside."""

from graphrt.core.trust.watching.trace import Trace, first_difference
from graphrt.core.trust.watching.watch import Deviation, Use, Watch
from graphrt.core.trust.watching.writes import SavedWrites

__all__ = ["Deviation", "SavedWrites", "Trace", "Use", "Watch", "first_difference"]
