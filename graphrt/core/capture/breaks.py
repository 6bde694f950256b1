"""Where a PIECEWISE capture breaks: at marked functions, and at operators of a list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_callable, shown
from graphrt.core.base.torch_names import has_kernel, schemas_of_operator
from graphrt.core.capture.guard import refuse_transform, side_doors
from graphrt.core.capture.refusals import MISSED_BREAK, TRACED_BREAK
from graphrt.core.replay.eager_part import name_of
from graphrt.core.replay.recording import counted, current_capture

P = ParamSpec("P")
R = TypeVar("R")


@public("graphrt")
def eager_break(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function to run eagerly between two segments of a PIECEWISE capture.

    At replay it is called with the captured tensors and the captured Python values; what changes
    from step to step it must read from `current_context()`. A fresh tensor that it returns is
    copied into a fixed buffer. One that it leaves elsewhere (in a list, an attribute) is for other
    eager parts: where a graph reads it, the capture raises `SideDoorError`. In a PIECEWISE wrapper
    that is not breakable the capture raises `MissedBreakError`. Outside of PIECEWISE captures it is
    just called. Raises `InvalidOptionError` for what is no function.
    """
    check_callable("function", function, "@eager_break above the function's def")

    @functools.wraps(function)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        capture = current_capture()
        if capture is not None and capture.breakable:
            refuse_transform(function)
            return cast(R, capture.run_eagerly(function, args, kwargs))
        if capture is not None and capture.must_break:
            got = f"{name_of(function)} in a PIECEWISE wrapper that does not break"
            raise MISSED_BREAK(got)
        work = counted.get()
        if work is not None:
            work.breaks += 1
        doors = None if capture is not None else side_doors.get()
        if doors is None:
            return function(*args, **kwargs)
        return cast(R, doors.watched(function, args, kwargs))

    _codes.add(cast(FunctionType, breaking).__code__)
    return breaking


def operator_break(call: Callable[P, R]) -> Callable[P, R]:
    """`eager_break` of a function that calls one splitting operator: a trace has the operator, at
    which it is split, and no eager part."""
    breaking = eager_break(call)

    @functools.wraps(call)
    def splitting(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        return breaking(*args, **kwargs)

    return splitting


# All marked functions have one code in common.
_codes: set[CodeType] = set()


def check_traced(codes: Iterable[CodeType]) -> None:
    """Raise `MissedBreakError` if code that a compiler has traced, `codes`, calls a function that
    is marked `@eager_break`: it is part of what was compiled."""
    if not _codes.isdisjoint(codes):
        raise TRACED_BREAK()


def _is_dispatched(operator: str) -> bool:
    """Whether it is an operator for tensors; TorchScript has overloads for lists and numbers.

    Those for named dimensions are left out: they call another overload of the same name.
    """
    overload = operator.partition(".")[2].lower()
    if "dimname" in overload or overload.startswith("names"):
        return False
    try:
        has_kernel(operator, "CPU")
    except RuntimeError:
        return False
    return True


def check_break(name: str) -> None:
    """Raise `InvalidOptionError` for an operator that cannot be seen, and so would not break."""
    base, _, overload = name.partition(".")
    overloads = [
        known
        for known in (schema.overload_name for schema in schemas_of_operator(base))
        if overload in ("", known) and _is_dispatched(f"{base}.{known}" if known else base)
    ]
    if not overloads:
        raise InvalidOptionError(
            "no operator of that name is registered",
            got=shown(name),
            expected='"namespace::name" or "namespace::name.overload"',
            advice="import the module that registers it before the capture",
        )
    functional = [known for known in overloads if not known.endswith("out")] or overloads
    full_names = [f"{base}.{known}" if known else base for known in functional]
    if any(has_kernel(full, "CompositeImplicitAutograd") for full in full_names):
        raise InvalidOptionError(
            "a composite operator is taken apart before it can be seen, so it cannot be a break",
            got=shown(name),
            expected="an operator with a kernel of its own",
            advice="mark the function that calls it @eager_break, or name what it is made of",
        )
