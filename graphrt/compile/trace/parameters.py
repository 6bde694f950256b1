"""The parameters of a forward: how calls are bound to them, and how generated code names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from graphrt.compile.errors import CompileError
from graphrt.core.base import tree
from graphrt.core.base.option_values import shown


@dataclass(frozen=True)
class Leaf:
    """An argument, or an element of one. `path` is Python: `ids`, `cache[0]`, `meta['lengths']`."""

    path: str
    value: Any

    @property
    def argument(self) -> str:
        """The name of the parameter it belongs to."""
        return self.path.partition("[")[0].partition(".")[0]


class Parameters:
    """The signature of a forward: binds calls to it, and writes it as text for generated code."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise CompileError(
                "the parameters of a forward have names, and this one tells none",
                got=shown(function),
                expected="a function of Python, or a module with a forward",
                advice="compile a function that calls it: def forward(x): return function(x)",
            ) from error
        self.names = tuple(self.signature.parameters)
        self._function = inspect.unwrap(getattr(function, "__func__", function))
        # The function's defaults now, to find changed ones later.
        self._own_defaults = _defaults_of(self._function)

    def changed_default(self) -> tuple[str, object, object] | None:
        """A parameter whose default was changed since this was made: its name, the default now, and
        the one before. None if there is none."""
        now, before = _defaults_of(self._function), self._own_defaults
        for name in {**before, **now}:
            old, new = before.get(name, NO_DEFAULT), now.get(name, NO_DEFAULT)
            if old is not new and not _same_constant(old, new):
                return name, new, old
        return None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments of a call by name, with defaults; raises `CompileError`."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CompileError(
                f"the forward cannot be called like this: {error}",
                expected=f"forward{self.signature}",
                advice="pass the arguments that the forward names",
            ) from None
        bound.apply_defaults()
        return bound

    def header(self) -> str:
        """The parameter list as text, with `_default_NAME` for every default."""
        without_annotations = [
            each.replace(
                annotation=inspect.Parameter.empty,
                default=each.default
                if each.default is inspect.Parameter.empty
                else _Name(f"_default_{each.name}"),
            )
            for each in self.signature.parameters.values()
        ]
        return str(inspect.Signature(without_annotations))

    def defaults(self) -> dict[str, Any]:
        """The values of the names in `header`."""
        return {
            f"_default_{each.name}": each.default
            for each in self.signature.parameters.values()
            if each.default is not inspect.Parameter.empty
        }

    def forwarding(self) -> str:
        """The arguments as text that passes every parameter on."""
        return ", ".join(_SPELLINGS[p.kind].format(p.name) for p in self._parameters())

    def _parameters(self) -> list[inspect.Parameter]:
        return list(self.signature.parameters.values())


def leaves(bound: inspect.BoundArguments) -> list[Leaf]:
    """Every leaf of the arguments, in a fixed order."""
    return [
        Leaf(path, value)
        for name, argument in bound.arguments.items()
        for path, value in tree.leaves(argument, name)
    ]


def substitute(
    bound: inspect.BoundArguments, replacements: Mapping[str, torch.Tensor]
) -> inspect.BoundArguments:
    """The same arguments with other tensors at the paths of `replacements`."""
    copied = inspect.BoundArguments(bound.signature, bound.arguments.__class__())
    for name, argument in bound.arguments.items():
        values = [replacements.get(path, leaf) for path, leaf in tree.leaves(argument, name)]
        in_order = iter(values)
        copied.arguments[name] = tree.map_leaves(partial(_next, in_order), argument, object)
    return copied


def without_memory(bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """The same arguments with tensors that hold no memory."""
    tensors = ((leaf.path, leaf.value) for leaf in leaves(bound))
    return substitute(
        bound, {path: _meta(value) for path, value in tensors if isinstance(value, torch.Tensor)}
    )


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta") if type(tensor) is torch.Tensor else tensor


def _next(values: Iterator[Any], _: object) -> Any:
    return next(values)


def _defaults_of(function: Any) -> dict[str, object]:
    """The defaults of a Python function, or of a partial of one, by the names of its parameters; {}
    of another callable."""
    if isinstance(function, partial):
        return {**_defaults_of(function.func), **function.keywords}
    if not isinstance(function, FunctionType):
        return {}
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[: code.co_argcount]
    return {
        **dict(zip(names[len(names) - len(values) :], values, strict=False)),
        **(function.__kwdefaults__ or {}),
    }


def _same_constant(a: object, b: object) -> bool:
    return type(a) is type(b) and isinstance(a, _CONSTANTS) and repr(a) == repr(b)


class _Name:
    """An object whose `repr` is a given text: a default in generated code."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


NO_DEFAULT = _Name("no default")
_CONSTANTS = (bool, int, float, complex, str, bytes)
_SPELLINGS = {
    inspect.Parameter.POSITIONAL_ONLY: "{0}",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "{0}",
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}
