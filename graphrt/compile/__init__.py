"""torch.compile for graphs: one trace, split into pieces, compiled before serving starts.

The package itself can be called: `graphrt.compile(module, ...)` is `compile_module`.

Its folders, each of which uses those above it only:

    private_torch  torch's private names, behind typed functions
    trace          a call becomes one graph, by Dynamo
    cache          compiled pieces on disk
    split          the graph becomes pieces, at opaque operators
    backend        a piece becomes code, or runs uncompiled
    pieces         pieces are compiled once, wrapped for capture, and stitched into one call

`module` puts a forward behind all that, `api` is how hosts ask for it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from graphrt._homes import at_home
from graphrt.compile.api import compile_module, support_compile
from graphrt.compile.cache.store import CompileCacheWarning
from graphrt.compile.errors import (
    AliasError,
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
from graphrt.compile.split.define import opaque
from graphrt.compile.split.graph import Piece
from graphrt.compile.split.groups import DEFAULT_SPLITTING_OPS
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import Leaf

__all__ = [
    "DEFAULT_SPLITTING_OPS",
    "AliasError",
    "CompileCacheWarning",
    "CompileError",
    "CompileOptions",
    "CompileSealedError",
    "CompileSizeError",
    "CompiledModule",
    "DynamicDims",
    "Figures",
    "Leaf",
    "OpaqueError",
    "Piece",
    "ReassignedStateError",
    "RetraceError",
    "TraceError",
    "compile_module",
    "opaque",
    "support_compile",
]

at_home(__name__, *map(globals().__getitem__, __all__))


class _Callable(ModuleType):
    """A package and a function of the same name: importing the one must not hide the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> CompiledModule:
        return compile_module(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
