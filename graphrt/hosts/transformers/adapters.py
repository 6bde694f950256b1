"""Which adapters of PEFT a model runs, and which changes of others no step reads.

A layer of PEFT keeps tables by the names of its adapters: weights, scales, ranks. A step reads the
items of the active ones alone. So graphs stay while others are added, deleted or loaded, and each
set of active adapters may have graphs of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from graphrt.trust.places.slots import Place

MOST = 8
"""Sets of active adapters that have graphs at a time."""

_OF_LAYERS = ("adapter_layer_names", "other_param_names", "merged_adapters")
"""Attributes of the classes of PEFT's layers, also of those that only stand around a module."""
_MORE_TABLES = ("lora_variant", "frozen_peft_weight_names")
"""Tables that PEFT's layers do not list."""
_SWITCHES = ("_active_adapter", "_disable_adapters")
"""Attributes of layers that say which adapters are active."""
_OF_CONTAINERS = ("_modules", "_parameters", "_buffers", "_keys")
"""Where a `ModuleDict`, a `ParameterDict` or PEFT's `BufferDict` has its items."""


class Adapters:
    """The adapters of a model as of now, by the names in the tables of its layers."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [each for each in model.modules() if _is_layer(each)]
        tables: list[Any] = [table for layer in self._layers for table in _tables(layer)]
        tables += [vars(each)["_adapters"] for each in self._layers if "_adapters" in vars(each)]
        # id of a table -> the table, kept alive, and the names in it.
        self._known = {id(each): (each, frozenset(each)) for each in tables}
        # id of its `__dict__` -> a layer that runs its base alone.
        self._idle = {id(vars(each)): each for each in self._layers if _active_in(each) is None}
        # Each layer, and its tables of weights.
        self._weights = [(each, [*filter(_has_weights, _tables(each))]) for each in self._layers]
        self._was = self._now()
        self.saw_idle = False
        """Whether something has changed that no step reads."""

    def are_same(self) -> bool:
        """Whether the same adapters are active as at the beginning: fast enough for each call."""
        return self._now() == self._was

    def _now(self) -> list[tuple[Any, ...]]:
        return [_seen_in(layer, tables) for layer, tables in self._weights]

    def active(self) -> Hashable:
        """What steps run of them: for each layer with active or merged adapters the names, and
        which objects they are. Of a model without adapters, or with disabled ones, it is ()."""
        return tuple(each for layer in self._layers if (each := _active_in(layer)) is not None)

    def has(self, active: Any) -> bool:
        """Whether the model still has these adapters, as `active` told of them."""
        here = {
            id(item) for layer in self._layers for each in _tables(layer) for item in each.values()
        }
        return all(here.issuperset(items) for *_, items in active)

    def is_idle(self, place: Place, was: object, now: object) -> bool:
        """Whether a change is one of adapters that are not active."""
        is_idle = self._is_idle(place, was, now)
        self.saw_idle |= is_idle
        return is_idle

    def _is_idle(self, place: Place, was: object, now: object) -> bool:
        # Another adapter may have wrapped a layer.
        if _is_layer(now) and _base_of(now) is was:
            return _active_in(now) is None
        at: Place | None = place
        while at is not None:
            if id(at.holder) in self._idle and type(at.key) is str and at.key in _SWITCHES:
                return _active_in(self._idle[id(at.holder)]) is None
            if id(at.holder) in self._known:
                table, names = self._known[id(at.holder)]
                changed = {at.key} if type(at.key) is str else names.symmetric_difference(table)
                return all(changed.isdisjoint(_active_names(each)) for each in self._layers)
            at = at.owner
        return False


def _is_layer(module: object) -> bool:
    return isinstance(module, nn.Module) and all(hasattr(type(module), each) for each in _OF_LAYERS)


def _base_of(layer: Any) -> object:
    return layer._modules.get("base_layer", layer._modules.get("original_module"))


def _active_names(layer: Any) -> tuple[str, ...]:
    names = layer._active_adapter
    return (names,) if isinstance(names, str) else tuple(names)


def _seen_in(layer: Any, tables: list[dict[str, Any]]) -> tuple[Any, ...]:
    names = _active_names(layer)
    items = [id(table.get(name)) for table in tables for name in names]
    return names, layer._disable_adapters, *layer.merged_adapters, *items


def _active_in(layer: Any) -> tuple[Any, ...] | None:
    """What a layer runs beside its base, None if nothing: see `Adapters.active`."""
    tables, merged = [*_tables(layer)], tuple(layer.merged_adapters)
    names = [] if layer._disable_adapters else _active_names(layer)
    names = tuple(name for name in names if any(name in table for table in tables))
    if not names and not merged:
        return None
    held = [table[name] for table in tables for name in names if name in table]
    items = frozenset(id(each) for each in held if isinstance(each, nn.Module | torch.Tensor))
    return id(layer), names, merged, items


def _has_weights(table: dict[str, Any]) -> bool:
    return any(isinstance(each, nn.Module | torch.Tensor) for each in table.values())


def _tables(layer: Any) -> Iterator[dict[str, Any]]:
    names = (*layer.adapter_layer_names, *layer.other_param_names, *_MORE_TABLES)
    for name in names:
        own, child = vars(layer).get(name), layer._modules.get(name)
        if type(own) is dict:
            yield own
        held = {} if child is None else vars(child)
        yield from (held[each] for each in _OF_CONTAINERS if each in held)
