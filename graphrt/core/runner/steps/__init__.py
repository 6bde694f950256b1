"""How a runner runs one step: padded or not, checked or not."""

from graphrt.core.runner.steps.checked import CheckedSteps
from graphrt.core.runner.steps.checks import Checks, TrialRecord
from graphrt.core.runner.steps.padded import PaddedSteps
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.runner.steps.replayed import NOT_ALONE
from graphrt.core.runner.steps.slots import Slots
from graphrt.core.runner.steps.unpadded import (
    UnpaddedSteps,
    no_graph_to_pad_to,
    no_graph_to_verify,
    refuse_inside_capture,
)
from graphrt.core.runner.steps.updates import LastUpdates

__all__ = [
    "NOT_ALONE",
    "CheckedSteps",
    "Checks",
    "LastUpdates",
    "PaddedStep",
    "PaddedSteps",
    "Slots",
    "TrialRecord",
    "UnpaddedSteps",
    "no_graph_to_pad_to",
    "no_graph_to_verify",
    "refuse_inside_capture",
]
