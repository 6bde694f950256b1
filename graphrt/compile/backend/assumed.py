"""What a compiler takes for granted of batch sizes while it makes code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.traces import expressions, relied_on


@contextmanager
def size_conditions(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """The relations of sizes, as sympy has them, that code which is made in the block is right for.

    In the list, after the block, are those that not all sizes from 2 on fulfil, with those of the
    trace and of pieces before: a compiler decides by the sizes of the example, and takes what it
    decided for known in the next piece. Raises `CompileError` where it took a size for a constant,
    or two for one.
    """
    symbols = _resolved(inputs)
    found: list[Any] = []
    yield found
    found += [each for each in relied_on(inputs) if not _always(each)]
    now = _resolved(inputs)
    if now != symbols:
        changed = next((a, b) for a, b in zip(symbols, now, strict=True) if a != b)
        raise CompileError(
            "the compiler takes a batch size for another one, or for a constant",
            got=f"{changed[0]} = {changed[1]}",
            expected="code for every batch size",
            advice="call ensure_compiled() with 4 rows or more before smaller batches; else take "
            "the lines that computation_graph shows for this piece into an opaque operator, "
            "or use backend='eager'",
        )


def _resolved(inputs: Sequence[Any]) -> list[Any]:
    sizes = (size for each in inputs for size in getattr(each, "shape", (each,)))
    return [expressions(size)[0] for size in sizes if isinstance(size, torch.SymInt)]


def _always(condition: Any) -> bool:
    """Whether a condition holds for all sizes from 2 on."""
    import sympy  # type: ignore[import-untyped]

    larger = {
        symbol: sympy.Symbol(f"{symbol}_less_2", integer=True, nonnegative=True) + 2
        for symbol in condition.free_symbols
    }
    return condition.subs(larger) == True  # type: ignore[no-any-return]  # noqa: E712
