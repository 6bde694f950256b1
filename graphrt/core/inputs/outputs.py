"""The live rows of what a forward returns, by the batch axes that its outputs have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from graphrt.core.base import InvalidOptionError, tree
from graphrt.core.batch import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or position: see `cutting`."""


class Rows(NamedTuple):
    """How many rows of a step are live, of how many that its graph has."""

    tokens: int
    reqs: int
    padded_tokens: int
    padded_reqs: int


Cut = Callable[[Any, Rows], Any]
"""Outputs with every named batch axis cut to its live rows."""


def cutting(axes: OutputAxes) -> Cut:
    """What cuts outputs with these axes.

    `axes` are the axes of a tensor, or a mapping of names (keys, or fields of a dataclass) to
    axes, or a tuple with the axes of each element. What it does not name is left as it is. Without
    `axes`, tensors whose first dimension is the padded number of tokens (or else that of requests)
    are cut there. Raises `InvalidInputError` for an axis that there is not.
    """
    if axes is None:
        return _cut_by_size
    if isinstance(axes, Mapping):
        return _cutting_named({name: cutting(its_axes) for name, its_axes in axes.items()})
    if any(isinstance(axis, tuple | Mapping) for axis in axes):
        return _cutting_each([cutting(its_axes) for its_axes in axes])
    named = [(dim, Axis.parse(size)) for dim, size in enumerate(axes) if isinstance(size, str)]

    def cut(outputs: Any, rows: Rows) -> Any:
        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            for dim, axis in named:
                tensor = tensor.narrow(dim, 0, axis.size(rows.tokens, rows.reqs))
            return tensor

        return tree.map_tensors(narrowed, outputs)

    return cut


def _cut_by_size(outputs: Any, rows: Rows) -> Any:
    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        first = tensor.shape[0] if tensor.dim() else -1
        if first == rows.padded_tokens:
            return tensor[: rows.tokens]
        return tensor[: rows.reqs] if first == rows.padded_reqs else tensor

    return tree.map_tensors(narrowed, outputs)


def _cutting_named(cuts: Mapping[str, Cut]) -> Cut:
    def cut(outputs: Any, rows: Rows) -> Any:
        whole = copy.copy(outputs)
        for name, of_name in cuts.items():
            _set(whole, name, of_name(_get(outputs, name), rows))
        return whole

    return cut


def _cutting_each(cuts: list[Cut]) -> Cut:
    def cut(outputs: Any, rows: Rows) -> Any:
        if not isinstance(outputs, tuple | list) or len(outputs) != len(cuts):
            raise _other_outputs(outputs, f"{len(cuts)} outputs")
        return type(outputs)(
            of_one(output, rows) for of_one, output in zip(cuts, outputs, strict=True)
        )

    return cut


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
