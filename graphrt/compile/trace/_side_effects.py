"""The attributes, containers and globals to which a forward assigns while Dynamo traces it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphrt.compile.private_torch.sources import readable
from graphrt.compile.private_torch.traces import SideEffects, side_effects

_NOTHING = object()
_PLAIN = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Rewritten:
    """An attribute or item to which the forward assigns the plain value that it had at the trace.

    Compiled code leaves the assignment out, which is right while the value is there. Dynamo guards
    only what the forward reads, so calls compare the value themselves.
    """

    name: str
    """The place in words of the forward: "module.step"."""
    value: object
    # The object or container, and the attribute (if `_is_attribute`) or key there.
    _owner: Any
    _key: Any
    _is_attribute: bool

    def now(self) -> object:
        """The present value; "nothing" if the place is gone."""
        try:
            return getattr(self._owner, self._key) if self._is_attribute else self._owner[self._key]
        except (AttributeError, LookupError):
            return "nothing"

    def holds(self) -> bool:
        """Whether it is the value of the trace. Compared by `repr`, which tells 0.0 from -0.0."""
        now = self.now()
        return type(now) is type(self.value) and repr(now) == repr(self.value)


def assignments() -> tuple[tuple[str, ...], tuple[Rewritten, ...]]:
    """The names of attributes, containers and globals that existed before the forward and that it
    assigns to; and the places to which it assigns their old value.

    Must be called in the backend. In-place operators are no assignments.
    """
    collected = _Assignments(side_effects())
    return tuple(collected.assigned), tuple(collected.rewritten)


class _Assignments:
    """The assignments of a traced forward to objects that existed before it.

    `assigned` has the names of the places whose value changes, each once, in order. `rewritten` has
    the places that get the plain value that they had. Other places that do not change are in
    neither.
    """

    def __init__(self, effects: SideEffects) -> None:
        self._effects = effects
        self.assigned: dict[str, None] = {}
        self.rewritten: list[Rewritten] = []
        attributes = getattr(effects, "store_attr_mutations", {})
        # While Dynamo traces, these objects keep their old values: it only notes assignments.
        objects = {id(each): each for each in effects.keepalive}
        for key, variable in list(effects.id_to_variable.items()):
            source = getattr(variable, "source", None)
            if source is None or not effects.is_modified(variable):
                continue
            name = _name_of(source)
            if name is None:
                continue
            if stored := attributes.get(variable):
                self._note_attributes(name, variable, stored)
            elif type(variable).__name__ != "TensorVariable":
                self._note_items(name, variable, objects.get(key, _NOTHING))

    def _note_attributes(self, name: str, owner: Any, stored: Mapping[str, Any]) -> None:
        for attribute, value in stored.items():
            path = f"{name}.{attribute}"
            if not _is_restored(self._effects, owner, attribute, value):
                self.assigned[path] = None
            elif type(value).__name__ != "DeletedVariable":  # else it was made and deleted again
                old = inspect.getattr_static(owner.value, attribute)
                if type(old) in _PLAIN:
                    self.rewritten.append(
                        Rewritten(path, old, owner.value, attribute, _is_attribute=True)
                    )

    def _note_items(self, name: str, variable: Any, before: Any) -> None:
        keys = _changed_keys(self._effects, variable, before)
        if keys is None:
            self.assigned[name] = None
            return
        for key in keys:
            self.assigned[f"{name}.{key}" if isinstance(key, str) else name] = None
        # Dynamo does not say which items were assigned, so each plain one may have been. Members of
        # a set cannot be assigned.
        if not keys and not isinstance(before, set):
            self.rewritten += [
                Rewritten(f"{name}[{key!r}]", value, before, key, _is_attribute=False)
                for key, value in _items(before)
                if type(value) in _PLAIN
            ]


def _is_restored(effects: SideEffects, owner: Any, attribute: str, stored: Any) -> bool:
    """Whether an attribute has its old value again at the end, as far as Dynamo tells: a graph need
    not repeat a change that the forward itself undoes."""
    instance = getattr(owner, "value", None)
    if instance is None:
        return False
    before = inspect.getattr_static(instance, attribute, _NOTHING)
    if type(stored).__name__ == "DeletedVariable":
        return before is _NOTHING
    return before is not _NOTHING and _is_same(effects, stored, before)


def _changed_keys(effects: SideEffects, variable: Any, before: Any) -> list[object] | None:
    """The keys at which a container's value differs from `before`; None if it changed in a way that
    no key names. Assigning the old value is no change: Whisper's cache does so at every step."""
    now, source = getattr(variable, "items", None), variable.source
    if type(before) is set and now is not None:
        return [] if {_key_of(key) for key in now} == before else None
    if type(before) is dict and isinstance(now, dict):
        values = {_key_of(key): value for key, value in now.items()}
        if list(values) != list(before):
            return [key for key in values if key not in before] or None
    elif type(before) is list and isinstance(now, list) and len(now) == len(before):
        values = dict(enumerate(now))
    else:
        return None
    return [
        key for key, old in _items(before) if not _is_kept(effects, values[key], old, source, key)
    ]


def _items(container: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _key_of(key: Any) -> object:
    """The key itself: Dynamo wraps it once, or twice."""
    return getattr(getattr(key, "vt", key), "value", None)


def _is_same(effects: SideEffects, variable: Any, before: object) -> bool:
    """Whether Dynamo's variable stands for the value `before`, as far as it tells."""
    known = effects.id_to_variable.get(id(before))
    # In-place operators return the tensor that they are given: `self.count += 1` keeps it there.
    if known is variable or (known is not None and _fake_of(known) is _fake_of(variable)):
        return True
    if type(before) is tuple:
        items = getattr(variable, "items", None)
        return (
            isinstance(items, list | tuple)
            and len(items) == len(before)
            and all(_is_same(effects, *both) for both in zip(items, before, strict=True))
        )
    if type(variable).__name__ == "LazyVariableTracker" or not hasattr(variable, "value"):
        return False
    value = variable.value
    is_plain = type(value) is type(before) and type(value) in _PLAIN
    # `repr` tells 0.0 from -0.0.
    return value is before or (is_plain and repr(value) == repr(before))


def _fake_of(variable: Any) -> object:
    """The tensor by which Dynamo stands for that of a variable; the variable if it has none."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    return variable if node is None else node.meta.get("example_value", variable)


def _is_kept(effects: SideEffects, variable: Any, before: object, container: Any, key: Any) -> bool:
    """Whether a value is the one that the container had at that key, even if Dynamo never read
    it."""
    source = getattr(variable, "source", None)
    unread = getattr(source, "base", None) == container and getattr(source, "index", None) == key
    return unread or _is_same(effects, variable, before)


def _name_of(source: Any) -> str | None:
    """The readable name of where a value comes from; None for a new object."""
    try:
        return readable(source)
    except NotImplementedError:
        return None
