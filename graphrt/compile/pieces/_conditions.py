"""Compiled code that is right for some sizes of the batch only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.traces import expressions
from graphrt.compile.trace.check import axis_symbol
from graphrt.compile.trace.sizes import value_of
from graphrt.core.base.log import logger

_Place = tuple[int, int | None, Any]
"""The number of an argument, the dimension if that is a tensor, and the size as sympy has it."""

_NO_AXES: Mapping[str, tuple[str, int]] = MappingProxyType({})
_MOST_SIZES = 1024


class WhereRight:
    """Calls `code` for sizes at which all `conditions` on them hold, and `otherwise` for others.

    `places` of the arguments say the sizes. The first call that does not fulfil a condition is a
    warning, which says sizes by the names of `axes`: the axis of a symbol, and its offset.
    """

    def __init__(
        self,
        code: Callable[..., Any],
        otherwise: Callable[..., Any],
        conditions: Sequence[Any],
        places: Sequence[_Place],
        name: str,
        axes: Mapping[str, tuple[str, int]] = _NO_AXES,
    ) -> None:
        self.code = code
        self._otherwise = otherwise
        self._conditions = conditions
        direct = [place for place in places if place[2].is_symbol]
        wanted = {s.name for each in conditions for s in each.free_symbols}
        self._places = direct if wanted <= {place[2].name for place in direct} else places
        self._name = name
        self._axes = axes
        self._known: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._told: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        sizes = tuple(
            args[index] if dim is None else args[index].shape[dim] for index, dim, _ in self._places
        )
        chosen = self._known.get(sizes)
        if chosen is None:
            chosen = self._chosen(sizes)
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[sizes] = chosen
        return chosen(*args)

    def _chosen(self, sizes: Sequence[int]) -> Callable[..., Any]:
        known = _symbols_at(self._places, sizes)
        for condition in self._conditions:
            if _with(condition, known) != True:  # noqa: E712
                if condition not in self._told:
                    self._told.add(condition)
                    self._tell(condition, known)
                return self._otherwise
        return self.code

    def _tell(self, condition: Any, known: Mapping[str, int]) -> None:
        sizes: dict[str, object] = {}
        for symbol in sorted(s.name for s in condition.free_symbols):
            axis, offset = self._axes.get(symbol, (symbol, 0))
            sizes[axis] = known[symbol] - offset if symbol in known else "unknown"
        logger.warning(
            "%s runs uncompiled at sizes of %s: its code is for %s, as in the example; "
            "compile_sizes, or an example of such a size, give it code",
            self._name,
            ", ".join(f"{axis} = {size}" for axis, size in sizes.items()),
            _with(condition, {symbol: axis_symbol(axis) for symbol, axis in self._axes.items()}),
        )


def size_places(piece: fx.GraphModule) -> list[_Place]:
    """Where a call of a piece says the sizes that are symbols in it, each once."""
    found: dict[Any, _Place] = {}
    for index, node in enumerate(n for n in piece.graph.nodes if n.op == "placeholder"):
        value = value_of(node)
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt):
                expression = expressions(size)[0]
                found.setdefault(expression, (index, dim, expression))
    return list(found.values())


def conditions_on(conditions: Sequence[Any], places: Sequence[_Place]) -> list[Any]:
    """Those of `conditions` that are about sizes of `places` only: a piece knows of no others."""
    names = {symbol.name for *_, size in places for symbol in size.free_symbols}
    return [each for each in conditions if {s.name for s in each.free_symbols} <= names]


def _symbols_at(places: Sequence[_Place], sizes: Sequence[int]) -> dict[str, int]:
    """The symbols of `places` by name, where these have the values `sizes`; without those that no
    place tells."""
    known: dict[str, int] = {}
    for (*_, expression), size in zip(places, sizes, strict=True):
        if expression.is_symbol:
            known[expression.name] = size
    for (*_, expression), size in zip(places, sizes, strict=True):
        rest = _with(expression, known)
        unknown = list(rest.free_symbols)
        if len(unknown) == 1:
            at_0, at_1, at_2 = (rest.subs(unknown[0], n) for n in range(3))
            if at_1 != at_0 and at_2 - at_1 == at_1 - at_0:
                known[unknown[0].name] = int((size - at_0) / (at_1 - at_0))
    return known


def _with(expression: Any, known: Mapping[str, Any]) -> Any:
    """By name: symbols of another process are not the same objects."""
    return expression.subs({s: known[s.name] for s in expression.free_symbols if s.name in known})
