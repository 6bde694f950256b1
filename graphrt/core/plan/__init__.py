"""What is captured: mode, sizes and budget, as one plan."""

from graphrt.core.plan.budget import Budget, GraphCost
from graphrt.core.plan.compiled import CompiledFacts, SavedFacts, all_compiled, compiled_in
from graphrt.core.plan.plan import Plan, PlanArguments, check_plan_arguments
from graphrt.core.plan.resolution import ModeResolution
from graphrt.core.plan.sizes import CaptureKey, capture_sizes, check_sizes
from graphrt.core.plan.text import UNNAMED

__all__ = [
    "UNNAMED",
    "Budget",
    "CaptureKey",
    "CompiledFacts",
    "GraphCost",
    "ModeResolution",
    "Plan",
    "PlanArguments",
    "SavedFacts",
    "all_compiled",
    "capture_sizes",
    "check_plan_arguments",
    "check_sizes",
    "compiled_in",
]
