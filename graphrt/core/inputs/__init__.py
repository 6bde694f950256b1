"""Static inputs, filled and padded at every step, and the live rows of outputs."""

from graphrt.core.inputs.buffers import StaticInputs, batch_of, reqs_of, wrong_requests
from graphrt.core.inputs.declared import check_forward, flat_of, nest
from graphrt.core.inputs.layout import FieldMove, InputLayout, StepMoves
from graphrt.core.inputs.output_axes import OutputAxes, at_path, check_tensor
from graphrt.core.inputs.outputs import BatchDims, OutputLayout
from graphrt.core.inputs.slot import InputSlot, agreed_too_late
from graphrt.core.inputs.spec import LOWEST_ADDRESS, InputSpec
from graphrt.core.inputs.transport import (
    MAX_BYTES,
    MAX_SLOTS,
    InputRing,
    InputTransport,
    Slab,
    Sources,
    StagedCopy,
    sources_of,
)

__all__ = [
    "LOWEST_ADDRESS",
    "MAX_BYTES",
    "MAX_SLOTS",
    "BatchDims",
    "FieldMove",
    "InputLayout",
    "InputRing",
    "InputSlot",
    "InputSpec",
    "InputTransport",
    "OutputAxes",
    "OutputLayout",
    "Slab",
    "Sources",
    "StagedCopy",
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
    "sources_of",
    "wrong_requests",
]
