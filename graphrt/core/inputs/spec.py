"""`InputSpec`: what a runner must know about one input of a forward."""

from __future__ import annotations

import cmath
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import torch

from graphrt.core.base.errors import GraphRTError, InvalidInputError, OverwrittenOutputError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import shown
from graphrt.core.batch.axes import Axis

_MOST_BLOCKS = 1 << 16
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@public("graphrt")
@dataclass(frozen=True)
class InputSpec:
    """One input of a forward: its dtype, its shape with named batch axes, and its padding.

    A dimension of `shape` is an int or, for at most one of them, a batch axis: "tokens", "reqs", or
    either with a constant added ("reqs+1"); "rows" is "tokens" for models that have none. A step
    brings the live rows, a graph reads padded ones. `pad` is the value of padding rows, by default
    0, or "repeat" (the last live row). `index=True` marks what kernels use as an address (slot
    mappings, block tables): its padding must point where nothing live is, so `pad` has to be given,
    and as a value.

    Inputs are packed anew for every size, so that one copy brings all that come from the host: an
    input has an address for each size.

    Raises `InvalidInputError` for a dtype, a shape or an axis that no input has, for a padding that
    does not exist or that `dtype` cannot hold, and for an index without one.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    pad: int | float | complex | bool | str | None = None
    index: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise _wrong_spec("dtype", self.dtype, "a torch.dtype", "torch.int64")
        if not isinstance(self.index, bool):
            raise _wrong_spec("index", self.index, "True or False", "index=True")
        _check_shape(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.index:
            _check_index(self.dtype, self.pad)
        _check_pad(self.dtype, self.pad)

    @property
    def pad_value(self) -> int | float | complex | bool:
        """The value of padding rows; 0 with "repeat", while no step has left rows."""
        return 0 if self.pad is None or isinstance(self.pad, str) else self.pad

    def batch_axis(self) -> tuple[Axis | None, int]:
        """The batch axis and its dimension; (None, 0) if there is none."""
        for dim, size in enumerate(self.shape):
            if isinstance(size, str):
                return _axis_of(size), dim
        return None, 0

    def sizes(self, tokens: int, reqs: int) -> tuple[int, ...]:
        """The shape for a batch of this size."""
        return tuple(
            size if isinstance(size, int) else _axis_of(size).size(tokens, reqs)
            for size in self.shape
        )


LOWEST_ADDRESS = 1 << 24
"""A smaller address is looked at before it is read: a tensor whose storage was freed has its offset
as address. Memory rarely lies so low."""


@lru_cache(maxsize=64)
def _axis_of(text: str) -> Axis:
    return Axis.parse(text)


def check_value(
    name: str,
    spec: InputSpec,
    value: Any,
    live: tuple[int, ...] | None,
    cause: Exception | None = None,
) -> None:
    """Raise what is wrong with a step's value for the input `name`, whose live shape is `live`, if
    that is known. `cause` is what using it raised, if it was used."""
    wrong = _wrong_value(name, spec, value, live) or _unreadable(name, spec, value)
    if wrong is not None:
        raise wrong from cause


def _wrong_value(
    name: str, spec: InputSpec, value: Any, live: tuple[int, ...] | None
) -> InvalidInputError | None:
    if not isinstance(value, torch.Tensor):
        return InvalidInputError(
            f"input {name!r} is no tensor",
            got=type(value).__name__,
            expected=f"a tensor of {spec.dtype}",
            advice=f"torch.as_tensor({name}, dtype={spec.dtype}) of a list or an array",
        )
    if value.is_meta or value.is_nested or value.layout is not torch.strided:
        kind = "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout)
        return _without_rows(name, spec, kind)
    if value.dtype is not spec.dtype:
        return InvalidInputError(
            f"input {name!r} has the wrong dtype",
            got=value.dtype,
            expected=spec.dtype,
            advice=f"{name}.to({spec.dtype}), or change its InputSpec",
        )
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape) if live is None else shape != live:
        return InvalidInputError(
            f"input {name!r} has the wrong shape",
            got=shape,
            expected=spec.shape if live is None else f"{live} from {spec.shape}",
            advice=f"the live rows of {name} alone, which graphrt pads, in the declared order; or "
            "Batch(...) with their number",
        )
    return None


def _unreadable(name: str, spec: InputSpec, value: torch.Tensor) -> GraphRTError | None:
    """What is wrong with a tensor of the right shape that cannot be copied."""
    try:
        # Where there is none a copy would end the process.
        in_memory = value.numel() == 0 or (
            value.data_ptr() != 0 and value.untyped_storage().nbytes() > 0
        )
    except RuntimeError as error:
        if OverwrittenOutputError.__name__ in str(error):
            return OverwrittenOutputError(
                f"input {name!r} is an output of an earlier step, whose memory was overwritten",
                expected="an output of the step before, or a copy",
                advice='clone() what is needed longer, or GraphOptions(outputs="clone")',
            )
        in_memory = False
    return None if in_memory else _without_rows(name, spec, type(value).__name__)


def _without_rows(name: str, spec: InputSpec, kind: str) -> InvalidInputError:
    return InvalidInputError(
        f"input {name!r} has no rows in memory that could be copied",
        got=f"a tensor of kind {kind}",
        expected=f"a dense tensor of {spec.dtype}",
        advice=f"{name}.to_dense() of a sparse one, torch.cat({name}.unbind()) of a nested one",
    )


def _check_shape(shape: object) -> None:
    """Raise `InvalidInputError` unless it is a tuple of sizes with at most one batch axis."""
    example = '("tokens", 64)'
    if not isinstance(shape, tuple | list):
        raise _wrong_spec("shape", shape, "a tuple of ints and axes", example)
    axes = [size for size in shape if isinstance(size, str)]
    for axis in axes:
        Axis.parse(axis)
    for size in shape:
        if not isinstance(size, str) and (not _is_int(size) or size < 0):
            raise _wrong_spec("shape", shape, "ints >= 0, and one of them an axis", example)
    if len(axes) > 1:
        raise _wrong_spec("shape", shape, "at most one batch axis", "an input for each batch axis")
    blocks = math.prod(itertools.takewhile(lambda size: not isinstance(size, str), shape))
    if axes and blocks > _MOST_BLOCKS:
        expected = f"at most {_MOST_BLOCKS} pieces in front of the batch axis, each is a copy"
        raise _wrong_spec("shape", shape, expected, "that axis first, and a transpose in forward")


def _check_index(dtype: torch.dtype, pad: object) -> None:
    if pad is None or isinstance(pad, str):
        raise InvalidInputError(
            "an index input must say its padding as a value: padding rows are read and written "
            "too, so 0 is the first page, and what is repeated is live memory",
            got=f"pad={pad!r}, index=True",
            expected="a pad value that reads and writes nothing live",
            advice="pad=-1 if the kernel skips such rows, or what belongs to a dummy page that no "
            "request has",
        )
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise _wrong_spec("dtype", dtype, "integers, for index=True", "torch.int64")


def _check_pad(dtype: torch.dtype, pad: int | float | complex | str | None) -> None:
    """Raise `InvalidInputError` for a padding that does not exist or that rows cannot hold."""
    if isinstance(pad, str) and pad == "repeat":
        pad = None
    if pad is not None and not isinstance(pad, int | float | complex):
        example = 'pad="repeat"' if isinstance(pad, str) else "pad=0"
        raise _wrong_spec("pad", pad, 'a number, or "repeat"', example)
    if dtype in _QUANTIZED or not _holds(dtype, 0):
        raise _wrong_spec("dtype", dtype, "a dtype of dense tensors", "torch.int8")
    if pad is not None and not _holds(dtype, pad):
        raise _wrong_spec("pad", pad, f"a value of {dtype}", "a pad that kernels know as padding")


def _holds(dtype: torch.dtype, value: complex) -> bool:
    """Whether rows can be filled with a value, which for integers is then itself."""
    try:
        held = torch.full((1,), value, dtype=dtype, device="cpu").item()
    except (OverflowError, RuntimeError, TypeError):
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return bool(held == value)
    # Some dtypes take their largest number for a larger one.
    return not value or not cmath.isfinite(value) or abs(value) <= torch.finfo(dtype).max


def _wrong_spec(field: str, value: object, expected: str, example: str) -> InvalidInputError:
    return InvalidInputError(
        f"an InputSpec has a wrong {field}",
        got=shown(value),
        expected=expected,
        advice=f'InputSpec(torch.int64, ("tokens",)), with {example}',
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
