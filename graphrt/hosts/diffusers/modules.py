"""What graphs have baked in of a denoiser: its submodules, weights, hooks and plain attributes.

Between two images people load a LoRA, change its weight, replace attention processors or move the
pipeline. A runner finds a moved weight after some steps; here the first call after the change must
not be replayed. So each call compares the module with a picture of it:

1. containers with copies of them: the attributes of each module, its parameters, buffers,
   submodules and hooks, its own lists and dicts, and attributes of its processors;
2. each tensor in them, which must be the same object at the same address.

C does the comparing, at a third of a microsecond a module. What is inside of objects that a module
holds, deeper than an attribute of theirs, is not seen.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from operator import getitem, is_
from typing import Any

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INNER = ("_parameters", "_buffers", "_modules", *_HOOKS)
_TORCHS = frozenset(vars(torch.nn.Module()))
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)

OFFLOADING, REGISTRY = "_hf_hook", "_diffusers_hook"
"""Attributes by which accelerate and diffusers mark a module that has their hooks."""

_NOT_ENTERED = _TORCHS | {REGISTRY, "forward", "_old_forward"}
"""The forward is what counts calls here, or wraps that."""


class ModulePicture:
    """A module as graphs have seen it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._containers = [each for part in module.modules() for each in _containers_of(part)]
        self._copies = [container.copy() for container in self._containers]
        self._held: list[Any] = []
        self._keys: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        for container in self._containers:
            for key, value in _items_of(container):
                if isinstance(value, torch.Tensor):
                    self._held.append(container)
                    self._keys.append(key)
                    self._tensors.append(value)
        self._in_memory = [tensor for tensor in self._tensors if _has_address(tensor)]
        self._addresses = self._addresses_now()
        self.hook = next(_hooks_of(module), None)
        """The hook that a replay would leave out, if there is one."""

    def holds(self) -> bool:
        """Whether the module is still the same."""
        try:
            same = self._containers == self._copies
        except (RuntimeError, ValueError, TypeError):
            # A tensor or an array took the place of another: their == has no truth.
            return False
        if not same:
            return False
        # Tensors of one element have: an equal one is not the same.
        if not all(map(is_, map(getitem, self._held, self._keys), self._tensors)):
            return False
        return self._addresses == self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._in_memory)]


def _containers_of(module: torch.nn.Module) -> Iterator[Any]:
    attributes = vars(module)
    yield attributes
    yield from (attributes[name] for name in _INNER)
    for name, value in attributes.items():
        if name in _NOT_ENTERED or isinstance(value, torch.Tensor):
            continue
        if type(value) in (dict, list):
            yield value
        elif hasattr(value, "__dict__") and not isinstance(value, _CODE):
            # Attention processors that are no modules.
            yield vars(value)


def _items_of(container: Any) -> Any:
    return enumerate(container) if type(container) is list else container.items()


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether it tells one: some subclasses, and sparse tensors, do not."""
    try:
        tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _hooks_of(module: torch.nn.Module) -> Iterator[str]:
    for path, each in module.named_modules():
        where = f"submodule {path}" if path else "the denoiser"
        registry = getattr(each, REGISTRY, None)
        if hasattr(each, OFFLOADING):
            yield f"{where} has a hook of accelerate"
        elif registry is not None and registry.hooks:
            yield f"{where} has the hooks {', '.join(registry.hooks)}"
        elif path and any(getattr(each, name) for name in _HOOKS):
            yield f"{where} has a forward hook"
