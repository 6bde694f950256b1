"""Whether a model is still the one that was captured.

graphrt finds weights that have moved, but not a flag, a hook or an adapter that is another one
(`docs/trust.md`). A call of `generate` is long enough to look at all of them. The look compares
identities, some 3 us a module; values are only compared where an identity is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")
_CONFIGS = (
    "_attn_implementation",
    "_experts_implementation",
    "output_attentions",
    "output_hidden_states",
)
_IGNORED = frozenset({"_previous_max_cache_length", "_output_capturing_hooks_installed"})
_RECORDERS = "transformers.utils.output_capturing"
"""Its hooks stay in a model after a call that asked for hidden states, and do nothing in others."""
_DEEPEST = 3


class Fingerprint:
    """What the modules of a model were when it was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [_Seen(name, module) for name, module in model.named_modules()]
        self._next = 0

    def first_change(self, count: int | None = None) -> str | None:
        """The name of the first module that is another one now; None if all are the same. With a
        `count` the next ones are looked at, in turn."""
        modules = self._modules
        if count is not None:
            first, self._next = self._next, (self._next + count) % len(modules)
            modules = modules[first : first + count]
        for seen in modules:
            if not seen.is_same():
                return seen.name or "the model itself"
        return None


class _Seen:
    """One module as it was."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self._module = name, module
        state = module.__dict__
        by_torch = {*_HOOKS, *_TENSORS, "_modules"}
        # Whose contents may change though they are the same objects.
        self._containers = [
            each
            for each, value in state.items()
            if type(value) in _CONTAINERS and each not in by_torch
        ]
        # Kept, or another object might get the address of one that is gone.
        self._objects = [*state.values()]
        self._look, self._facts = self._identities(), [*_facts(module)]

    def is_same(self) -> bool:
        look = self._identities()
        if look == self._look:
            return True
        if [*_facts(self._module)] != self._facts:
            return False
        # Equal values in other objects: a number that was computed again.
        self._look, self._objects = look, [*self._module.__dict__.values()]
        return True

    def _identities(self) -> list[Any]:
        state = self._module.__dict__
        look: list[Any] = [self._module.__class__, *map(id, state.values())]
        look += map(id, state["_modules"].values())
        look += _hooks_and_tensors(state)
        look += [plain(state.get(each)) for each in self._containers if state.get(each)]
        config = state.get("config")
        if config is not None:
            look += [getattr(config, name, None) for name in _CONFIGS]
        return look


def _hooks_and_tensors(state: dict[str, Any]) -> Iterator[Any]:
    for hooks in _HOOKS:
        yield [
            key
            for key, hook in state[hooks].items()
            if getattr(hook, "__module__", None) != _RECORDERS
        ]
    for tensors in _TENSORS:
        for tensor in state[tensors].values():
            # A quantized weight of a class of its own may have no address.
            known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            yield id(tensor), tensor.data_ptr() if known else None


def _facts(module: torch.nn.Module) -> Iterator[Any]:
    state = module.__dict__
    yield module.__class__
    yield [*map(id, state["_modules"].values())]
    yield from _hooks_and_tensors(state)
    yield [(name, plain(each)) for name, each in state.items() if name not in _IGNORED]
    config = state.get("config")
    if config is not None:
        yield [getattr(config, name, None) for name in _CONFIGS]


def plain(value: object, depth: int = 0) -> object:
    """A value that can be compared; of others their class."""
    if isinstance(value, _PLAIN):
        return value
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, set | frozenset) and all(isinstance(each, _PLAIN) for each in value):
        return set(value)
    if depth < _DEEPEST and type(value) is dict:
        return {key: plain(each, depth + 1) for key, each in value.items()}
    return type(value)
