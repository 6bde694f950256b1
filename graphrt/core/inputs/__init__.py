"""Static inputs, filled and padded at every step, and the live rows of outputs."""

from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import check_forward, flat_of, nest
from graphrt.core.inputs.layout import InputLayout, StepMoves
from graphrt.core.inputs.output_axes import OutputAxes, at_path, check_tensor
from graphrt.core.inputs.outputs import BatchDims, OutputLayout
from graphrt.core.inputs.shapes import batch_of, reqs_of, wrong_requests
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.inputs.transfer import InputSlot, SlotRing, agreed_too_late

__all__ = [
    "BatchDims",
    "InputLayout",
    "InputSlot",
    "InputSpec",
    "OutputAxes",
    "OutputLayout",
    "SlotRing",
    "StaticInputs",
    "StepMoves",
    "agreed_too_late",
    "at_path",
    "batch_of",
    "check_forward",
    "check_tensor",
    "flat_of",
    "nest",
    "reqs_of",
    "wrong_requests",
]
