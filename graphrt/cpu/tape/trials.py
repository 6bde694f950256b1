"""Whether an operator's `out=` variant computes what the operator does, tried on data made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.cpu.tape.operators import Operator
from graphrt.cpu.tape.tensors import replace_tensors, tensors_in

REFUSALS = (TypeError, ValueError, RuntimeError, IndexError)
"""How torch says that a call does not exist or does not fit. Anything else is a fault, raised."""

_KEPT_BYTES = 1 << 20
"""Larger arguments are weights or caches: they are tried with what they hold."""

_verdicts: dict[tuple[object, ...], bool] = {}


def agrees(
    op: Operator,
    variant: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_kwargs: dict[str, Any],
    outs: Sequence[torch.Tensor],
) -> bool:
    """Whether `variant`, called with `given` in place of `kwargs` and outputs like `outs`, gives
    the bits of `op` on random numbers in `args`. Decided once for tensors of these shapes.

    A step is often captured on padding, and on zeros many a wrong variant agrees.
    """
    key = (op, variant, names, *map(_signature, (args, kwargs)), *map(_signature, outs))
    known = _verdicts.get(key)
    if known is None:
        known = _verdicts[key] = _try(op, variant, names, args, kwargs, out_kwargs, outs)
    return known


def _try(
    op: Operator,
    variant: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_kwargs: dict[str, Any],
    outs: Sequence[torch.Tensor],
) -> bool:
    # The numbers of the forward's own generator are not used up.
    generator = torch.Generator("cpu").manual_seed(0)
    made = {
        id(t): _random_like(t, generator)
        for t in tensors_in((args, kwargs))
        if t.dtype.is_floating_point or t.dtype.is_complex
    }
    args = replace_tensors(args, made)
    buffers = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu") for t in outs]
    before = list(map(identity, buffers))
    try:
        results = tensors_in(op.raw(*args, **replace_tensors(kwargs, made)))
        variant(
            *args, **replace_tensors(out_kwargs, made), **dict(zip(names, buffers, strict=True))
        )
    except REFUSALS:
        return False  # it is run again and copied
    return (
        len(results) == len(buffers)
        and list(map(identity, buffers)) == before
        and all(map(same_bits, results, buffers))
    )


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if (
        tensor.layout is not torch.strided
        or tensor.nbytes > _KEPT_BYTES
        or not tensor.numel()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    numbers = torch.rand(
        extent,
        dtype=torch.complex64 if tensor.dtype.is_complex else torch.float32,
        generator=generator,
        device="cpu",
    )
    return numbers.to(tensor.dtype).as_strided(tensor.size(), tensor.stride())


def _signature(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return value.dtype, value.size(), value.stride() if strided else value.layout
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    return type(value), repr(value)


def identity(t: torch.Tensor) -> tuple[object, ...]:
    """Where and how `t` lies, which an operator that was given it must not change."""
    # linalg.lu_solve marks the output that it is given as conjugated in place of conjugating it.
    return t.data_ptr(), t.dtype, t.size(), t.stride(), t.is_conj(), t.is_neg()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of memory, so that a NaN equals itself."""
    if a.dtype != b.dtype or a.size() != b.size():
        return False
    return torch.equal(tree.octets(a), tree.octets(b))
