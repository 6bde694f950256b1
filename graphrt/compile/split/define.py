"""`opaque`: a function as one operator that no compiler looks into."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from graphrt.compile.errors import OpaqueError
from graphrt.compile.private_torch.operators import is_registered
from graphrt.compile.private_torch.registered import remember_functions
from graphrt.core.base.option_values import check_callable, flag, items_of, shown
from graphrt.core.capture.guard import operator_break

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
# An operator lives as long as the library that defined it.
_libraries: list[torch.library.Library] = []


def opaque(
    name: str,
    *,
    mutates: Sequence[str],
    fake: Callable[..., Any] | None = None,
    splits: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function the operator `name` ("ns::op"), which writes the arguments `mutates`.

        @opaque("engine::attention", mutates=["out"])
        def attention(query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None: ...

    A trace sees one operator. With `splits` it is a splitting operator by default, and under a
    breakable capture a call of it is an eager break; without, it is captured like any other.
    Its parameters and its result need the types of operators. Best it returns nothing and writes
    into given tensors, which graphs around it read in place. One that returns tensors needs `fake`,
    which takes the same arguments and returns empty tensors of the right shapes. It may not return
    an argument. Raises `OpaqueError` if the function cannot be an operator.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise OpaqueError(
            "an operator needs a namespace and a name",
            got=shown(name),
            expected='"namespace::name"',
            advice='@opaque("engine::attention", mutates=["out"])',
        )

    written = items_of("mutates", mutates, '["out"]', OpaqueError)
    if fake is not None:
        check_callable("fake", fake, "fake=lambda query: torch.empty_like(query)")
    flag("splits", splits)

    def define(function: Callable[P, R]) -> Callable[P, R]:
        check_callable("function", function)
        overload = _define(name, function, written, fake, splits)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = overload(*args, **kwargs)
            return result

        finished: Any = operator_break(call) if splits else call
        finished.operator = overload
        return finished  # type: ignore[no-any-return]

    return define


def _define(
    name: str,
    function: Callable[..., Any],
    mutates: Sequence[str],
    fake: Callable[..., Any] | None,
    splits: bool,
) -> Any:
    namespace, short = name.split("::")
    if is_registered(name):
        raise OpaqueError(
            "an operator of that name is registered already",
            got=name,
            expected="a new name",
            advice="define it once, at the top of a module",
        )
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise OpaqueError(
            f"{name} cannot be an operator: nobody can tell its parameters",
            got=shown(function),
            expected="a function with annotated parameters",
            advice="def attention(query: torch.Tensor, out: torch.Tensor) -> None: ...",
        ) from None
    for argument in mutates:
        if argument not in arguments:
            raise OpaqueError(
                f"{name} has no argument of a name in mutates=",
                got=shown(argument),
                expected=", ".join(arguments),
                advice="name the tensors that the function writes",
            )
    try:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
    except ValueError as error:
        raise OpaqueError(
            f"{name} cannot be an operator: {error}",
            got=f"{function.__qualname__}{inspect.signature(function)}",
            expected="annotated tensors, numbers, strings and lists of them",
            advice=_defined_right(function),
        ) from error
    returns_nothing = schema.endswith("-> ()")
    if fake is None and not returns_nothing:
        raise OpaqueError(
            f"{name} returns something, so tracing needs to know its shape",
            got=schema,
            expected="fake=",
            advice="pass fake=, or write into a given tensor and return nothing",
        )
    unsafe_tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = (unsafe_tag,) if splits and unsafe_tag is not None else ()
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(short + schema, tags=tags)
    library.impl(short, function, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake or _returns_nothing, lib=library)
    _libraries.append(library)
    remember_functions(name, function, fake)
    return getattr(getattr(torch.ops, namespace), short).default


def _defined_right(function: Callable[..., Any]) -> str:
    """Advice on how to write a signature that no operator can have."""
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"name each argument in place of {parameter}"
        if isinstance(parameter.default, tuple | list):
            kind = next((type(each).__name__ for each in parameter.default), "int")
            return (
                f"{name}: Optional[List[{kind}]] = None, and `{name} = {shown(parameter.default)} "
                f"if {name} is None else {name}` inside: an operator has no default of several "
                "values"
            )
        if "tuple" in str(parameter.annotation).lower():
            return f"{name}: List[int], say: an operator takes no tuples"
    return "annotate every parameter and the result, as (x: torch.Tensor, n: int) -> None"


def _returns_nothing(*_: object, **__: object) -> None:
    """All results are written in place."""
