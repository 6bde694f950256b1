"""How a step is captured: segments, eager breaks, state, the wrapper."""

from graphrt.core.capture._hot import Hot, hot_of
from graphrt.core.capture._keyed import KeyedGraph, KeyedGraphs
from graphrt.core.capture.breaks import check_traced, eager_break, is_listed, operator_break
from graphrt.core.capture.bridges import Bridges, separate_strides
from graphrt.core.capture.lookup import wrapper_class
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import (
    SideDoors,
    Source,
    in_eager_part,
    inside_capture,
    side_doors,
    stands_for,
    user_source,
)
from graphrt.core.capture.sealing import Sealing
from graphrt.core.capture.state import State, as_states
from graphrt.core.capture.transaction import Captured, CaptureTransaction, GraphOwner
from graphrt.core.capture.wrapper import GraphWrapper

__all__ = [
    "Bridges",
    "CaptureTransaction",
    "Captured",
    "GraphOptions",
    "GraphOwner",
    "GraphWrapper",
    "Hot",
    "KeyedGraph",
    "KeyedGraphs",
    "Sealing",
    "SideDoors",
    "Source",
    "State",
    "as_states",
    "check_traced",
    "eager_break",
    "hot_of",
    "in_eager_part",
    "inside_capture",
    "is_listed",
    "operator_break",
    "separate_strides",
    "side_doors",
    "stands_for",
    "user_source",
    "wrapper_class",
]
