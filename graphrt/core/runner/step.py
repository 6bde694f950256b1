"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.core.batch import BatchDescriptor
from graphrt.core.inputs import Cut, Rows, StaticInputs, nest

_CACHED_SLICES = 256
"""Per graph; beyond so many pairs of live tokens and requests outputs are sliced anew."""


class PaddedStep:
    """The padded views that a graph reads, the callable of its mode, and how to slice outputs."""

    __slots__ = (
        "_cut",
        "_nested",
        "_sliced_from",
        "_slices",
        "call",
        "descriptor",
        "layout",
        "reqs",
        "task_names",
        "tokens",
        "views",
    )

    def __init__(
        self,
        descriptor: BatchDescriptor,
        inputs: StaticInputs,
        call: Callable[..., Any],
        cut: Cut,
        *,
        same_outputs: bool,
    ) -> None:
        """`same_outputs` says that `call` returns the same tensors at every step."""
        self.descriptor = descriptor
        self.tokens = descriptor.num_tokens
        # Every request has a token, so a graph for any number of requests needs no more rows.
        self.reqs = descriptor.num_reqs or min(descriptor.num_tokens, inputs.reqs)
        self.layout = inputs.layout(self.tokens, self.reqs)
        self.views = self.layout.views
        self.call = call
        self.task_names: frozenset[str] = frozenset()
        self._nested = inputs.nested
        self._cut = cut
        self._slices: dict[tuple[int, int], Any] | None = {} if same_outputs else None
        self._sliced_from: Any = None

    def arguments(self) -> dict[str, Any]:
        """What the forward is called with; nested inputs anew each time, as it may change them."""
        return nest(self.views) if self._nested else self.views

    def live(self, outputs: Any, tokens: int, reqs: int) -> Any:
        """The live rows of the outputs of this graph."""
        if tokens == self.tokens and reqs == self.reqs:
            return outputs
        slices = self._slices
        if slices is None or not isinstance(outputs, torch.Tensor):
            return self._cut(outputs, Rows(tokens, reqs, self.tokens, self.reqs))
        if outputs is not self._sliced_from:
            slices.clear()
            self._sliced_from = outputs
        found = slices.get((tokens, reqs))
        if found is None:
            found = self._cut(outputs, Rows(tokens, reqs, self.tokens, self.reqs))
            if len(slices) < _CACHED_SLICES:
                slices[tokens, reqs] = found
        return found
