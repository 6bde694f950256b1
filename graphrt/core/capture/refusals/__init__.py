"""What a capture refuses because a graph would freeze it, and the line that it is at."""

from graphrt.core.capture.refusals.copies import Copies
from graphrt.core.capture.refusals.given import Given
from graphrt.core.capture.refusals.metadata import hand_back, withhold
from graphrt.core.capture.refusals.nested import inside_capture
from graphrt.core.capture.refusals.side_doors import SideDoors, in_eager_part, side_doors
from graphrt.core.capture.refusals.source import Source, source_of, stands_for, user_source
from graphrt.core.capture.refusals.transforms import refuse_transform

__all__ = [
    "Copies",
    "Given",
    "SideDoors",
    "Source",
    "hand_back",
    "in_eager_part",
    "inside_capture",
    "refuse_transform",
    "side_doors",
    "source_of",
    "stands_for",
    "user_source",
    "withhold",
]
