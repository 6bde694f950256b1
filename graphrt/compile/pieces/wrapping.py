"""Pieces as they are captured: compiled ones in wrappers, splitting ones kept in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphrt.compile.split import Piece
from graphrt.core.base import tree
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.bridges import Bridges
from graphrt.core.capture.wrapper import WrapperOptions
from graphrt.core.device.lookup import wrapper_class
from graphrt.core.replay.eager_part import deliver
from graphrt.core.replay.pool import GraphPool


@dataclass(frozen=True)
class Wrapping:
    """How pieces are captured: where, with which options, and what tells them the step."""

    pool: GraphPool
    options: WrapperOptions
    read_context: Callable[[], ForwardContext | None]


def wrapped_pieces(
    pieces: Sequence[Piece],
    calls: Sequence[Callable[..., Any]],
    wrapping: Wrapping,
    returned: Collection[fx.Node],
) -> list[Callable[..., Any]]:
    """Each compiled piece in a PIECEWISE wrapper of its own, and splitting ones kept in place.

    `outputs` of the options holds for pieces whose results the forward returns: all others are read
    by the pieces that follow, where they are.
    """
    wrap = wrapper_class(wrapping.pool.platform)
    inner = replace(wrapping.options, outputs="pool")
    wrapped: list[Callable[..., Any]] = []
    for piece, call in zip(pieces, calls, strict=True):
        if piece.splitting:
            wrapped.append(BridgedPiece(call, wrapping.read_context) if piece.outputs else call)
            continue
        last = any(node in returned for node in piece.outputs)
        wrapped.append(
            wrap(
                call,
                GraphMode.PIECEWISE,
                pool=wrapping.pool,
                read_context=wrapping.read_context,
                options=wrapping.options if last else inner,
            )
        )
    return wrapped


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
