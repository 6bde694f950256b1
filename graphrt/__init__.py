"""graphrt: capture a PyTorch forward as static device graphs, replay the right one per batch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First: it imports torch, and explains what makes that fail.
from graphrt.core.base import torch_import as _torch_import  # noqa: F401  isort: skip
from graphrt.compile import CompileOptions
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.log import set_up_logging
from graphrt.core.batch.context import (
    ForwardContext,
    carry_context,
    current_context,
    forward_context,
)
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider
from graphrt.core.capture.breaks import eager_break
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.state import State
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.platform import Capability, Platform
from graphrt.core.device.registry import current_platform, get_platform, hookimpl, platforms
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.plan.budget import Budget, GraphCost
from graphrt.core.plan.plan import Plan
from graphrt.core.replay.host_args import UNCHANGED, HostArg
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.tasks import UpdatableTask
from graphrt.core.runner.host import Host
from graphrt.core.runner.runner import GraphRunner

if TYPE_CHECKING:
    from graphrt import compile
    from graphrt.compile import opaque, support_compile

__all__ = [
    "UNCHANGED",
    "AttentionSupport",
    "Batch",
    "BatchDescriptor",
    "Budget",
    "Capability",
    "CompileOptions",
    "Dispatch",
    "ForwardContext",
    "GraphCost",
    "GraphDispatcher",
    "GraphMode",
    "GraphOptions",
    "GraphPool",
    "GraphRTError",
    "GraphRunner",
    "GraphWrapper",
    "Host",
    "HostArg",
    "InputSpec",
    "PieceProvider",
    "Plan",
    "Platform",
    "Reason",
    "State",
    "UpdatableTask",
    "carry_context",
    "compile",
    "current_context",
    "current_platform",
    "eager_break",
    "forward_context",
    "get_platform",
    "hookimpl",
    "opaque",
    "platforms",
    "support_compile",
]

__version__ = "0.1.0"

set_up_logging()


def __getattr__(name: str) -> Any:
    # What traces and compiles is loaded by those who ask for it.
    if name in ("compile", "opaque", "support_compile"):
        package = importlib.import_module("graphrt.compile")
        return package if name == "compile" else getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
