"""Whether two results are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import tree


def difference(got: Any, expected: Any) -> str | None:
    """What differs between two results; None if every bit is the same (all NaN are one)."""
    if structure(got) != structure(expected):
        return f"structure {structure(got)}, expected {structure(expected)}"
    for (path, a), (_, b) in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        if not isinstance(a, torch.Tensor):
            if repr(a) != repr(b):
                return f"{path}: {a!r}, expected {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        if not same_bits(a, b):
            return f"{path}: {_shown(a)}, expected {_shown(b)}"
    return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, -0.0 being another number than 0.0."""
    if not a.numel():
        return True
    with torch.no_grad():
        if a.dtype.is_complex:
            return same_bits(
                torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
            )
        if not a.dtype.is_floating_point:
            return torch.equal(a, b)
        either = ((a == b) & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())
        return bool(either.all())


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    loose = 5e-2 if a.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return torch.allclose(a, b, rtol=loose, atol=loose, equal_nan=True)


def structure(node: Any) -> Any:
    """The containers of a result, as their types."""
    if isinstance(node, torch.Tensor):
        return "tensor"
    if isinstance(node, Mapping):
        return (type(node).__name__, *((key, structure(value)) for key, value in node.items()))
    if isinstance(node, list | tuple):
        return (type(node).__name__, *map(structure, node))
    if hasattr(node, "__dataclass_fields__"):
        return (type(node).__name__, *((k, structure(v)) for k, v in vars(node).items()))
    return type(node).__name__


def cut(result: Any, like: Any) -> Any:
    """A padded result cut to the shapes of the live one."""
    shapes = iter([leaf.shape for leaf in tree.tensors(like)])

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        shape = next(shapes)
        if len(shape) != tensor.dim():
            return tensor
        for dim, size in enumerate(shape):
            if size <= tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, size)
        return tensor

    return tree.map_leaves(narrowed, result)


def copied(result: Any) -> Any:
    """A result with tensors of its own."""
    return tree.map_leaves(lambda tensor: tensor.detach().clone(), result)


def _shown(tensor: torch.Tensor) -> str:
    return repr(tensor.detach().flatten()[:6].tolist())
