"""The compiled module or function, and the places of its weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn

from graphrt.compile.private_torch.operators import held_by
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import NO_DEFAULT, Parameters
from graphrt.core.base import tree

_DEEPEST = 20
"""How deep containers are searched for tensors: a list may contain itself."""


class Held(Protocol):
    """A container whose objects `get` returns by key."""

    def get(self, key: Any, /) -> Any:
        """The object, or None."""


Holding = tuple[Held, Any, Any]
"""(container, key, object under that key)"""


Method = tuple[type, str, FunctionType, CodeType]
"""(class, name of a method, its function, the function's code)"""


@dataclass(frozen=True)
class Subject:
    """The module or function to compile, and how it is called.

    `small` are batch axes with their size, 0 or 1. The code is for that size alone, so `dims` does
    not have these axes.
    """

    module: Callable[..., Any]
    """What the user gave: a module, a function, a method or an object with `__call__`."""
    call: Callable[..., Any]
    """What Dynamo traces: `module`, or the call of an `nn.Module` with its hooks."""
    parameters: Parameters
    dims: DynamicDims
    small: tuple[tuple[str, int], ...] = ()

    def at(self, small: tuple[tuple[str, int], ...]) -> Subject:
        """The same subject for calls in which these axes have size 0 or 1."""
        return replace(self, dims=self.dims.without(dict(small)), small=small)

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the module by name; a tensor with two names is there twice. Of a function:
        those of modules in its globals and closure."""
        weights: dict[str, torch.Tensor] = {}
        for prefix, module in self._modules():
            weights.update(_tensors_of(prefix, module))
        return weights

    def holdings(self) -> list[Holding]:
        """The containers of weights and submodules: each key, with its present object."""
        holdings: list[Holding] = []
        for _, module in self._modules():
            attributes = vars(module)
            own_dicts = held_by(module)
            for held in own_dicts:
                holdings += [(held, name, value) for name, value in held.items()]
            for name, value in attributes.items():
                # `module._parameters` may be replaced by another dict.
                if name[0] != "_" or any(value is each for each in own_dicts):
                    holdings += [(attributes, name, value)]
                if name[0] != "_":
                    holdings += _holdings_in(value)
        return holdings

    def methods(self, codes: Iterable[CodeType], kinds: Iterable[type] = ()) -> list[Method]:
        """The methods of the modules' classes, and of other `kinds`, whose code is among `codes`.
        Dynamo guards getters of properties itself."""
        traced = set(codes)
        methods: list[Method] = []
        for kind in {
            **{type(module): None for _, module in self._modules()},
            **dict.fromkeys(kinds),
        }:
            for name in {name: None for base in kind.__mro__ for name in vars(base)}:
                function = method_of(kind, name)
                if function is not None and function.__code__ in traced:
                    methods.append((kind, name, function, function.__code__))
        return methods

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        roots: Mapping[str, Any] = {"": self.module}
        if not isinstance(self.module, nn.Module):
            function = _function_of(self.module)
            if function is None:
                return
            closure = inspect.getclosurevars(function)
            roots = {**closure.globals, **closure.nonlocals}
        for root, module in roots.items():
            if isinstance(module, nn.Module):
                yield from module.named_modules(prefix=root, remove_duplicate=False)


def method_of(kind: type, name: str) -> FunctionType | None:
    """The Python function of a class's method; None if it has none by that name."""
    found = getattr(kind, name, None)
    function = getattr(found, "__func__", found)  # of a class method
    return function if isinstance(function, FunctionType) else None


def _function_of(call: Callable[..., Any]) -> FunctionType | None:
    """The Python function of a method, a `functools.partial`, or an object with `__call__`."""
    while isinstance(call, functools.partial):
        call = call.func
    call = inspect.unwrap(call)
    if not isinstance(call, FunctionType | MethodType):
        call = type(call).__call__
    function = getattr(call, "__func__", call)
    return function if isinstance(function, FunctionType) else None


class _Items:
    """A list as a `Held`."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def get(self, index: int, /) -> Any:
        return self._items[index] if index < len(self._items) else None


def _holdings_in(value: object, depth: int = 0) -> list[Holding]:
    """The holdings in an attribute's value whose object is a tensor or contains one."""
    held: Any
    if isinstance(value, dict):
        held, items = value, [*value.items()]
    elif isinstance(value, list):
        held, items = _Items(value), [*enumerate(value)]
    elif isinstance(value, tuple):
        held, items = None, [*enumerate(value)]
    elif is_dataclass(value) and hasattr(value, "__dict__"):
        held = vars(value)
        items = [*held.items()]
    else:
        return []
    holdings: list[Holding] = []
    for key, item in items if depth < _DEEPEST else ():
        inside = [] if isinstance(item, torch.Tensor) else _holdings_in(item, depth + 1)
        # Nobody can put another object into a tuple: only what its items hold may change.
        if held is not None and (inside or isinstance(item, torch.Tensor)):
            holdings.append((held, key, item))
        holdings += inside
    return holdings


def _tensors_of(prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    attributes = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    parameters, buffers, _ = held_by(module)
    for name, value in {**parameters, **buffers, **attributes}.items():
        for path, leaf in tree.leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield f"{prefix}.{name}{path}".lstrip("."), leaf


Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]
"""(dtype, shape, strides, device) of a tensor, on which code relies"""


def kind_of(tensor: torch.Tensor) -> Kind:
    """The dtype, shape, strides and device of a tensor. The same tensor may have others later:
    `module.half()`, `.data =` and `resize_()` change it in place."""
    return tensor.dtype, tensor.shape, _strides(tensor), tensor.device


def kind_text(kind: Kind) -> str:
    dtype, shape, strides, device = kind
    return f"{dtype} {tuple(shape)} {strides} on {device}"


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def value_text(value: object) -> str:
    """A value in few words; of a tensor only its kind, without reading its data."""
    if isinstance(value, torch.Tensor):
        return kind_text(kind_of(value))
    if isinstance(value, _PLAIN) or value is NO_DEFAULT:
        return repr(value)
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, list | tuple | dict | set) else kind


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
