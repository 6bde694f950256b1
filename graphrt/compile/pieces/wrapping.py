"""Pieces as they are captured: compiled ones in wrappers, splitting ones run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt.compile.split.graph import Piece, returned_count
from graphrt.core.base import tree
from graphrt.core.base.errors import StaleInputError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.recorder import Bridges
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.replay.entry import EagerPart, SegmentHooks
from graphrt.core.replay.pool import GraphPool


@dataclass(frozen=True)
class Wrapping:
    """How pieces are captured: in which pool, with which options, and in which step's context."""

    pool: GraphPool
    options: GraphOptions
    read_context: Callable[[], ForwardContext | None]
    hooks: SegmentHooks | None = None

    def wrap(
        self,
        call: Callable[..., Any],
        options: GraphOptions | None = None,
        *,
        breakable: bool = False,
    ) -> GraphWrapper:
        """A PIECEWISE wrapper; with `options` in place of its own."""
        return wrapper_class(self.pool.platform)(
            call,
            GraphMode.PIECEWISE,
            pool=self.pool,
            read_context=self.read_context,
            options=options or self.options,
            breakable=breakable,
            hooks=self.hooks,
        )


@dataclass(frozen=True)
class RunnablePiece:
    """A piece; the function to `run` for its graph; and the name of its compiled `code`, which is
    "" for a splitting piece."""

    piece: Piece
    run: Callable[..., Any]
    code: str = ""


def nothing_to_wrap(pieces: Sequence[Piece], *, whole_graph: bool) -> bool:
    """Whether no piece would be captured, as the forward is splitting operators and views alone.
    One wrapper around all of it then gives each descriptor a graph, so that steps are served."""
    return not whole_graph and all(piece.splitting or piece.is_empty for piece in pieces)


def wrapped_pieces(
    pieces: Sequence[RunnablePiece], wrapping: Wrapping
) -> tuple[list[Callable[..., Any]], list[GraphWrapper]]:
    """The calls of all pieces, and the PIECEWISE wrappers, one around each compiled piece.

    The option `outputs` is for pieces whose results the forward returns. Results of all others stay
    in the pool, where the pieces that follow read them.
    """
    pool_options = replace(wrapping.options, outputs="pool")
    wrapped: list[Callable[..., Any]] = []
    wrappers: list[GraphWrapper] = []
    for each in pieces:
        piece, call = each.piece, each.run
        if piece.splitting or piece.is_empty:
            if piece.splitting and returned_count(piece.graph) is not None:
                call = BridgedPiece(call, wrapping.read_context)
            wrapped.append(piece.with_views(call))
            continue
        options = wrapping.options if piece.returned else pool_options
        # If the wrapper copies its outputs, views are made of the copies.
        copied = options.outputs != "pool"
        wrapper = wrapping.wrap(call if copied else piece.with_views(call), options)
        wrappers.append(wrapper)
        wrapped.append(piece.with_views(wrapper) if copied else wrapper)
    return wrapped, wrappers


class BridgedPiece:
    """Runs a splitting piece; in PIECEWISE steps its new results are copied to fixed buffers.

    The pieces after it have captured the addresses that they read. Operators that write into given
    outputs need no `BridgedPiece`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        read_context: Callable[[], ForwardContext | None],
    ) -> None:
        self._run = run
        self._read_context = read_context
        self._bridges = Bridges()
        # Descriptor -> the fixed buffers of the results, and how results are copied there.
        self._parts: dict[BatchDescriptor, EagerPart] = {}

    def __call__(self, *args: Any) -> Any:
        result = self._run(*args)
        context = self._read_context()
        if context is None or context.mode is not GraphMode.PIECEWISE:
            return result
        descriptor = context.descriptor
        if descriptor is None:
            return result
        if context.capture is not None or descriptor not in self._parts:
            arguments = {t.untyped_storage().data_ptr() for t in tree.tensors(args)}
            fixed, aliased = self._bridges.fix(
                0, result, stays=lambda _, tensor: tensor.untyped_storage().data_ptr() in arguments
            )
            # Without arguments: only `deliver` of the part is used, and never its function.
            self._parts[descriptor] = EagerPart(self._run, ((), {}), fixed, aliased)
        part = self._parts[descriptor]
        part.deliver(result)
        return part.recorded


class ArgumentAddresses:
    """Refuses steps whose arguments are not where their graphs read them.

    It checks arguments that may move: neither a runner's inputs nor pool memory.

    A piece that is captured by itself replays wherever its arguments are. The result of an eager
    part of a larger forward is at another address in every step, and the piece would not read it.
    """

    def __init__(self) -> None:
        # Descriptor -> the arguments that may move: (index among tensors, address at capture).
        self._moving: dict[BatchDescriptor, tuple[tuple[int, int], ...]] = {}

    def check(self, context: ForwardContext | None, pool: GraphPool, arguments: Any) -> None:
        """Note the addresses in a capture; later raise `StaleInputError` for another one."""
        if context is None or context.descriptor is None:
            return
        if context.capture is not None:
            fixed = context.capture.fixed
            self._moving[context.descriptor] = tuple(
                (index, each.data_ptr())
                for index, each in enumerate(tree.tensors(arguments))
                if not is_fixed(each, fixed, pool)
            )
            return
        moving = self._moving.get(context.descriptor)
        if not moving:
            return
        tensors = tree.tensors(arguments)
        for index, address in moving:
            if tensors[index].data_ptr() != address:
                raise StaleInputError(
                    "an argument of a compiled module is not where its graphs read it",
                    got=f"tensor argument {index} at {tensors[index].data_ptr():#x}",
                    expected=f"{address:#x}, as in the capture of [{context.descriptor}]",
                    advice="compile without pool=, so that what computes it is captured too, or "
                    "let it be an input of the runner",
                )

    def clear(self) -> None:
        self._moving.clear()


def is_fixed(tensor: torch.Tensor, fixed: Collection[int], pool: GraphPool) -> bool:
    """Whether a tensor is at one address in every step like this one: memory of the pool, or of the
    storages `fixed`."""
    if not tensor.numel() or tensor.untyped_storage().data_ptr() in fixed:
        return True
    return pool.platform.owns(pool.memory, tensor)
