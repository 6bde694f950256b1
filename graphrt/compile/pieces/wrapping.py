"""Pieces as they are captured: compiled ones in wrappers, splitting ones kept in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from graphrt.compile.split import Piece
from graphrt.core.base import tree
from graphrt.core.batch import BatchDescriptor, ForwardContext, GraphMode
from graphrt.core.capture import Bridges, GraphOptions, wrapper_class
from graphrt.core.replay import GraphPool, SegmentHooks, deliver


@dataclass(frozen=True)
class Wrapping:
    """How pieces are captured: where, with which options, and what tells them the step."""

    pool: GraphPool
    options: GraphOptions
    read_context: Callable[[], ForwardContext | None]
    hooks: SegmentHooks | None = None


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
                hooks=wrapping.hooks,
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
            known = {t.untyped_storage().data_ptr() for t in tree.tensors(args)}
            self._places[descriptor] = self._bridges.fix(
                0, result, stays=lambda _, tensor: tensor.untyped_storage().data_ptr() in known
            )
        fixed, aliased = self._places[descriptor]
        deliver(fixed, result, self._run, aliased)
        return fixed
