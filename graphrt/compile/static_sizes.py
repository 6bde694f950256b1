"""Sizes of the batch that get code of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileSizeError
from graphrt.compile.sizes import value_of


def wanted_sizes(
    compile_sizes: Sequence[int | str], capture_sizes: Collection[int] | None
) -> tuple[int, ...]:
    """The sizes that `compile_sizes` stands for, ascending.

    Raises `CompileSizeError` for a size that padding would change: no step would ever have it.
    """
    found: set[int] = set()
    for size in compile_sizes:
        if isinstance(size, str):
            if capture_sizes is None:
                raise CompileSizeError(
                    "compile_sizes asks for all capture sizes, and nobody has named them",
                    size=size,
                    got=repr(size),
                    expected="capture sizes, or numbers",
                    advice="pass capture_sizes=, or give the module to a GraphRunner first",
                )
            found.update(capture_sizes)
        else:
            found.add(size)
    check_sizes(found, capture_sizes)
    return tuple(sorted(found))


def check_sizes(sizes: Collection[int], capture_sizes: Collection[int] | None) -> None:
    """Raise `CompileSizeError` for the first of `sizes` that is no capture size."""
    if capture_sizes is None:
        return
    for size in sorted(sizes):
        if size not in capture_sizes:
            raise CompileSizeError(
                f"compile size {size} is no capture size, so batches of {size} tokens are padded",
                size=size,
                got=size,
                expected=", ".join(map(str, sorted(capture_sizes))),
                advice=f"add {size} to sizes=, or take it out of compile_sizes",
            )


class BySize:
    """A piece whose code depends on a size that it is given: that size's, or the general one."""

    def __init__(
        self, place: int, static: Mapping[int, Callable[..., Any]], general: Callable[..., Any]
    ) -> None:
        self._place = place
        self._static = dict(static)
        self._general = general

    def __call__(self, *args: Any) -> Any:
        return self._static.get(args[self._place], self._general)(*args)


def size_place(piece: fx.GraphModule, symbol: Any) -> int | None:
    """Which input of a piece is the size `symbol`; None if another symbol is in it, or it is not.

    A piece in which two sizes vary cannot be compiled for one of them alone.
    """
    place = None
    for index, node in enumerate(n for n in piece.graph.nodes if n.op == "placeholder"):
        value = value_of(node)
        if any(other != symbol for other in _symbols(value)):
            return None
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            place = index
    return place


def static_inputs(piece: fx.GraphModule, symbol: Any, size: int) -> list[Any]:
    """Fake inputs of a piece with `size` for the symbol."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def number(value: Any) -> int:
        if isinstance(value, torch.SymInt):
            return int(value.node.expr.subs(symbol, size))
        return int(value)

    found: list[Any] = []
    for node in piece.graph.nodes:
        if node.op != "placeholder":
            continue
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            found.append(number(value))
            continue
        with mode:
            found.append(
                torch.empty_strided(
                    [number(n) for n in value.shape],
                    [number(n) for n in value.stride()],
                    dtype=value.dtype,
                    device=value.device,
                )
            )
    return found


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(_symbols, (*value.shape, *value.stride())))
    return set()
