"""Whether a model is still the one that was captured.

graphrt finds weights that have moved, but not a flag, a hook or an adapter that was replaced
(`docs/concepts/trust.md`). A call of `generate` is long enough to look at all of them, and at the
numbers of the config, which some forwards read. The look compares identities, some 3 us a module;
values are only compared where an identity differs.

Code that anybody may replace is compared too: `forward` of a class of modules, and the functions
that transformers has registered for an attention and its mask.

What the code of a hook reads cannot be compared: `hooks_inside` names the hooks with which a model
is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphrt.core.base import tree

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")
_UNREAD = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "problem_type",
        "transformers_version",
    }
)
"""Names in a config that no call served by graphs reads. A forward with labels writes some, and
`save_pretrained` writes the dtype: the dtypes of the weights themselves are compared."""
TOKEN_IDS = frozenset({"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"})
"""Names in a config that `generate` reads and steps do not."""
_IGNORED = frozenset(
    {
        "_previous_max_cache_length",
        "_output_capturing_hooks_installed",
        "generation_config",
        "prepare_inputs_for_generation",
        "rope_deltas",
    }
)
"""Attributes of modules that no step reads: `generate` sets the last one, for the positions that it
passes, and PEFT's prompt tuning those two before."""
_RECORDERS = "transformers.utils.output_capturing"
"""Its hooks stay in a model after a call that asked for hidden states, and do nothing in others."""
_KNOWN_HOOKS = (_RECORDERS, "torch.nn.utils.")
"""Modules of hooks that read nothing but the tensors of their module."""
_EVERYWHERE = ("_global_forward_hooks", "_global_forward_pre_hooks")
_DEEPEST = 3


def hooks_inside(model: torch.nn.Module) -> str | None:
    """The first hook that a replay would leave out, or would run as it was at the capture; None if
    there is none. Those of the model itself run around its graphs."""
    if _hooks_everywhere():
        return "torch calls hooks in all modules"
    for name, module in model.named_modules():
        hooks = [hook for each in _HOOKS for hook in module.__dict__[each].values()]
        all_known = all(_module_of(hook).startswith(_KNOWN_HOOKS) for hook in hooks)
        by_accelerate = getattr(module, "_hf_hook", None)
        inner = getattr(by_accelerate, "hooks", None) or (by_accelerate,)
        offloads = all(each is None or _module_of(each).startswith("accelerate.") for each in inner)
        if (name and not all_known) or not offloads:
            return f"{name or 'the model itself'} has a hook"
    return None


def _hooks_everywhere() -> bool:
    return any(getattr(torch.nn.modules.module, each) for each in _EVERYWHERE)


def _module_of(hook: object) -> str:
    return getattr(hook, "__module__", None) or ""


class Fingerprint:
    """Tells what changed in a model since this was made: modules, configs or replaceable code."""

    def __init__(self, model: torch.nn.Module, unread: frozenset[str] = frozenset()) -> None:
        """`unread` are names of a config whose values may change."""
        unread |= _UNREAD
        modules = [*model.named_modules()]
        self._modules = [_Seen(name, module, unread) for name, module in modules]
        # One module for each config, the first that has it.
        by_config: dict[int, torch.nn.Module] = {}
        for _, module in modules:
            if module.__dict__.get("config") is not None:
                by_config.setdefault(id(module.__dict__["config"]), module)
        # (module, the values of its config) for each config.
        self._configs = [(each, _config_facts(each, unread)) for each in by_config.values()]
        self._unread = unread
        self._classes = [*{type(module): None for _, module in modules}]
        configs = [module.__dict__["config"] for module in by_config.values()]
        names = {getattr(each, "_attn_implementation", None) for each in configs}
        # The names of the attentions that the configs choose.
        self._attentions = sorted(name for name in names if isinstance(name, str))
        self._code = self._code_now()
        # The index of the module that a look at some modules begins with.
        self._next = 0

    def first_change(self, count: int | None = None) -> str | None:
        """The name of the first module, or value of a config, that has changed; None if none has.
        With a `count` only so many modules are looked at, the next in turn, and all configs."""
        if _hooks_everywhere():
            return "torch calls hooks in all modules"
        for module, facts in self._configs:
            now = _config_facts(module, self._unread)
            if now != facts:
                return f"config.{_first_other(now, facts)}"
        code = self._code_now()
        if code != self._code:
            indices = range(len(code))
            return self._name_of_code(
                next(index for index in indices if code[index] != self._code[index])
            )
        modules = self._modules
        if count is not None:
            first, self._next = self._next, (self._next + count) % len(modules)
            modules = modules[first : first + count]
        for recorded in modules:
            if not recorded.is_same():
                return recorded.name or "the model itself"
        return None

    def _code_now(self) -> list[object]:
        """The functions that anybody may replace for all models at once."""
        return [
            *(each.forward for each in self._classes),
            *(ALL_ATTENTION_FUNCTIONS.get(name) for name in self._attentions),
            *(ALL_MASK_ATTENTION_FUNCTIONS.get(name) for name in self._attentions),
        ]

    def _name_of_code(self, index: int) -> str:
        names = [
            *(f"{each.__name__}.forward" for each in self._classes),
            *(f"the attention {name!r}" for name in self._attentions),
            *(f"the mask of the attention {name!r}" for name in self._attentions),
        ]
        return names[index]


