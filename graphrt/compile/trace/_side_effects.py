"""What a forward assigns to while Dynamo traces it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from graphrt.compile.private_torch import SideEffects, side_effects

_MODULE = re.compile(r"\._modules\['(\w+)'\]")
_KEPT = re.compile(r"\._(?:parameters|buffers)\b(?:\['(\w+)'\])?")
_NOTHING = object()
_PLAIN = (int, float, bool, str, bytes)
_ARGUMENT = re.compile(r"^L\['(\w+)'\]")
_IMPORT = re.compile(r"^G\['__import_(\w+?)'\]")
_GLOBAL = re.compile(r"^G\['(\w+)'\]")
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
        name = _name_of(source)
        if name is None:
            continue
        stored = attributes.get(variable)
        if stored:
            for attribute, value in stored.items():
                if not _is_restored(effects, variable, attribute, value):
                    yield f"{name}.{attribute}"
            continue
        if type(variable).__name__ == "TensorVariable":
            continue
        keys = _changed_keys(variable)
        yield from [f"{name}.{key}" for key in keys] or [name]


def _is_restored(effects: SideEffects, owner: Any, attribute: str, stored: Any) -> bool:
    """Whether what an attribute has in the end is what it had before the call, as far as Dynamo
    tells: one that is set and restored has no effect that a graph would have to repeat."""
    instance = getattr(owner, "value", None)
    if instance is None:
        return False
    before = inspect.getattr_static(instance, attribute, _NOTHING)
    if type(stored).__name__ == "DeletedVariable":
        return before is _NOTHING
    if before is _NOTHING:
        return False
    if effects.id_to_variable.get(id(before)) is stored:
        return True
    if not hasattr(stored, "value"):
        return False
    value = stored.value
    return value is before or (
        type(value) is type(before) and type(value) in _PLAIN and value == before
    )


def _changed_keys(variable: Any) -> list[str]:
    """The keys of a dict that have other values now, as far as Dynamo tells."""
    now, before = getattr(variable, "items", None), getattr(variable, "original_items", None)
    if not isinstance(now, dict) or not isinstance(before, dict):
        return []
    named = {_key_of(key): value for key, value in before.items()}
    return [
        name
        for key, value in now.items()
        if isinstance(name := _key_of(key), str) and not _is_same(value, named.get(name))
    ]


def _key_of(key: Any) -> object:
    """The key itself: Dynamo wraps it once, or twice."""
    return getattr(getattr(key, "vt", key), "value", None)


def _is_same(value: Any, before: Any) -> bool:
    """Dynamo may know one value by two objects, of which one is not looked at yet."""
    if value is before:
        return True
    source = getattr(value, "source", None)
    return source is not None and source == getattr(before, "source", None)


def _name_of(source: Any) -> str | None:
    """The readable name of where a value comes from; None for a new object."""
    try:
        return readable_name(source.name() if callable(source.name) else str(source.name))
    except NotImplementedError:
        return None


def readable_name(name: str) -> str:
    """ "module.layers.0" from Dynamo's name of where a value comes from."""
    name = _KEPT.sub(lambda held: f".{held[1]}" if held[1] else "", _MODULE.sub(r".\1", name))
    name = _ARGUMENT.sub(r"\1", _ROOT.sub("module", name))
    name = _IMPORT.sub(lambda found: found[1].replace("_dot_", "."), name)
    return _GLOBAL.sub(r"\1", name)
