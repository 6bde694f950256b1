"""The live rows of what a forward returns, by the batch axes that its outputs have."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.axes import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or place: see `sliced`."""


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
