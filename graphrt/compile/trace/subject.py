"""What is compiled, and where it keeps its weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from graphrt.compile.private_torch import held_by
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import Parameters
from graphrt.core.base import tree

Holding = tuple[Mapping[str, Any], str, Any]
"""A dict, a name in it, and the object of that name."""


Method = tuple[type, str, FunctionType, CodeType]
"""A class of a module, the name of a method, the function of that name, and its code."""


@dataclass(frozen=True)
class Subject:
    """What is compiled: a module or a function, and how it is called. `small` are the axes that are
    no batch ones in `dims`, because their size is 0 or 1."""

    module: Callable[..., Any]
    call: Callable[..., Any]
    parameters: Parameters
    dims: DynamicDims
    small: tuple[tuple[str, int], ...] = ()

    def at(self, small: tuple[tuple[str, int], ...]) -> Subject:
        """The same for calls with axes of size 0 or 1 only."""
        return replace(self, dims=self.dims.without(dict(small)), small=small)

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the module by name, those that share a name's tensor too; of a function,
        those of the modules that it refers to."""
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._modules():
            found.update(_tensors_of(prefix, module))
        return found

    def holdings(self) -> list[Holding]:
        """Where the module keeps its weights and modules, and what is there now."""
        found: list[Holding] = []
        for _, module in self._modules():
            own = vars(module)
            for held in held_by(module):
                found += [(held, name, value) for name, value in held.items()]
            found += [(own, name, own[name]) for name in own if name[0] != "_"]
        return found

    def methods(self, codes: Iterable[CodeType]) -> list[Method]:
        """The methods of the modules whose code is among `codes`."""
        traced = set(codes)
        found: list[Method] = []
        for kind in {type(module): None for _, module in self._modules()}:
            for name in {name: None for base in kind.__mro__ for name in vars(base)}:
                function = inspect.getattr_static(kind, name)
                if isinstance(function, FunctionType) and function.__code__ in traced:
                    found.append((kind, name, function, function.__code__))
        return found

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        roots: Mapping[str, Any] = {"": self.module}
        if not isinstance(self.module, nn.Module):
            closure = inspect.getclosurevars(inspect.unwrap(self.module))
            roots = {**closure.globals, **closure.nonlocals}
        for root, module in roots.items():
            if isinstance(module, nn.Module):
                yield from module.named_modules(prefix=root, remove_duplicate=False)


def _tensors_of(prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    parameters, buffers, _ = held_by(module)
    for name, value in {**parameters, **buffers, **own}.items():
        for path, leaf in tree.leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield f"{prefix}.{name}{path}".lstrip("."), leaf
