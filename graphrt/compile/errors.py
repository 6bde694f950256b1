"""Errors of compiling a module, and of calls that it was not compiled for."""

from __future__ import annotations

from typing import Any

from graphrt.core.base.errors import GraphRTError


class CompileError(GraphRTError):
    """Root of the errors about compiling a module."""


class TraceError(CompileError):
    """The forward could not be traced as one graph."""


class RetraceError(CompileError):
    """A call differs from the traced one in something that the traced code has baked in.

    `input` names what differs: an argument, or an element of one. `of_sizes`: the forward branches
    differently at the call's number of tokens or requests.
    """

    def __init__(self, what: str, *, input: str, of_sizes: bool = False, **parts: Any) -> None:
        self.input = input
        self.of_sizes = of_sizes
        super().__init__(what, **parts)


class ReassignedStateError(CompileError):
    """Compiled code assigns to attributes, buffers or containers; a graph cannot repeat that.

    `names` are the assigned places.
    """

    def __init__(self, what: str, *, names: tuple[str, ...], **parts: Any) -> None:
        self.names = names
        super().__init__(what, **parts)


class AliasError(CompileError):
    """Tensors share memory in a way that pieces of a graph cannot keep."""


class CompileSealedError(CompileError):
    """A module would have to be compiled after `seal()`, or inside of an open capture."""


class CompileSizeError(CompileError):
    """A compile size is no capture size: batches are never padded to it.

    `size` is the size.
    """

    def __init__(self, what: str, *, size: object, **parts: Any) -> None:
        self.size = size
        super().__init__(what, **parts)


class OpaqueError(CompileError):
    """A function cannot be made an opaque operator."""
