"""Where a PIECEWISE capture breaks: at marked functions, and at operators of a list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from graphrt.core.base import (
    CaptureError,
    InvalidOptionError,
    MissedBreakError,
    ThreadMode,
    check_callable,
    dispatch_modes,
    has_kernel,
    is_taken_apart,
    remove_dispatch_mode,
    schemas_of_operator,
    shown,
)
from graphrt.core.capture.constants import Constants
from graphrt.core.capture.refusals import (
    Copies,
    Given,
    SideDoors,
    refuse_transform,
    side_doors,
    user_source,
)
from graphrt.core.replay import Recording, counted, current_capture, issued, name_of

P = ParamSpec("P")
R = TypeVar("R")


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
            raise _missed_part(function)
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
        raise MissedBreakError(
            "a function that is marked @eager_break was traced, so it would be captured",
            expected="compiled code without eager parts, or opaque operators in their place",
            advice='mark it @graphrt.opaque("namespace::name") in place of @eager_break, or call '
            "it outside of what is compiled",
        )


def _missed_part(function: Callable[..., Any]) -> MissedBreakError:
    return MissedBreakError(
        "a function that is marked @eager_break would be captured",
        got=f"{name_of(function)} in a PIECEWISE wrapper that does not break",
        source=str(user_source() or "") or None,
        expected="a wrapper that breaks there, or pieces without such a function",
        advice="make the wrapper with breakable=True, or wrap what is before and behind the "
        "function one by one",
    )


class BreakWatch(ThreadMode):
    """Sees every operator of an open segment: breaks at those of the list, and refuses those that
    read what left an eager part by a side door, write a copy of what others hold, or read
    arguments that lie on the host. Of a whole graph it looks at the last alone. With `constants` it
    has them lifted. Where the operators of a step are `issued` to a list, it notes those of the
    segment."""

    supports_higher_order_operators = True

    def __init__(
        self,
        capture: Recording,
        breaks: frozenset[str],
        doors: SideDoors,
        copies: Copies,
        given: Given,
        constants: Constants | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture
        self._breaks = breaks
        self._doors = doors
        self._copies = copies
        self._given = given
        self._constants = constants
        self._in_pieces = capture.breakable or bool(breaks)
        self.issued = issued.get()
        for name in breaks:
            _check_break(name)
        self._entered = False
        self._handling = False

    def resume(self) -> None:
        self._given.begin()
        in_pieces = self._in_pieces and (self._breaks or self._doors or self._copies)
        wanted = in_pieces or self._given or self._constants is not None
        # While an operator is being handled torch has taken this mode off its stack already.
        wanted = wanted or self.issued is not None
        if not self._handling and not self._entered and wanted:
            self.__enter__()
            self._entered = True

    def suspend(self) -> None:
        self._given.end()
        if self._handling or not self._entered:
            return
        top = dispatch_modes()[-1]
        if top is not self:
            raise CaptureError(
                "a dispatch mode that the forward entered is still active where a segment ends",
                got=type(top).__name__,
                advice="leave the mode before the eager break, or enter it outside of the wrapper",
            )
        self._entered = False
        self.__exit__()

    def remove(self) -> None:
        """Leave the mode for good, whatever a failed forward left on top of it."""
        self._entered = False
        remove_dispatch_mode(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        if not is_listed(func, self._breaks):
            if self.issued is not None:
                self.issued.append(func)
            if self._in_pieces:
                self._doors.check((args, kwargs), "the graph reads", func)
                self._copies.check(func, args, kwargs)
            self._given.check(func, args, kwargs)
            if self._constants is not None:
                return self._constants.run(func, args, kwargs)
            return func(*args, **kwargs)
        capture = self._capture
        if not capture.breakable:
            raise MissedBreakError(
                "an operator that must run eagerly would be captured",
                op=str(func),
                advice="use it as a splitting op, or mark the function around it @eager_break",
            )
        self._handling = True
        try:
            return capture.run_eagerly(func, args, kwargs)
        finally:
            self._handling = False


def is_listed(func: Any, breaks: frozenset[str]) -> bool:
    """Whether an operator is one of `breaks`, by its name or that of its overload."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None or not breaks:
        return False
    name: str = schema.name
    return name in breaks or f"{name}.{func._overloadname}" in breaks


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


def _check_break(name: str) -> None:
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
