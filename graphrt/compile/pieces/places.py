"""Whether the arguments of a compiled module are where its captured pieces read them."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import StaleInputError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.replay.pool import GraphPool


class ArgumentPlaces:
    """Addresses of the arguments that may move: neither a runner's inputs nor pool memory.

    Pieces that are captured one by one replay whatever their arguments are: what an eager part of
    a larger forward computes anew lies somewhere else in every step.
    """

    def __init__(self) -> None:
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
                if not _is_fixed(each, fixed, pool)
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


def _is_fixed(tensor: torch.Tensor, fixed: frozenset[int], pool: GraphPool) -> bool:
    if not tensor.numel() or tensor.untyped_storage().data_ptr() in fixed:
        return True
    return pool.platform.owns(pool.memory, tensor)
