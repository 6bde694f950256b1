"""Sizes of the batch that get code of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileSizeError
from graphrt.compile.private_torch.traces import expressions, fake_tensors
from graphrt.compile.trace.sizes import value_of
from graphrt.core.base.option_values import shown


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
                    got=shown(size),
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
    if not capture_sizes:
        return  # nobody has said, or nothing is captured, and nothing padded
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


SizeSource = tuple[int, int | None]
"""Where a call says the size: the number of an argument, and the dimension if that is a tensor."""


class BySize:
    """A piece that has code for some sizes of the batch: that size's code, or the general one."""

    def __init__(
        self,
        source: SizeSource,
        static: Mapping[int, Callable[..., Any]],
        general: Callable[..., Any],
    ) -> None:
        self._argument, self._dim = source
        self._static = dict(static)
        self._general = general

    def __call__(self, *args: Any) -> Any:
        size = args[self._argument]
        if self._dim is not None:
            size = size.shape[self._dim]
        return self._static.get(size, self._general)(*args)


def size_source(piece: fx.GraphModule, symbol: Any) -> SizeSource | None:
    """Where a call of a piece says the size `symbol`; None if another symbol is in the piece, or it
    is not: what varies in two sizes cannot be compiled for one of them alone."""
    number: SizeSource | None = None
    tensor: SizeSource | None = None
    for index, node in enumerate(n for n in piece.graph.nodes if n.op == "placeholder"):
        value = value_of(node)
        if any(other != symbol for other in _symbols(value)):
            return None
        if isinstance(value, torch.SymInt) and expressions(value)[0] == symbol:
            number = index, None
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and expressions(size)[0] == symbol:
                    tensor = tensor or (index, dim)
    return number or tensor


def static_inputs(piece: fx.GraphModule, symbol: Any, size: int) -> list[Any]:
    """Fake inputs of a piece with `size` for the symbol."""
    mode = fake_tensors()

    def number(value: Any) -> int:
        if isinstance(value, torch.SymInt):
            return int(expressions(value)[0].subs(symbol, size))
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
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(expressions(value)[0].free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(_symbols, (*value.shape, *value.stride())))
    return set()
