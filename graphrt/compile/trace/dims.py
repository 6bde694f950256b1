"""Which dimensions of the arguments are the batch's, and example tensors of other batch sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from graphrt.compile.errors import CompileError, RetraceError
from graphrt.compile.trace.parameters import Leaf
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.descriptor import Axis

DEFAULT_AXIS = "tokens"


class DynamicDims:
    """The batch dimensions of each argument.

    Given as names (dimension 0 is the batch's), or as a dict from names to a dimension, to several,
    or to `{dimension: axis}`. Dimensions of one axis have one size in every call; one of "reqs+1"
    has one more (`Axis.extra`). The axis that has no name is "tokens". A name is an argument's, or
    the path of an element such as `hidden[0]`.
    """

    def __init__(self, given: Mapping[str, Any] | Sequence[str]) -> None:
        if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
            raise _wrong_dims(given)
        if not all(isinstance(name, str) for name in given):
            raise _wrong_dims(given)
        named = given if isinstance(given, Mapping) else dict.fromkeys(given, 0)
        # Name of an argument or path -> dimension -> axis.
        self._axes = {name: _axes(value) for name, value in named.items()}

    def __bool__(self) -> bool:
        """Whether any are named. If none is, all calls have the sizes of the compiled one."""
        return bool(self._axes)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `CompileError` for a name that is no parameter's."""
        for name in self._axes:
            if Leaf(name, None).argument not in names:
                raise CompileError(
                    "dynamic_dims names an argument that the forward does not have",
                    got=shown(name),
                    expected=", ".join(names),
                    advice="use the parameter names of forward",
                )

    def without(self, names: Collection[str]) -> DynamicDims:
        """The same dimensions without those of the axes `names`."""
        fewer = DynamicDims({})
        fewer._axes = {
            name: {dim: axis for dim, axis in axes.items() if axis.name not in names}
            for name, axes in self._axes.items()
        }
        return fewer

    def of(self, leaf: Leaf) -> dict[int, Axis]:
        """The batch dimensions of one leaf; empty if it is no tensor."""
        if not isinstance(leaf.value, torch.Tensor):
            return {}
        axes = self._axes.get(leaf.path)
        if axes is None:
            axes = self._axes.get(leaf.argument, {})
        rank = leaf.value.dim()
        for dim in axes:
            if not -rank <= dim < rank:
                raise RetraceError(
                    f"argument {leaf.path} has no dimension {dim}, which should be a batch one",
                    input=leaf.path,
                    got=f"shape {tuple(leaf.value.shape)}",
                    expected=f"more than {dim} dimensions",
                    advice="correct dynamic_dims",
                )
        return {dim % rank: axis for dim, axis in axes.items()}


def sizes_of(dims: DynamicDims, leaves: Iterable[Leaf]) -> dict[str, int]:
    """The size of every axis in a call; raises `RetraceError` where arguments contradict."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for leaf in leaves:
        for dim, axis in dims.of(leaf).items():
            size = leaf.value.shape[dim] - axis.extra
            expected = sizes.setdefault(axis.name, size)
            if expected != size:
                raise RetraceError(
                    f"argument {leaf.path} has another number of {axis.name} than "
                    f"{first[axis.name]}",
                    input=leaf.path,
                    got=f"{leaf.value.shape[dim]} in dimension {dim}",
                    expected=str(expected + axis.extra),
                    advice="pass arguments of one batch, or give the dimension an axis of its own",
                )
            first.setdefault(axis.name, leaf.path)
    return sizes


def distinct_sizes(near_sizes: Mapping[str, int], avoid: Iterable[int]) -> dict[str, int]:
    """A size for every axis, near that of `near_sizes`, that no other axis has and no static
    dimension (`avoid`).

    Dimensions of equal size would be taken for one axis. No size is changed to 2 or 3, where
    `n // 2` or `n - 1` is 1: Inductor takes `n - 1 = 1` for a constant.
    """
    taken = {0, 1, *avoid}
    chosen: dict[str, int] = {}
    for name, size in near_sizes.items():
        above = range(size + 1, size + len(taken) + 8)
        # Sizes of the same parity first: the forward may rely on two equal halves.
        near = [size, *sorted((*range(size - 1, 3, -1), *above), key=lambda n: (n - size) % 2)]
        chosen[name] = next(n for n in near if n not in taken and n + 1 not in taken)
        taken |= {chosen[name] - 1, chosen[name], chosen[name] + 1}
    return chosen


def examples(
    dims: DynamicDims, leaves: Sequence[Leaf], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors like those of the leaves, with batch dimensions of `sizes`.

    A tensor without batch dimensions is used itself, as a new object (`detach`).
    """
    tensors = {}
    for leaf in leaves:
        value = leaf.value
        if not isinstance(value, torch.Tensor):
            continue
        axes = dims.of(leaf)
        if not axes:
            is_plain = type(value) is torch.Tensor and not value.requires_grad
            tensors[leaf.path] = value.detach() if is_plain else value
            continue
        shape = list(value.shape)
        for dim, axis in axes.items():
            shape[dim] = sizes[axis.name] + axis.extra
        if value.is_contiguous():
            example = torch.empty(shape, dtype=value.dtype, device=value.device)
        else:
            strides = strides_at(value.shape, value.stride(), shape)
            example = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        tensors[leaf.path] = example.requires_grad_(value.requires_grad)
    return tensors


def strides_at(
    shape: Sequence[int], strides: Sequence[int], other_shape: Sequence[int]
) -> tuple[int, ...]:
    """The strides that a tensor of `shape` and `strides` has at another shape.

    Those of a transposed or expanded tensor without gaps follow its sizes: `x.t()` of (4, n) has
    (1, n). Those of rows or columns that were cut out of wider ones stay as they are.
    """
    spread = [dim for dim, size in enumerate(shape) if size != 1 and strides[dim]]
    other, step, other_step = list(strides), 1, 1
    for dim in sorted(spread, key=lambda dim: strides[dim]):
        if strides[dim] != step:
            return tuple(strides)
        other[dim] = other_step
        step *= max(shape[dim], 1)
        other_step *= max(other_shape[dim], 1)
    return tuple(other)


def _axis(text: object) -> Axis:
    """An axis of any name; raises `CompileError`."""
    try:
        return Axis.parse(text, names=None)
    except InvalidInputError as error:
        raise CompileError(
            "a batch axis has a name",
            got=shown(text),
            expected='"tokens", "reqs" or "reqs+1"',
            advice='dynamic_dims={"ids": 0, "block_table": {0: "reqs"}}',
        ) from error


def _axes(value: Any) -> dict[int, Axis]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    dims = list(value) if several or isinstance(value, Mapping) else [value]
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        raise _wrong_dims(value)
    if isinstance(value, Mapping):
        return {dim: _axis(axis) for dim, axis in value.items()}
    return {dim: Axis(DEFAULT_AXIS) for dim in dims}


def _wrong_dims(value: object) -> CompileError:
    return CompileError(
        "dynamic_dims says which dimensions are the batch's",
        got=shown(value),
        expected="names of arguments, or a dict from them to dimensions",
        advice='dynamic_dims={"ids": 0, "block_table": {0: "reqs"}}',
    )
