"""Types that public signatures name and that a host seldom has to write itself."""

from __future__ import annotations

from graphrt.core.batch import AllowedCapture, Announcer, Axis
from graphrt.core.dispatch import Agreed
from graphrt.core.inputs import OutputAxes
from graphrt.core.plan import (
    CaptureSizes,
    CostModel,
    LeftOut,
    ModeResolution,
    PlanArguments,
    PlannedCapture,
    ResolutionStep,
    Traffic,
)
from graphrt.core.replay import Entry, HoldsGraphs, HostValues, OnCapture, Part, Updates
from graphrt.core.runner import (
    AroundCapture,
    Bind,
    CaptureProgress,
    DroppedGraph,
    GraphRecord,
    MakeExample,
    Phase,
    Progress,
    TrialRecord,
    TrustReport,
)
from graphrt.core.trust import Parameters, Tensors, TensorUse, UnknownBlock, UnknownMemory

__all__ = [
    "Agreed",
    "AllowedCapture",
    "Announcer",
    "AroundCapture",
    "Axis",
    "Bind",
    "CaptureProgress",
    "CaptureSizes",
    "CostModel",
    "DroppedGraph",
    "Entry",
    "GraphRecord",
    "HoldsGraphs",
    "HostValues",
    "LeftOut",
    "MakeExample",
    "ModeResolution",
    "OnCapture",
    "OutputAxes",
    "Parameters",
    "Part",
    "Phase",
    "PlanArguments",
    "PlannedCapture",
    "Progress",
    "ResolutionStep",
    "TensorUse",
    "Tensors",
    "Traffic",
    "TrialRecord",
    "TrustReport",
    "UnknownBlock",
    "UnknownMemory",
    "Updates",
]
