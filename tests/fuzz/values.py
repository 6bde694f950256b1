"""The inputs of steps, padded and not, and the modes that steps run in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphrt import InputSpec
from tests.fuzz.prelude import tensor
from tests.fuzz.program import CACHE_ROWS

Values = dict[str, torch.Tensor]


def values_of(
    specs: Mapping[str, InputSpec], tokens: int, reqs: int, seed: int, device: str
) -> Values:
    """The live rows of a step of this seed."""
    values: Values = {}
    for at, (name, spec) in enumerate(specs.items()):
        shape = spec.sizes(tokens, reqs)
        if spec.index:
            order = torch.randperm(CACHE_ROWS, generator=torch.Generator().manual_seed(seed))
            values[name] = order[:tokens].to(spec.dtype).to(device)
        else:
            values[name] = tensor(shape, spec.dtype, 100 * seed + at, device)
    return values


def padded(
    specs: Mapping[str, InputSpec], values: Values, tokens: int, reqs: int, live: tuple[int, int]
) -> Values:
    """The same with padding rows behind the live ones."""
    rows_padded: Values = {}
    for name, spec in specs.items():
        value, shape = values[name], spec.sizes(tokens, reqs)
        _, dim = spec.batch_axis()
        more = list(shape)
        more[dim] = shape[dim] - spec.sizes(*live)[dim]
        if more[dim] == 0:
            rows_padded[name] = value.clone()
            continue
        if spec.pad == "repeat":
            rows = value.narrow(dim, value.shape[dim] - 1, 1).expand(more)
        else:
            rows = value.new_full(more, spec.pad_value)
        rows_padded[name] = torch.cat([value, rows], dim)
    return rows_padded


def blank(specs: Mapping[str, InputSpec], tokens: int, reqs: int) -> Values:
    """What warm-ups and captures run on: padding rows alone, on the CPU."""
    return {
        name: torch.full(
            spec.sizes(tokens, reqs),
            0 if spec.pad == "repeat" else spec.pad_value,
            dtype=spec.dtype,
        )
        for name, spec in specs.items()
    }


def grad_mode(name: str) -> AbstractContextManager[Any]:
    """The mode of that name."""
    if name == "inference":
        return torch.inference_mode()
    return torch.no_grad() if name == "no_grad" else contextlib.nullcontext()
