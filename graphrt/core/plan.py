"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.core import tree
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.errors import InvalidOptionError
from graphrt.core.input_spec import Axis
from graphrt.core.inputs import StaticInputs, nest

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or place: see `sliced`."""

_CACHED_SLICES = 256
"""Per graph; beyond so many pairs of live tokens and requests outputs are sliced anew."""


class StepPlan:
    """The padded views that a graph reads, the callable of its mode, and how to slice outputs."""

    __slots__ = (
        "_axes",
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
        axes: OutputAxes,
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
        self._axes = axes
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
            return sliced(outputs, self._axes, tokens, reqs, self.tokens, self.reqs)
        if outputs is not self._sliced_from:
            slices.clear()
            self._sliced_from = outputs
        found = slices.get((tokens, reqs))
        if found is None:
            found = sliced(outputs, self._axes, tokens, reqs, self.tokens, self.reqs)
            if len(slices) < _CACHED_SLICES:
                slices[tokens, reqs] = found
        return found


def sliced(
    outputs: Any, axes: OutputAxes, tokens: int, reqs: int, padded_tokens: int, padded_reqs: int
) -> Any:
    """`outputs` with every named batch axis cut to its live rows.

    `axes` are the axes of a tensor, or a mapping of names (keys, or fields of a dataclass) to
    axes, or a tuple with the axes of each element. What it does not name is left as it is. Without
    `axes`, tensors whose first dimension is the padded number of tokens (or else that of requests)
    are cut there.
    """
    if axes is None:

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.shape[0] if tensor.dim() else -1
            if rows == padded_tokens:
                return tensor[:tokens]
            return tensor[:reqs] if rows == padded_reqs else tensor

        return tree.map_tensors(cut, outputs)

    def part(value: Any, its_axes: Any) -> Any:
        return sliced(value, its_axes, tokens, reqs, padded_tokens, padded_reqs)

    if isinstance(axes, Mapping):
        whole = copy.copy(outputs)
        for name, its_axes in axes.items():
            _set(whole, name, part(_get(outputs, name), its_axes))
        return whole
    if any(isinstance(axis, tuple | Mapping) for axis in axes):
        if not isinstance(outputs, tuple | list) or len(outputs) != len(axes):
            raise _other_outputs(outputs, f"{len(axes)} outputs")
        return type(outputs)(map(part, outputs, axes))

    def cut_named(tensor: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(axes):
            if isinstance(size, str):
                tensor = tensor.narrow(dim, 0, Axis.parse(size).size(tokens, reqs))
        return tensor

    return tree.map_tensors(cut_named, outputs)


def _get(outputs: Any, name: str) -> Any:
    try:
        return outputs[name] if isinstance(outputs, dict) else getattr(outputs, name)
    except (KeyError, AttributeError):
        raise _other_outputs(outputs, f"an output {name!r}") from None


def _set(outputs: Any, name: str, value: Any) -> None:
    if isinstance(outputs, dict):
        outputs[name] = value
    else:
        object.__setattr__(outputs, name, value)


def _other_outputs(outputs: Any, expected: str) -> InvalidOptionError:
    keys = list(outputs) if isinstance(outputs, dict) else type(outputs).__name__
    return InvalidOptionError(
        "the forward returns other outputs than outputs= names",
        got=keys,
        expected=expected,
        advice="name the axes of what the forward returns",
    )
