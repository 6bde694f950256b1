"""Readers of objects and containers: they hand each slot to the walk."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from graphrt.core.trust.places.kinds import Kind, Shape, hashes_plainly
from graphrt.core.trust.places.links import AttributesLink, LengthLink
from graphrt.core.trust.places.slots import (
    ContextValue,
    Element,
    Field,
    Fixed,
    FrozenField,
    FrozenItem,
    Item,
    ItemOfOddKey,
    Member,
    Members,
    Place,
    ScriptTensor,
    Target,
    TupleItem,
    items_of,
    members_of,
    name_of,
    namespace_of,
)
from graphrt.core.trust.places.walk import Walk

_SAMPLE = 64
_MOST_ODD = 64
_INNER = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_EVERY_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that torch gives to every module; of these only `_INNER` matter to a forward."""


def attributes(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """An object's `__dict__`, slots and class."""
    _own_attributes(walk, value, place, shape)


def module(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    assert shape.dict_of is not None
    held, path, own = shape.dict_of(value), place.path, id(value)
    for name in _INNER:
        inner = held.get(name)
        if not inner or not issubclass(type(inner), dict):
            continue
        before = f"{path}.{name}" if name.endswith("hooks") else path
        for key, each in items_of(inner) or ():
            where = f".{key}" if type(key) is str and not key.isdigit() else f"[{key}]"
            walk.slot(own, Item(before + where, inner, key), each)
    _own_attributes(walk, value, place, shape, _INNER, _EVERY_MODULES)


def script(walk: Walk, value: torch.jit.ScriptModule, place: Place, shape: Shape) -> None:
    walk.opaque.append((place.path, type(value).__qualname__))
    for named in (value.named_parameters, value.named_buffers):
        for name, tensor in named():
            walk.slot(id(value), ScriptTensor(f"{place.path}.{name}", value, name), tensor)


def items(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    path, own, count = place.path, id(value), dict.__len__(value)
    walk.guards.append((own, LengthLink(path, value, dict)))
    sample = items_of(value, _SAMPLE)
    if not walk.is_too_long(path, count, sample and [each for _, each in sample]):
        _read_items(walk, value, path, own)
    _attributes_of_subclass(walk, value, place, shape)


def _read_items(walk: Walk, value: Any, path: str, own: int) -> None:
    found = items_of(value, max(walk.left, 0)) or []
    # One odd key is enough: a look-up of any other may compare with it.
    plain = all(hashes_plainly(key) for key, _ in found)
    if not plain and len(found) > _MOST_ODD:  # every look at one is a search
        walk.opaque.append((path, f"{len(found)} items, some by keys with their own hash"))
        del found[_MOST_ODD:]
    item = Item if plain else ItemOfOddKey
    for key, each in found:
        text = repr(key) if type(key) in (str, int) else f"<{type(key).__name__}>"
        walk.slot(own, item(f"{path}[{text}]", value, key), each)


def elements(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A list or a deque."""
    path, own, base = place.path, id(value), list if shape.kind is Kind.LIST else deque
    walk.guards.append((own, LengthLink(path, value, base)))
    if not walk.is_too_long(path, base.__len__(value), members_of(value, base, _SAMPLE)):
        for index, each in enumerate(members_of(value, base, max(walk.left, 0)) or ()):
            walk.slot(own, Element(f"{path}[{index}]", value, index, base), each)
    _attributes_of_subclass(walk, value, place, shape)


def tuple_items(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    path, own = place.path, id(value)
    fields = namespace_of(type(value)).get("_fields")
    names: tuple[Any, ...] = fields if type(fields) is tuple else ()
    if not walk.is_too_long(path, tuple.__len__(value), members_of(value, tuple, _SAMPLE)):
        for index, each in enumerate(members_of(value, tuple, max(walk.left, 0)) or ()):
            where = f".{names[index]}" if index < len(names) else f"[{index}]"
            walk.slot(own, TupleItem(path + where, place, index), each)
    _attributes_of_subclass(walk, value, place, shape)


def members(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A set; one of plain values is one place."""
    path, own, base = place.path, id(value), set if shape.kind is Kind.SET else frozenset
    if base is set:
        walk.guards.append((own, LengthLink(path, value, set)))
    if not walk.is_too_long(path, base.__len__(value), members_of(value, base, _SAMPLE)):
        found = members_of(value, base, max(walk.left, 0)) or []
        if base is set and all(walk.shape(type(each)).kind is Kind.PLAIN for each in found):
            walk.numbers.append(Members(path, value))
            found = []
        for index, each in enumerate(found):
            walk.slot(own, Member(f"{path}{{{index}}}", value, each, base), each)
    _attributes_of_subclass(walk, value, place, shape)


def proxied(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    for inner in gc.get_referents(value):  # the proxy's methods would run the mapping's own
        walk.slot(id(value), Fixed(place.path, inner), inner)


def target(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """What a weak reference refers to."""
    found = Target(f"{place.path}()", value)
    walk.slot(id(value), found, found.get())


def context_value(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    found = ContextValue(f"{place.path}.get()", value)
    walk.slot(id(value), found, found.get())


def _attributes_of_subclass(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    if shape.users:
        _own_attributes(walk, value, place, shape)


def _own_attributes(
    walk: Walk,
    value: Any,
    place: Place,
    shape: Shape,
    inner: Iterable[str] = (),
    skipped: frozenset[str] = frozenset(),
) -> None:
    path, own = place.path, id(value)
    item, field = (FrozenItem, FrozenField) if shape.frozen else (Item, Field)
    if shape.dict_of is not None:
        held = shape.dict_of(value)
        if held or shape.kind is not Kind.TENSOR:
            walk.guards.append((own, AttributesLink(path, value, shape.dict_of, inner)))
        for name, each in items_of(held) or ():
            if name not in skipped and type(name) is str:
                walk.slot(own, item(f"{path}.{name}", held, name), each)
    for name, descriptor in shape.slots:
        slot = field(f"{path}.{name}", value, descriptor)
        walk.slot(own, slot, slot.get())
    for base in shape.users:
        walk.enter(own, base, Fixed(name_of(base), base))
