"""Tracing: one Dynamo trace of a forward, what it relies on, and how its graph is called."""

from graphrt.compile.trace._kinds import Kind, kind_of, kind_text
from graphrt.compile.trace._user_lines import innermost_line
from graphrt.compile.trace.call import TracedCall, at_size, trace_call
from graphrt.compile.trace.check import CallChecker, Small, axis_symbol
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.interface import Argument, Interface, Output, Weight
from graphrt.compile.trace.outside import Outside
from graphrt.compile.trace.overlaps import Overlaps
from graphrt.compile.trace.parameters import Leaf, Parameters, leaves, without_memory
from graphrt.compile.trace.sizes import floating, is_number, value_of
from graphrt.compile.trace.subject import Holding, Subject

__all__ = [
    "Argument",
    "CallChecker",
    "DynamicDims",
    "Holding",
    "Interface",
    "Kind",
    "Leaf",
    "Output",
    "Outside",
    "Overlaps",
    "Parameters",
    "Small",
    "Subject",
    "TracedCall",
    "Weight",
    "at_size",
    "axis_symbol",
    "floating",
    "innermost_line",
    "is_number",
    "kind_of",
    "kind_text",
    "leaves",
    "trace_call",
    "value_of",
    "without_memory",
]
