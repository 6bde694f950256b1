"""Backends: a piece runs uncompiled, or through Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from graphrt.compile.backend.inductor import InductorBackend, why_not
from graphrt.compile.errors import CompileError
from graphrt.compile.split.graph import uncompiled
from graphrt.core.base.option_values import shown


class Backend(Protocol):
    """Compiles one piece."""

    name: str

    def compile(
        self,
        piece: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        static: bool,
        in_order: bool = False,
    ) -> Callable[..., Any]:
        """A callable with the arguments and results of `piece`.

        `inputs` are fake tensors and numbers. With `static` they are exactly those that will come,
        worth a longer search for fast code. `in_order`: operators that are not torch's own are
        called in their order.
        """


class EagerBackend:
    """Runs the operators of the piece one by one; needs no compiler, and equals eager exactly."""

    name = "eager"

    def compile(
        self,
        piece: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        static: bool,
        in_order: bool = False,
    ) -> Callable[..., Any]:
        return uncompiled(piece)


def backend_for(
    name: str, device_type: str, *, autotune: bool = True, compiles: bool = True
) -> tuple[Backend, str]:
    """The backend of that name; or the eager one, with the reason why the device gets that.

    Without `compiles` it only has to load what was compiled before.
    Raises `CompileError` for an unknown name.
    """
    if name == "eager":
        return EagerBackend(), ""
    if name == "inductor":
        reason = why_not(device_type, compiles=compiles)
        return (EagerBackend(), reason) if reason else (InductorBackend(autotune=autotune), "")
    raise CompileError(
        "unknown compile backend",
        got=shown(name),
        expected="eager or inductor",
        advice='backend="inductor"',
    )
