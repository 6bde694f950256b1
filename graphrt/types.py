"""Types that public signatures name and that a host seldom has to write itself."""

from __future__ import annotations

from graphrt._graphed import InputAxes
from graphrt._homes import at_home
from graphrt.core.batch.context import Announcer
from graphrt.core.batch.descriptor import Axis
from graphrt.core.batch.modes import Mode
from graphrt.core.capture.limit import LimitReport
from graphrt.core.capture.wrapper import CallChecks
from graphrt.core.dispatch.reasons import Agreed
from graphrt.core.inputs.outputs import OutputAxes
from graphrt.core.inputs.spec import Inputs
from graphrt.core.plan.budget import LeftOut, PlannedCapture
from graphrt.core.plan.plan import PlanArguments
from graphrt.core.plan.resolution import ModeResolution, ResolutionStep
from graphrt.core.plan.sizes import CaptureSizes
from graphrt.core.plan.traffic import Traffic
from graphrt.core.replay.entry import Entry, Part
from graphrt.core.replay.pool import HoldsGraphs, OnCapture
from graphrt.core.replay.tasks import HostValues, Updates
from graphrt.core.runner.capture_session import CaptureProgress, Progress
from graphrt.core.runner.findings import (
    Change,
    Look,
    TensorUse,
    TrialRecord,
    TrustReport,
    UnknownBlock,
    UnknownMemory,
)
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord
from graphrt.core.runner.host import AroundCapture, Bind, MakeExample, Phase, Ranks, Run

__all__ = [
    "Agreed",
    "Announcer",
    "AroundCapture",
    "Axis",
    "Bind",
    "CallChecks",
    "CaptureProgress",
    "CaptureSizes",
    "Change",
    "DroppedGraph",
    "Entry",
    "GraphRecord",
    "HoldsGraphs",
    "HostValues",
    "InputAxes",
    "Inputs",
    "LeftOut",
    "LimitReport",
    "Look",
    "MakeExample",
    "Mode",
    "ModeResolution",
    "OnCapture",
    "OutputAxes",
    "Part",
    "Phase",
    "PlanArguments",
    "PlannedCapture",
    "Progress",
    "Ranks",
    "ResolutionStep",
    "Run",
    "TensorUse",
    "Traffic",
    "TrialRecord",
    "TrustReport",
    "UnknownBlock",
    "UnknownMemory",
    "Updates",
]

at_home(__name__, *map(globals().__getitem__, __all__))
