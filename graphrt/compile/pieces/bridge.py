"""Splitting pieces between captured ones: what they return must stay at one address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.bridges import Bridges
from graphrt.core.replay.eager_part import deliver


class BridgedPiece:
    """Runs a splitting piece; in PIECEWISE steps its fresh results are copied to fixed places.

    The pieces after it have captured the addresses that they read. Operators that write into given
    outputs need none of this, and no `BridgedPiece`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        read_context: Callable[[], ForwardContext | None],
    ) -> None:
        self._run = run
        self._read_context = read_context
        self._bridges = Bridges()
        self._places: dict[BatchDescriptor, tuple[Any, frozenset[str]]] = {}

    def __call__(self, *args: Any) -> Any:
        result = self._run(*args)
        context = self._read_context()
        if context is None or context.mode is not GraphMode.PIECEWISE:
            return result
        descriptor = context.descriptor
        if descriptor is None:
            return result
        if context.capture is not None or descriptor not in self._places:
            self._places[descriptor] = self._place(result, args)
        fixed, aliased = self._places[descriptor]
        deliver(fixed, result, self._run, aliased)
        return fixed

    def _place(self, result: Any, args: tuple[Any, ...]) -> tuple[Any, frozenset[str]]:
        known = {t.untyped_storage().data_ptr() for t in tree.tensors(args)}
        aliased: set[str] = set()
        tensors: list[torch.Tensor] = []
        for path, leaf in tree.leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.numel() == 0 or leaf.untyped_storage().data_ptr() in known:
                aliased.add(path)
                tensors.append(leaf)
            else:
                tensors.append(self._bridges.buffer((0, len(tensors)), leaf))
        places = iter(tensors)
        return tree.map_tensors(lambda _: next(places), result), frozenset(aliased)
