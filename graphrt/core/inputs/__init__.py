"""Static inputs, filled and padded at every step, and the live rows of outputs."""

from graphrt.core.inputs.buffers import StaticInputs, nest
from graphrt.core.inputs.declared import checked_outputs
from graphrt.core.inputs.outputs import Cut, OutputAxes, Rows, cutting
from graphrt.core.inputs.shapes import batch_of, reqs_of, wrong_requests
from graphrt.core.inputs.spec import InputSpec

__all__ = [
    "Cut",
    "InputSpec",
    "OutputAxes",
    "Rows",
    "StaticInputs",
    "batch_of",
    "checked_outputs",
    "cutting",
    "nest",
    "reqs_of",
    "wrong_requests",
]
