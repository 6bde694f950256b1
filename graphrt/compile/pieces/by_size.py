"""Chooses code by the size of the batch: some sizes have their own, and general code is not right
for all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileSizeError
from graphrt.compile.private_torch.traces import expressions, fake_tensors
from graphrt.compile.trace.check import axis_symbol
from graphrt.compile.trace.sizes import placeholders, sized, value_of
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown

_SizeSource = tuple[int, int | None, Any]
"""(index of an argument; dimension, or None if it is a number; that size as an expression)"""

_NO_AXES: Mapping[str, tuple[str, int]] = MappingProxyType({})
_NO_CODE: Mapping[int, Callable[..., Any]] = MappingProxyType({})
_MOST_SIZES = 1024
"""So many choices are remembered; then all are forgotten."""


def sizes_to_compile(
    compile_sizes: Sequence[int | str], capture_sizes: Collection[int] | None
) -> tuple[int, ...]:
    """The sizes that `compile_sizes` stands for, ascending.

    Raises `CompileSizeError` for a size that padding would change: no step would ever have it.
    """
    sizes: set[int] = set()
    for size in compile_sizes:
        if isinstance(size, str):
            if capture_sizes is None:
                raise CompileSizeError(
                    "compile_sizes asks for all capture sizes, and nobody has named them",
                    size=size,
                    got=shown(size),
                    expected="capture sizes, or numbers",
                    advice="give the module to a GraphRunner first, or call use_capture_sizes()",
                )
            sizes.update(capture_sizes)
        else:
            sizes.add(size)
    check_sizes(sizes, capture_sizes)
    return tuple(sorted(sizes))


def check_sizes(sizes: Collection[int], capture_sizes: Collection[int] | None) -> None:
    """Raise `CompileSizeError` for the first of `sizes` that is no capture size."""
    if not capture_sizes:
        return  # not known yet, or nothing is captured and so nothing padded
    for size in sorted(sizes):
        if size not in capture_sizes:
            raise CompileSizeError(
                f"compile size {size} is no capture size, so batches of {size} tokens are padded",
                size=size,
                got=size,
                expected=", ".join(map(str, sorted(capture_sizes))),
                advice=f"add {size} to sizes=, or take it out of compile_sizes",
            )


def check_one_size(compile_sizes: Sequence[int | str]) -> None:
    """Raise `CompileSizeError` if sizes are named where no dimension is the batch's."""
    if compile_sizes:
        raise CompileSizeError(
            "compile_sizes names batch sizes, and dynamic_dims={} says that there is one alone",
            size=compile_sizes[0],
            got=shown(compile_sizes),
            expected="no compile_sizes",
            advice="leave compile_sizes out, or name the batch dimensions in dynamic_dims",
        )


