"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.core import tree
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.inputs import Axis, StaticInputs, nest

OutputAxes = tuple[int | str, ...] | Mapping[str, Any] | None

_CACHED_SLICES = 256
"""Per graph; beyond so many pairs of live tokens and requests outputs are sliced anew."""


class StepPlan:
    """The padded views that a graph reads, the callable of its mode, and how to slice outputs."""

    __slots__ = (
        "_axes",
        "_sliced_from",
        "_slices",
        "arguments",
        "call",
        "descriptor",
        "reqs",
        "tokens",
        "views",
    )

    def __init__(
        self,
        descriptor: BatchDescriptor,
        inputs: StaticInputs,
        call: Callable[..., Any],
        axes: OutputAxes,
    ) -> None:
        self.descriptor = descriptor
        self.tokens = descriptor.num_tokens
        # Every request has a token, so a graph for any number of requests needs no more rows.
        self.reqs = descriptor.num_reqs or min(descriptor.num_tokens, inputs.reqs)
        self.views = inputs.views(self.tokens, self.reqs)
        self.arguments = nest(self.views) if inputs.nested else self.views
        self.call = call
        self._axes = axes
        self._slices: dict[tuple[int, int], Any] = {}
        self._sliced_from: Any = None

    def live(self, outputs: Any, tokens: int, reqs: int) -> Any:
        """The live rows of the outputs of this graph."""
        if tokens == self.tokens and reqs == self.reqs:
            return outputs
        if outputs is not self._sliced_from:
            self._slices.clear()
            self._sliced_from = outputs
        found = self._slices.get((tokens, reqs))
        if found is None:
            found = sliced(outputs, self._axes, tokens, reqs, self.tokens, self.reqs)
            if len(self._slices) < _CACHED_SLICES:
                self._slices[tokens, reqs] = found
        return found


def sliced(
    outputs: Any, axes: OutputAxes, tokens: int, reqs: int, padded_tokens: int, padded_reqs: int
) -> Any:
    """`outputs` with every named batch axis cut to its live rows.

    Without `axes`, tensors whose first dimension is the padded number of tokens (or else that of
    requests) are cut there.
    """
    if axes is None:

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.shape[0] if tensor.dim() else -1
            if rows == padded_tokens:
                return tensor[:tokens]
            return tensor[:reqs] if rows == padded_reqs else tensor

        return tree.map_tensors(cut, outputs)
    if isinstance(axes, Mapping):
        parts = {
            name: sliced(outputs[name], part, tokens, reqs, padded_tokens, padded_reqs)
            for name, part in axes.items()
        }
        whole = tree.map_leaves(lambda leaf: leaf, outputs)
        whole.update(parts)
        return whole

    def cut_named(tensor: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(axes):
            if isinstance(size, str):
                tensor = tensor.narrow(dim, 0, Axis.parse(size).size(tokens, reqs))
        return tensor

    return tree.map_tensors(cut_named, outputs)
