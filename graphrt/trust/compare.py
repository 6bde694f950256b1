"""How far two results of one step are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.option_values import told

_ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""The allowed difference, as a part of the root mean square: kernels for another number of rows
round otherwise, and layers add that up. 8-bit types count as bfloat16."""

_ROUNDING_OF_FLOAT32 = {"tf32": 1e-2, "bf16": 1e-1}
"""The same for float32, by the shorter format to which a setting lets operators round operands."""

_SETTINGS = {"conv": "convolution", "rnn": "rnn", "lstm": "rnn", "gru": "rnn"}
"""Part of an operator's name -> the setting that governs its precision. The setting of matrix
products counts always: few forwards have none, and a host's own kernels obey it too."""

_FLIPPED = 1 / 8
"""The share of integers that rounding may change: a sampler then chooses another of equal
tokens."""


class Difference(NamedTuple):
    """Where two results differ, in words; `relative` is the largest difference over the root mean
    square of the expected values: infinite where they cannot be rounded to one another, as for
    integers and shapes, 0 where only the bits differ."""

    text: str
    relative: float


def difference(got: Any, expected: Any, *, rounded: bool = False) -> Difference | None:
    """The largest difference of two trees of tensors and plain values; None if they have equal
    bits. Where values were `rounded`, a few other integers count as equal. Waits for the device."""
    ours, theirs = dict(tree.leaves(got)), dict(tree.leaves(expected))
    if ours.keys() != theirs.keys():
        return Difference(f"another structure: {[*ours]}, not {[*theirs]}", float("inf"))
    differences = map(_of_leaf, ours, ours.values(), map(theirs.get, ours), repeat(rounded))
    return max(filter(None, differences), key=attrgetter("relative"), default=None)


def rounding_of(
    dtypes: Iterable[torch.dtype],
    operators: Iterable[object],
    precision: Callable[[str], str],
) -> float:
    """How far results may be apart, over their root mean square, that `operators` have computed
    from tensors of these dtypes by other kernels, each use of float32 in its `precision`."""
    rounding, uses = 0.0, {"matmul"}
    for dtype in dtypes:
        if dtype.is_floating_point:
            rounding = max(rounding, _ROUNDING.get(dtype, 1e-1))
    names = " ".join(map(str, {*operators}))
    for part, use in _SETTINGS.items():
        if part in names:
            uses.add(use)
    for use in uses:
        rounding = max(rounding, _ROUNDING_OF_FLOAT32.get(precision(use), 0.0))
    return rounding or 2e-4


_FEW_BYTES = 1 << 20
"""Tensors up to so many bytes are compared on the host: a GPU loads each of a comparison's fifteen
kernels when a process first uses it, which takes 270 ms of a first capture (H200)."""


def _of_leaf(path: str, ours: Any, theirs: Any, rounded: bool) -> Difference | None:
    """`difference` of two leaves, both at `path`."""
    at = f" at {path}" if path else ""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        # NaN is itself, though not equal to itself.
        if type(ours) is type(theirs) and (ours == theirs or repr(ours) == repr(theirs)):
            return None
        got, expected = told(ours), told(theirs)
    elif ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
        got, expected = (f"{each.dtype} {tuple(each.shape)}" for each in (ours, theirs))
    else:
        if ours.numel() * ours.element_size() <= _FEW_BYTES:
            ours, theirs = ours.cpu(), theirs.cpu()
        # As bytes, so that NaN equals itself and 0.0 does not equal -0.0.
        if torch.equal(tree.octets(ours), tree.octets(theirs)):
            return None
        return _of_values(ours, theirs, at, rounded)
    return Difference(f"{got}, not {expected}{at}", float("inf"))


def _of_values(ours: torch.Tensor, theirs: torch.Tensor, at: str, rounded: bool) -> Difference:
    """The difference of two tensors of one dtype and shape whose bits differ."""
    wide_dtype = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.detach().to(wide_dtype), theirs.detach().to(wide_dtype)
    distances = (a - b).abs()
    distances[(a == b) | (a.isnan() & b.isnan())] = 0
    largest = distances.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
    count = int((distances != 0).sum())
    text = f"{count} of {ours.numel()} values, by at most {largest:.3g}{at}"
    if ours.is_floating_point() or ours.is_complex():
        # NaN without a finite value.
        scale = float(b[b.isfinite()].abs().pow(2).mean().sqrt())
        relative = largest / scale if scale > 0 else float("inf")
        return Difference(text, relative if largest else 0.0)
    flipped = rounded and ours.dtype is not torch.bool and count <= _FLIPPED * ours.numel()
    return Difference(text, 0.0 if flipped else float("inf"))
