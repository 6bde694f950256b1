"""Backends: a piece runs uncompiled, or through Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphrt.compile.backend.inductor import compile_piece, why_not
from graphrt.compile.errors import CompileError
from graphrt.compile.split.graph import uncompiled
from graphrt.core.base.option_values import shown


@dataclass(frozen=True)
class Backend:
    """Compiles pieces: by "inductor", or not at all. "eager" runs the operators of a piece one by
    one, needs no compiler, and equals eager exactly."""

    name: str
    autotune: bool = True
    """Whether Inductor searches longer for the code of a single size."""

    def compile(
        self,
        piece: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        static: bool,
        in_order: bool = False,
    ) -> Callable[..., Any]:
        """A callable with the arguments and results of `piece`.

        `inputs` are fake tensors and numbers. With `static` they are exactly those that will come.
        `in_order`: operators that are not torch's own are called in their order.
        """
        if self.name == "eager":
            return uncompiled(piece)
        search = static and self.autotune
        return compile_piece(piece, inputs, static=static, search=search, in_order=in_order)


def backend_for(
    name: str, device_type: str, *, autotune: bool = True, compiles: bool = True
) -> tuple[Backend, str]:
    """The backend of that name; or the eager one, with the reason why the device gets that.

    Without `compiles` it only has to load what was compiled before.
    Raises `CompileError` for an unknown name.
    """
    if name not in ("eager", "inductor"):
        raise CompileError(
            "unknown compile backend",
            got=shown(name),
            expected="eager or inductor",
            advice='backend="inductor"',
        )
    reason = "" if name == "eager" else why_not(device_type, compiles=compiles)
    return Backend("eager" if reason else name, autotune), reason
