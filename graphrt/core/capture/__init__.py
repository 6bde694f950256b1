"""How a step is captured: segments, eager breaks, state, the wrapper."""

from graphrt.core.capture.breaks import check_traced, eager_break, operator_break
from graphrt.core.capture.bridges import Bridges, separate_strides
from graphrt.core.capture.guard import PartRules, SideDoors, in_eager_part, is_listed, side_doors
from graphrt.core.capture.keyed import KeyedGraph, KeyedGraphs
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import NESTED_CAPTURE, Refusal
from graphrt.core.capture.sealing import Sealing
from graphrt.core.capture.source import Source, stands_for, user_source
from graphrt.core.capture.state import State, as_states
from graphrt.core.capture.transaction import Captured, CaptureTransaction, GraphOwner
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class

__all__ = [
    "NESTED_CAPTURE",
    "Bridges",
    "CaptureTransaction",
    "Captured",
    "GraphOptions",
    "GraphOwner",
    "GraphWrapper",
    "KeyedGraph",
    "KeyedGraphs",
    "PartRules",
    "Refusal",
    "Sealing",
    "SideDoors",
    "Source",
    "State",
    "as_states",
    "check_traced",
    "eager_break",
    "in_eager_part",
    "is_listed",
    "operator_break",
    "separate_strides",
    "side_doors",
    "stands_for",
    "user_source",
    "wrapper_class",
]
