"""graphrt: capture a PyTorch forward as static device graphs, replay the right one per batch.

`GraphRunner` does all of it for one forward; `Plan` says beforehand what is captured. Hosts with a
runner of their own use the parts: `GraphDispatcher`, `forward_context`, `GraphWrapper` (its class
on a device is `wrapper_class(platform)`) and `GraphPool`.

Errors are in `graphrt.errors`, what a plugin for a device needs in `graphrt.platforms`, compiled
pieces in `graphrt.compile`, attention in `graphrt.attention`, and the test suite for platforms in
`graphrt.testing`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# First: it imports torch, and explains what makes that fail.
from graphrt.core.base import torch_import as _torch_import  # noqa: F401  isort: skip
from graphrt._version import __version__
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.homes import show_home
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
from graphrt.core.capture.keyed import KeyedGraph, KeyedGraphs
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.state import State
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import current_platform, get_platform
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.slot import InputSlot
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.plan.budget import Budget, GraphCost
from graphrt.core.plan.plan import Plan
from graphrt.core.replay.entry import DEFERRED
from graphrt.core.replay.host_args import UNCHANGED, HostArg
from graphrt.core.replay.pool import CaptureSession, GraphPool
from graphrt.core.replay.segments import SegmentHooks
from graphrt.core.replay.tasks import UpdatableTask
from graphrt.core.runner.host import Example, Host
from graphrt.core.runner.report import RunnerReport
from graphrt.core.runner.runner import GraphRunner

# Last: these modules import from the core modules above, and load nothing else.
from graphrt import errors, lowlevel, platforms, types  # isort: skip

if TYPE_CHECKING:
    from graphrt.compile import CompileOptions, opaque, support_compile

    # The package can be called like this function; no type checker knows callable modules.
    from graphrt.compile import compile_module as compile

__all__ = [
    "DEFERRED",
    "UNCHANGED",
    "AttentionSupport",
    "Batch",
    "BatchDescriptor",
    "Budget",
    "CaptureSession",
    "CompileOptions",
    "Dispatch",
    "Example",
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
    "InputSlot",
    "InputSpec",
    "KeyedGraph",
    "KeyedGraphs",
    "PieceProvider",
    "Plan",
    "Platform",
    "Reason",
    "RunnerReport",
    "SegmentHooks",
    "State",
    "UpdatableTask",
    "__version__",
    "carry_context",
    "compile",
    "current_context",
    "current_platform",
    "eager_break",
    "forward_context",
    "get_platform",
    "opaque",
    "support_compile",
    "wrapper_class",
]

_MODULES = ("attention", "compile", "testing")

set_up_logging()


for _module in (errors, sys.modules[__name__], platforms, types, lowlevel):
    show_home(_module, moved_from="graphrt.core")


# Hidden from type checkers, which take any name of a module that has it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # What traces and compiles is loaded by those who ask for it.
        if name in _MODULES:
            return importlib.import_module(f"graphrt.{name}")
        if name in ("CompileOptions", "opaque", "support_compile"):
            return getattr(importlib.import_module("graphrt.compile"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
