"""graphrt: capture a PyTorch forward as static device graphs, replay the right one per batch.

`GraphRunner` does all of it for one forward; `Plan` says beforehand what is captured. Hosts with a
runner of their own use the parts: `GraphDispatcher`, `forward_context`, `GraphWrapper` (its class
on a device is `wrapper_class(platform)`) and `GraphPool`.

Errors are in `graphrt.errors`, what a plugin for a device needs in `graphrt.platforms`, compiled
pieces in `graphrt.compile`, attention in `graphrt.attention`, pages, timelines and metrics of a run
in `graphrt.observe`, and the test suite for platforms in `graphrt.testing`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphrt._homes import at_home
from graphrt._version import __version__

if TYPE_CHECKING:
    from graphrt import errors as errors
    from graphrt import lowlevel as lowlevel
    from graphrt import platforms as platforms
    from graphrt import types as types
    from graphrt._graphed import Graphed, graphed
    from graphrt._runner import GraphRunner
    from graphrt.compile import CompileOptions, opaque, support_compile

    # The package can be called like this function; no type checker knows callable modules.
    from graphrt.compile import compile_module as compile
    from graphrt.core.base.errors import GraphRTError
    from graphrt.core.batch.context import (
        ForwardContext,
        carry_context,
        current_context,
        forward_context,
    )
    from graphrt.core.batch.descriptor import Batch, BatchDescriptor
    from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider
    from graphrt.core.capture.guard import eager_break
    from graphrt.core.capture.keyed import KeyedGraph, KeyedGraphs
    from graphrt.core.capture.options import GraphOptions
    from graphrt.core.capture.state import State
    from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
    from graphrt.core.device.platform import Platform
    from graphrt.core.device.registry import current_platform, get_platform
    from graphrt.core.dispatch.dispatcher import GraphDispatcher
    from graphrt.core.dispatch.reasons import Dispatch, Reason
    from graphrt.core.inputs.buffers import InputSlot
    from graphrt.core.inputs.spec import InputSpec
    from graphrt.core.plan.budget import Budget, GraphCost
    from graphrt.core.plan.plan import Plan
    from graphrt.core.replay.entry import SegmentHooks
    from graphrt.core.replay.pool import CaptureSession, GraphPool
    from graphrt.core.replay.tasks import DEFERRED, UNCHANGED, HostArg, UpdatableTask
    from graphrt.core.runner.host import Example, Host
    from graphrt.core.runner.report import RunnerReport
    from graphrt.trust.trials import WrapperTrials

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
    "Graphed",
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
    "WrapperTrials",
    "__version__",
    "carry_context",
    "compile",
    "current_context",
    "current_platform",
    "eager_break",
    "forward_context",
    "get_platform",
    "graphed",
    "opaque",
    "support_compile",
    "wrapper_class",
]

_LISTED = ("errors", "lowlevel", "platforms", "types")
_MODULES = (*_LISTED, "attention", "compile", "observe", "testing")
"""Only `_LISTED` modules are in `dir()`: the others load more, and `testing` needs pytest."""

_DEFINED_IN = {
    "DEFERRED": "core.replay.tasks",
    "UNCHANGED": "core.replay.tasks",
    "AttentionSupport": "core.batch.modes",
    "Batch": "core.batch.descriptor",
    "BatchDescriptor": "core.batch.descriptor",
    "Budget": "core.plan.budget",
    "CaptureSession": "core.replay.pool",
    "CompileOptions": "compile",
    "Dispatch": "core.dispatch.reasons",
    "Example": "core.runner.host",
    "ForwardContext": "core.batch.context",
    "GraphCost": "core.plan.budget",
    "GraphDispatcher": "core.dispatch.dispatcher",
    "GraphMode": "core.batch.modes",
    "GraphOptions": "core.capture.options",
    "GraphPool": "core.replay.pool",
    "GraphRTError": "core.base.errors",
    "GraphRunner": "_runner",
    "GraphWrapper": "core.capture.wrapper",
    "Graphed": "_graphed",
    "Host": "core.runner.host",
    "HostArg": "core.replay.tasks",
    "InputSlot": "core.inputs.buffers",
    "InputSpec": "core.inputs.spec",
    "KeyedGraph": "core.capture.keyed",
    "KeyedGraphs": "core.capture.keyed",
    "PieceProvider": "core.batch.modes",
    "Plan": "core.plan.plan",
    "Platform": "core.device.platform",
    "Reason": "core.dispatch.reasons",
    "RunnerReport": "core.runner.report",
    "SegmentHooks": "core.replay.entry",
    "State": "core.capture.state",
    "UpdatableTask": "core.replay.tasks",
    "WrapperTrials": "trust.trials",
    "carry_context": "core.batch.context",
    "current_context": "core.batch.context",
    "current_platform": "core.device.registry",
    "eager_break": "core.capture.guard",
    "forward_context": "core.batch.context",
    "get_platform": "core.device.registry",
    "graphed": "_graphed",
    "opaque": "compile",
    "support_compile": "compile",
    "wrapper_class": "core.capture.wrapper",
}
"""Name -> the module that defines it, which is imported when the name is first used."""

# Hidden from type checkers, which take any name of a module that has it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"graphrt.{name}")
        if name not in _DEFINED_IN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"graphrt.{_DEFINED_IN[name]}")
        value = globals()[name] = getattr(module, name)
        at_home(__name__, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_LISTED})
