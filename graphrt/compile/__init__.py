"""torch.compile for graphs: one trace, split into pieces, compiled before serving starts.

The package itself can be called: `graphrt.compile(module, ...)` is `compile_module`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from graphrt.compile.entry_points import compile_module, support_compile
from graphrt.compile.errors import (
    CompileError,
    CompileSealedError,
    CompileSizeError,
    OpaqueError,
    ReassignedStateError,
    RetraceError,
    TraceError,
)
from graphrt.compile.module import CompiledModule
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.split.opaque import opaque
from graphrt.compile.split.operators import DEFAULT_SPLITTING_OPS

__all__ = [
    "DEFAULT_SPLITTING_OPS",
    "CompileError",
    "CompileOptions",
    "CompileSealedError",
    "CompileSizeError",
    "CompiledModule",
    "Figures",
    "OpaqueError",
    "ReassignedStateError",
    "RetraceError",
    "TraceError",
    "compile_module",
    "opaque",
    "support_compile",
]


class _Callable(ModuleType):
    """A package and a function of the same name: importing the one must not hide the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> CompiledModule:
        return compile_module(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
