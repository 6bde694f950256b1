"""Hooks of a denoiser, which a replay would leave out."""

from __future__ import annotations

import torch

from graphrt.core.base.torch_names import global_hooks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

OFFLOADING, REGISTRY = "_hf_hook", "_diffusers_hook"
"""Attributes by which accelerate and diffusers mark a module that has their hooks."""


def global_hook() -> str | None:
    """The hooks of all modules that torch has now, if there are any: a replay calls none."""
    return next((f"torch has {name}" for name, hooks in global_hooks.items() if hooks), None)


def hook_of(module: torch.nn.Module) -> str | None:
    """The hook that a replay of a module would leave out, if there is one."""
    for path, each in module.named_modules():
        where = f"submodule {path}" if path else "the denoiser"
        registry = getattr(each, REGISTRY, None)
        if hasattr(each, OFFLOADING):
            return f"{where} has a hook of accelerate"
        if registry is not None and registry.hooks:
            return f"{where} has the hooks {', '.join(registry.hooks)}"
        if path and any(getattr(each, name) for name in _HOOKS):
            return f"{where} has a forward hook"
    return None
