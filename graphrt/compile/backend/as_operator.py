"""Compiled code as one operator, for devices that capture what the dispatcher sees."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_library: Any = torch.library.Library("graphrt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "compiled_piece(int piece, Tensor(a!)[] tensors, SymInt[] sizes, bool[] order) -> Tensor[]"
)

_numbers = itertools.count()
_pieces: weakref.WeakValueDictionary[int, AsOperator] = weakref.WeakValueDictionary()


class AsOperator:
    """Calls `run` through the operator `graphrt::compiled_piece`.

    The kernels of compiled code are no operators: a capture that records operators would miss
    them, and take in this one call instead.
    """

    def __init__(self, run: Callable[..., Any], returns: int | None) -> None:
        self._run = run
        self._returns = returns
        self._number = next(_numbers)
        _pieces[self._number] = self

    def __call__(self, *args: Any) -> Any:
        order = [isinstance(each, torch.Tensor) for each in args]
        results = torch.ops.graphrt.compiled_piece.default(
            self._number,
            [each for each in args if isinstance(each, torch.Tensor)],
            [each for each in args if not isinstance(each, torch.Tensor)],
            order,
        )
        if self._returns is None:
            return None
        return results[0] if self._returns == 1 else tuple(results)

    def run(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], order: Sequence[bool]
    ) -> list[torch.Tensor]:
        """What the operator does."""
        of_kind = {True: iter(tensors), False: iter(sizes)}
        results = self._run(*(next(of_kind[tensor]) for tensor in order))
        if self._returns is None:
            return []
        return [results] if self._returns == 1 else list(results)


def _compiled_piece(
    piece: int, tensors: list[torch.Tensor], sizes: list[int], order: list[bool]
) -> list[torch.Tensor]:
    return _pieces[piece].run(tensors, sizes, order)


_library.impl("compiled_piece", _compiled_piece, "CompositeExplicitAutograd")