class _Seen:
    """One module as it was when the fingerprint was made; `is_same` compares it with the module
    now."""

    def __init__(self, name: str, module: torch.nn.Module, unread: frozenset[str]) -> None:
        self.name, self._module, self._unread = name, module, unread
        state = module.__dict__
        by_torch = {*_HOOKS, *_TENSORS, "_modules"}
        # Containers: their contents may change though they are the same objects.
        self._containers = [
            each
            for each, value in state.items()
            if type(value) in _CONTAINERS and each not in by_torch
        ]
        # Kept alive: a new object might get the id of one that was freed.
        self._objects = [*state.values()]
        # Identities are compared first, as that is fast; values only where these differ.
        self._look, self._facts = self._identities(), [*_facts(module, unread)]

    def is_same(self) -> bool:
        look = self._identities()
        if look == self._look:
            return True
        if [*_facts(self._module, self._unread)] != self._facts:
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
        return look


def _hooks_and_tensors(state: dict[str, Any]) -> Iterator[Any]:
    for hooks in _HOOKS:
        yield [key for key, hook in state[hooks].items() if _module_of(hook) != _RECORDERS]
    for tensors in _TENSORS:
        for tensor in state[tensors].values():
            yield id(tensor)
            # A quantized weight of a class of its own may have no address.
            if type(tensor) in tree.BARE:
                for part in tree.PLACEMENT:
                    yield part(tensor)


def _facts(module: torch.nn.Module, unread: frozenset[str]) -> Iterator[Any]:
    state = module.__dict__
    yield module.__class__
    yield [*map(id, state["_modules"].values())]
    yield from _hooks_and_tensors(state)
    yield [(name, plain(each)) for name, each in state.items() if name not in _IGNORED]
    yield _config_facts(module, unread)


def _config_facts(module: torch.nn.Module, unread: frozenset[str]) -> dict[str, object]:
    config = module.__dict__.get("config")
    return {} if config is None else dict(_numbers(config, unread))


def _numbers(config: object, unread: frozenset[str], prefix: str = "") -> Iterator[Any]:
    """The values of a config and of those in it (of text, of pictures), by their names."""
    for name, value in [*getattr(config, "__dict__", {}).items()]:
        if name in unread:
            continue
        if hasattr(type(value), "model_type"):
            yield from _numbers(value, unread, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", plain(value)


def _first_other(one: dict[str, object], other: dict[str, object]) -> str:
    missing = object()
    return next(
        name for name in (*one, *other) if one.get(name, missing) != other.get(name, missing)
    )


def plain(value: object, depth: int = 0) -> object:
    """A copy of a value, to compare with later; for a value that cannot be compared, its class."""
    if isinstance(value, _PLAIN):
        return value
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, set | frozenset) and all(isinstance(each, _PLAIN) for each in value):
        return set(value)
    if depth < _DEEPEST and type(value) is dict:
        return {key: plain(each, depth + 1) for key, each in value.items()}
    return type(value)
