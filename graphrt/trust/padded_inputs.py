"""What inputs say of padding: which may be addresses, and which differ from it in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import GraphRTError
from graphrt.core.inputs.declared import DeclaredInputs, flat_of
from graphrt.core.inputs.layout import InputLayout
from graphrt.core.inputs.spec import InputSpec, check_value

Differing = Mapping[str, frozenset[str]]
"""axis along which a step is padded -> its inputs whose live rows differ from the padding rows"""

_IS_PADDING = "{} as in padding"
"""Stands in `Differing` for an input that has a live row equal to its padding."""


def shown_by(declared: DeclaredInputs) -> Differing:
    """All that `differing` can return: each input, and "NAME as in padding" if the input may be an
    address."""
    return {
        axis: names
        | {_IS_PADDING.format(each) for each in names if _may_address(declared.specs[each])}
        for axis, names in declared.by_axis.items()
    }


def index_pads(declared: DeclaredInputs) -> dict[str, int]:
    """The padding values of index inputs, by name: the rows that padding tokens may write."""
    # `.real`, as a pad value may be complex by its type.
    return {name: int(spec.pad_value.real) for name, spec in declared.specs.items() if spec.index}


def address_pads(declared: DeclaredInputs) -> dict[str, int]:
    """`index_pads`; without any, the padding values of inputs that may be one."""
    return index_pads(declared) or {
        name: int(spec.pad_value.real)
        for name, spec in sorted(declared.specs.items())
        if spec.batch_axis()[0] is not None and _may_address(spec)
    }


def unused_addresses(declared: DeclaredInputs, values: Mapping[str, Any]) -> list[int]:
    """The padding values of index inputs that no live row of the same input holds: their rows
    belong to no request. `values` were checked. Each input is asked by itself, as a block table
    may hold its padding value for unused pages of a live request. Waits for the device."""
    flat, pads = dict(flat_of(values)), index_pads(declared)
    asked = [(flat[name], pad) for name, pad in pads.items() if name in flat and pad >= 0]
    return sorted({pad for value, pad in asked if not bool((value == pad).any())})


def differing(
    declared: DeclaredInputs,
    values: Mapping[str, Any],
    axes: Collection[str],
    lengths: Collection[int] = (),
) -> Differing:
    """For each of these axes the inputs of which a trial of this step can show something.

    An input with a live row unlike its padding can show that rows are mixed. An integer input
    with a live row equal to its padding can show, if it is an address, that padding writes
    live memory: of memory of one of these `lengths` -1 is the last row. Waits for the device.
    """
    names: dict[str, set[str]] = {axis: set() for axis in axes}
    for name, value in flat_of(values):
        spec = declared.specs.get(name)
        axis, dim = (None, 0) if spec is None else spec.batch_axis()
        if spec is None or axis is None or axis.counts not in names:
            continue
        # A value that is no input, such as a sparse tensor, raises where it is copied.
        with suppress(GraphRTError):
            check_value(name, spec, value, None)
            if value.numel() and _differs(value, spec, dim):
                names[axis.counts].add(name)
            pads = {spec.pad_value}
            if _may_address(spec) and spec.pad_value.real < 0:
                pads |= {int(spec.pad_value.real) % length for length in lengths}
            if _may_address(spec) and any(bool((value == pad).any()) for pad in pads):
                names[axis.counts].add(_IS_PADDING.format(name))
    return {axis: frozenset(each) for axis, each in names.items()}


def disturb(layout: InputLayout, tokens: int, reqs: int) -> None:
    """Fill padding rows with the first live row, but not those of indices, with which padding
    would write live memory."""
    for move in layout.moves(tokens, reqs).padded:
        spec = move.field.spec
        if not spec.index and move.rows:
            move.padding.copy_(move.live.narrow(spec.batch_axis()[1], 0, 1))


def _may_address(spec: InputSpec) -> bool:
    """Whether an input may be an address that nobody has declared as `index`."""
    is_whole = not (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return is_whole and spec.dtype is not torch.bool and not spec.index and spec.pad != "repeat"


def _differs(value: torch.Tensor, spec: InputSpec, dim: int) -> bool:
    """Whether some live row differs from the padding rows."""
    if spec.pad == "repeat":
        row = value.narrow(dim, value.shape[dim] - 1, 1)
    else:
        row = torch.full((), spec.pad_value, dtype=value.dtype, device=value.device)
    # As bytes: 8-bit floats cannot be compared, and NaN is itself.
    row = row.expand_as(value)
    return not torch.equal(tree.octets(value), tree.octets(row))