class BySize:
    """Runs the code of a piece that is right for the sizes of a call, read from its arguments by
    `sources`.

    `static` has code for single sizes of `symbol`. Other sizes run `general` if all `conditions`
    hold, else `otherwise`. The first call that breaks a condition logs a warning, which names sizes
    by `axes`: symbol -> (axis, offset).
    """

    def __init__(
        self,
        general: Callable[..., Any],
        otherwise: Callable[..., Any],
        conditions: Sequence[Any],
        sources: Sequence[_SizeSource],
        name: str,
        axes: Mapping[str, tuple[str, int]] = _NO_AXES,
        *,
        symbol: str = "",
        static: Mapping[int, Callable[..., Any]] = _NO_CODE,
    ) -> None:
        self._general = general
        self._otherwise = otherwise
        self._conditions = conditions
        self._symbol = symbol
        self._static = static
        symbols = {s.name for each in conditions for s in each.free_symbols}
        symbols |= {symbol} if static else set()
        # Sizes that are a symbol itself are enough if they give all symbols that a choice needs;
        # else composed ones (2*s0) are read too, and solved for their symbol.
        direct = [source for source in sources if source[2].is_symbol]
        self._sources = direct if symbols <= {source[2].name for source in direct} else sources
        self._name = name
        self._axes = axes
        # Sizes as read by `_sources` -> the code that was chosen for them.
        self._code_by_sizes: dict[tuple[int, ...], Callable[..., Any]] = {}
        # The broken conditions that were logged.
        self._warned: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        sizes = tuple(
            args[index] if dim is None else args[index].shape[dim]
            for index, dim, _ in self._sources
        )
        code = self._code_by_sizes.get(sizes)
        if code is None:
            code = self._choose(sizes)
            if len(self._code_by_sizes) >= _MOST_SIZES:
                self._code_by_sizes.clear()
            self._code_by_sizes[sizes] = code
        return code(*args)

    def _choose(self, sizes: Sequence[int]) -> Callable[..., Any]:
        symbols = _symbols_at(self._sources, sizes)
        static = self._static.get(symbols.get(self._symbol, -1))
        if static is not None:
            return static
        for condition in self._conditions:
            if _substituted(condition, symbols) != True:  # noqa: E712
                if condition not in self._warned:
                    self._warned.add(condition)
                    self._warn(condition, symbols)
                return self._otherwise
        return self._general

    def _warn(self, condition: Any, symbols: Mapping[str, int]) -> None:
        sizes: dict[str, object] = {}
        for symbol in sorted(s.name for s in condition.free_symbols):
            axis, offset = self._axes.get(symbol, (symbol, 0))
            sizes[axis] = symbols[symbol] - offset if symbol in symbols else "unknown"
        logger.warning(
            "%s runs uncompiled at sizes of %s: its code is for %s, as in the example; "
            "compile_sizes, or an example of such a size, give it code",
            self._name,
            ", ".join(f"{axis} = {size}" for axis, size in sizes.items()),
            _substituted(
                condition, {symbol: axis_symbol(axis) for symbol, axis in self._axes.items()}
            ),
        )


def size_sources(piece: fx.GraphModule) -> list[_SizeSource]:
    """How to read the symbolic sizes of a piece from the arguments of a call, each once."""
    by_size: dict[Any, _SizeSource] = {}
    for index, node in enumerate(placeholders(piece)):
        value = value_of(node)
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt):
                expression = expressions(size)[0]
                by_size.setdefault(expression, (index, dim, expression))
    return list(by_size.values())


def conditions_on(conditions: Sequence[Any], sources: Sequence[_SizeSource]) -> list[Any]:
    """The `conditions` on sizes of `sources` alone: a piece knows no others."""
    names = {symbol.name for *_, size in sources for symbol in size.free_symbols}
    return [each for each in conditions if {s.name for s in each.free_symbols} <= names]


def _symbols_at(sources: Sequence[_SizeSource], sizes: Sequence[int]) -> dict[str, int]:
    """Name of a symbol -> its value, if `sources` have the values `sizes`. Symbols that these do
    not determine are left out."""
    symbols: dict[str, int] = {}
    for (*_, expression), size in zip(sources, sizes, strict=True):
        if expression.is_symbol:
            symbols[expression.name] = size
    for (*_, expression), size in zip(sources, sizes, strict=True):
        rest = _substituted(expression, symbols)
        unknown = list(rest.free_symbols)
        if len(unknown) == 1:
            # Solve for it if the size is linear in it.
            at_0, at_1, at_2 = (rest.subs(unknown[0], n) for n in range(3))
            if at_1 != at_0 and at_2 - at_1 == at_1 - at_0:
                symbols[unknown[0].name] = int((size - at_0) / (at_1 - at_0))
    return symbols


def _substituted(expression: Any, values: Mapping[str, Any]) -> Any:
    """`expression` with `values` in place of its symbols, by name: a piece from the cache has
    symbols of another process."""
    return expression.subs({s: values[s.name] for s in expression.free_symbols if s.name in values})


def varies_by(piece: fx.GraphModule, symbol: Any, sources: Sequence[_SizeSource]) -> bool:
    """Whether `symbol` is the only size that varies in a piece, and an argument shows its value.
    A piece that varies in two sizes cannot be compiled for one of them alone."""
    is_passed = any(size == symbol for *_, size in sources)
    return is_passed and all(_symbols(value_of(node)) <= {symbol} for node in placeholders(piece))


def static_inputs(piece: fx.GraphModule, symbol: Any, size: int) -> list[Any]:
    """Fake inputs of a piece with `size` for the symbol."""
    with fake_tensors():
        return [sized(value_of(node), {symbol: size}) for node in placeholders(piece)]


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(expressions(value)[0].free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(_symbols, (*value.shape, *value.stride())))
    return set()
