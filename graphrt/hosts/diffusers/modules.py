"""What graphs have baked in of a denoiser: its submodules, weights, hooks and plain attributes.

Between two images people load a LoRA, change its weight, replace attention processors or move the
pipeline. A runner finds a moved weight after some steps; here the first call after the change must
not be replayed. So each call compares the module with a picture of it: dicts with copies of them,
which takes C a microsecond a module, and addresses of weights.

Not seen: what is inside of objects that a module holds, deeper than an attribute of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INNER = ("_parameters", "_buffers", "_modules", *_HOOKS)
_TORCHS = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)

OFFLOADING, REGISTRY = "_hf_hook", "_diffusers_hook"
"""Attributes by which accelerate and diffusers mark a module that has their hooks."""

_NOT_ENTERED = (REGISTRY, "forward", "_old_forward")
"""The forward is what counts calls here, or wraps that."""


class ModulePicture:
    """A module as graphs have seen it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        for each in module.modules():
            for container in _containers_of(each):
                self._containers.append(container)
                self._copies.append(container.copy())
        self._weights = [*module.parameters(), *module.buffers()]
        self._addresses = [*map(torch.Tensor.data_ptr, self._weights)]
        self.hook = next(_hooks_of(module), None)
        """The hook that a replay would leave out, if there is one."""

    def holds(self) -> bool:
        """Whether the module is still the same."""
        try:
            same = self._containers == self._copies
        except (RuntimeError, ValueError, TypeError):
            # A tensor or an array took the place of another: their == has no truth.
            return False
        return same and self._addresses == [*map(torch.Tensor.data_ptr, self._weights)]


def _containers_of(module: torch.nn.Module) -> Iterator[Any]:
    attributes = vars(module)
    yield attributes
    for name in _INNER:
        yield attributes[name]
    for name, value in attributes.items():
        if name in _TORCHS or name in _NOT_ENTERED or isinstance(value, _PLAIN):
            continue
        if type(value) in (dict, list):
            yield value
        elif (
            hasattr(value, "__dict__") and not isinstance(value, type) and not callable_code(value)
        ):
            # Attention processors that are no modules.
            yield vars(value)


def callable_code(value: object) -> bool:
    return hasattr(value, "__code__") or hasattr(value, "__func__")


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
