"""`compile_module` and `support_compile`: how hosts ask for a compiled module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from graphrt.compile.errors import CompileError
from graphrt.compile.module import CompiledModule
from graphrt.compile.options import CompileOptions
from graphrt.compile.private_torch.operators import call_instead
from graphrt.compile.trace.dims import DynamicDims
from graphrt.core.base.option_values import flag, shown
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.replay.pool import GraphPool

M = TypeVar("M", bound=type)

_DIMS = "graphrt_dynamic_dims"
"""Attribute of a module class: what `support_compile` was given."""


def support_compile(
    dynamic_dims: Mapping[str, Any] | Sequence[str],
) -> Callable[[M], M]:
    """Say of a module class which dimensions of its forward's arguments are the batch's.

    `compile_module(instance)` then needs no `dynamic_dims`. See `DynamicDims` for the forms. Raises
    `CompileError` for anything but a module class.
    """

    DynamicDims(dynamic_dims)

    def mark(cls: M) -> M:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise CompileError(
                "support_compile marks a module class",
                got=shown(cls),
                expected="a subclass of torch.nn.Module",
                advice="pass a function to graphrt.compile(function, dynamic_dims=...)",
            )
        setattr(cls, _DIMS, dynamic_dims)
        return cls

    return mark


def compile_module(
    module: Callable[..., Any],
    dynamic_dims: Mapping[str, Any] | Sequence[str] | None = None,
    *,
    options: CompileOptions | None = None,
    pool: GraphPool | None = None,
    graphs: bool = True,
    read_context: Callable[[], ForwardContext | None] = current_context,
    in_place: bool = True,
) -> CompiledModule:
    """Compile calls of a module, or of a function: once, at the first call or `ensure_compiled`.

    `dynamic_dims` are needed unless the class has `support_compile`; `{}` is for a forward that
    works for one batch size alone, that of the first call. With `pool`, which must be the
    `GraphRunner`'s, pieces between splitting operators are captured in PIECEWISE steps. `graphs`
    says that steps of this module, or of a model around it, may be replayed from graphs: then code
    that assigns to attributes is refused. With `in_place`, calls of the module itself run the
    compiled code too, wherever it is in a larger model. A host that captures by wrappers of its own
    tells the module what a `GraphRunner` would: `use_capture_sizes`, `use_wrapper_options`.

    Raises `CompileError` and its kinds, some of them at the first call.
    """
    if isinstance(module, type):
        raise CompileError(
            "a class has no forward to compile before it has an instance",
            got=shown(module),
            expected="a module, or a function",
            advice=f"pass an instance: graphrt.compile({module.__name__}(...), dynamic_dims=...)",
        )
    if dynamic_dims is None:
        dynamic_dims = getattr(module, _DIMS, None)
    if dynamic_dims is None:
        inside = _supporting(module)
        raise CompileError(
            f"nobody says which dimensions of {type(module).__name__}'s arguments are the batch's",
            got="no dynamic_dims",
            expected="dynamic_dims=, or a class with @support_compile",
            advice=f"compile {inside[0]!r}, which is inside of it"
            if inside
            else f"dynamic_dims={{{_first_argument(module)!r}: 0}}",
        )
    flag("in_place", in_place)
    compiled = CompiledModule(
        module,
        dynamic_dims,
        options=options,
        pool=pool,
        graphs=graphs,
        read_context=read_context,
    )
    if in_place and isinstance(module, nn.Module):
        call_instead(module, compiled)
    return compiled


def _first_argument(module: object) -> str:
    """The name of the first argument of a module's forward; "ids" if its signature is unknown."""
    call: Any = module.forward if isinstance(module, nn.Module) else module
    try:
        return next(iter(inspect.signature(call).parameters), "ids")
    except (TypeError, ValueError):
        return "ids"


def _supporting(module: object) -> list[str]:
    if not isinstance(module, nn.Module):
        return []
    return [name for name, inner in module.named_modules() if name and hasattr(type(inner), _DIMS)]
