"""What a forward assigns to while Dynamo traces it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from graphrt.compile.private_torch import SideEffects, side_effects

_MODULE = re.compile(r"\._modules\['(\w+)'\]")
_KEPT = re.compile(r"\._(?:parameters|buffers)\b")
_ROOT = re.compile(r"^G\['_call'\](?:\.__self__)?")


def assigned_names() -> tuple[str, ...]:
    """Attributes, containers and globals that existed before the forward, and that it assigns to.

    Must be called in the backend. In-place operators are no assignments.
    """
    return tuple(dict.fromkeys(_names(side_effects())))


def _names(effects: SideEffects) -> Iterator[str]:
    attributes = getattr(effects, "store_attr_mutations", {})
    for variable in list(effects.id_to_variable.values()):
        source = getattr(variable, "source", None)
        if source is None or not effects.is_modified(variable):
            continue
        name = _readable(source)
        if name is None:
            continue
        stored = list(attributes.get(variable, ()))
        if stored:
            yield from (f"{name}.{attribute}" for attribute in stored)
            continue
        if type(variable).__name__ == "TensorVariable":
            continue
        keys = _changed_keys(variable)
        yield from [f"{name}.{key}" for key in keys] or [name]


def _changed_keys(variable: Any) -> list[str]:
    """The keys of a dict that have other values now, as far as Dynamo tells."""
    now, before = getattr(variable, "items", None), getattr(variable, "original_items", None)
    if not isinstance(now, dict) or not isinstance(before, dict):
        return []
    changed = [key for key, value in now.items() if before.get(key) is not value]
    names = [getattr(getattr(key, "vt", None), "value", None) for key in changed]
    return [name for name in names if isinstance(name, str)]


def _readable(source: Any) -> str | None:
    """ "module.layers.0" from Dynamo's name of where a value comes from; None for a new object."""
    try:
        name = source.name() if callable(source.name) else str(source.name)
    except NotImplementedError:
        return None
    name = _KEPT.sub("", _MODULE.sub(r".\1", name))
    return _ROOT.sub("module", name)
