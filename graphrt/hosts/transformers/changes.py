"""Which changes of a model its graphs would not see, and which make no difference.

A call of `generate` is long enough for a look at all that the model's forward reaches in Python
(`SameModel`): modules, config, hooks, code. The look is made at each level of checks, also at
`check="off"`.

What the code of a hook reads cannot be compared: `hooks_inside` names the hooks with which a model
is not captured.
"""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base.torch_names import global_hooks
from graphrt.hosts.transformers.adapters import Adapters
from graphrt.trust.places.slots import Place

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
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
        "._cached_continuous_batching_manager",
        ".adapter_layer_names",
        "._previous_max_cache_length",
        "._hf_peft_config_loaded",
        "._output_capturing_hooks_installed",
        ".generation_config",
        ".peft_config",
        ".prepare_inputs_for_generation",
        ".rope_deltas",
    }
)
"""Attributes of modules that no step reads: `generate_batch` sets the first one, `generate` the
last one, for the positions that it passes, and PEFT and its prompt tuning the others."""
_OF_PROCESS = ("os.environ", "sys.argv")
"""Some code of transformers reads them, at its import or in a prompt."""
_RECORDERS = "transformers.utils.output_capturing"
"""Its hooks stay in a model after a call that asked for hidden states, and do nothing in others."""
_KNOWN_HOOKS = (_RECORDERS, "torch.nn.utils.")
"""Modules of hooks that read nothing but the tensors of their module."""


def hooks_inside(model: torch.nn.Module) -> str | None:
    """The first hook that a replay would leave out, or would run as it was at the capture; None if
    there is none. Those of the model itself run around its graphs."""
    if any(global_hooks.values()):
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


def _module_of(hook: object) -> str:
    return getattr(hook, "__module__", None) or ""


def is_unread(
    place: Place, was: object, now: object, *, adapters: Adapters, unread: frozenset[str]
) -> bool:
    """Whether no call that graphs serve reads what is at a place. `unread` are more names of a
    config that none reads."""
    if _RECORDERS in (_module_of(was), _module_of(now)) or _is_remade(place, was):
        return True
    if adapters.is_idle(place, was, now):
        return True
    at: Place | None = place
    while at is not None:
        if at.label in _IGNORED or at.label in _OF_PROCESS:
            return True
        if at.owner is not None and at.label[1:] in _UNREAD | unread and _is_config(at.owner):
            return True
        at = at.owner
    return False


def _is_remade(place: Place, was: object) -> bool:
    """Whether a hook of torch computes a tensor at each eager step: a pruned weight."""
    owner = None if place.owner is None else place.owner.get()
    if not isinstance(owner, torch.nn.Module) or not isinstance(was, torch.Tensor):
        return False
    hooks = owner.__dict__["_forward_pre_hooks"].values()
    return any(_module_of(hook).startswith("torch.nn.utils.") for hook in hooks)


def _is_config(place: Place) -> bool:
    of: Any = type(place.get())
    return hasattr(of, "model_type")
