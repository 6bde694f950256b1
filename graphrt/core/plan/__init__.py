"""What is captured: mode, sizes and budget, as one plan."""

from graphrt.core.plan.arguments import PlanArguments, check_plan_arguments
from graphrt.core.plan.budget import Budget, CostModel, GraphCost, LeftOut, PlannedCapture
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.resolution import (
    CompiledFacts,
    ModeResolution,
    ResolutionStep,
    SavedFacts,
    all_compiled,
    compiled_in,
)
from graphrt.core.plan.sizes import CaptureKey, CaptureSizes, capture_sizes, check_sizes
from graphrt.core.plan.text import UNNAMED, alike
from graphrt.core.plan.traffic import Traffic

__all__ = [
    "UNNAMED",
    "Budget",
    "CaptureKey",
    "CaptureSizes",
    "CompiledFacts",
    "CostModel",
    "GraphCost",
    "LeftOut",
    "ModeResolution",
    "Plan",
    "PlanArguments",
    "PlannedCapture",
    "ResolutionStep",
    "SavedFacts",
    "Traffic",
    "alike",
    "all_compiled",
    "capture_sizes",
    "check_plan_arguments",
    "check_sizes",
    "compiled_in",
]
