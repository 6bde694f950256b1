"""`InputSpec`: what a runner must know about one input of a forward."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from graphrt.core.base.errors import GraphRTError, InvalidInputError, OverwrittenOutputError
from graphrt.core.base.option_values import refused
from graphrt.core.batch.descriptor import Axis

_MOST_BLOCKS = 1 << 16
"""The most pieces in front of a batch axis: each is a copy of its own at every step."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a forward: its dtype, its shape with named batch axes, and its padding.

    A dimension of `shape` is an int or, for at most one of them, a batch axis: "tokens", "reqs", or
    either with a constant added ("reqs+1"); "rows" is "tokens" for models that have none. A step
    brings the live rows, a graph reads padded ones. `pad` is the value of padding rows, by default
    0, or "repeat" (the last live row). `index=True` marks what kernels use as an address (slot
    mappings, block tables): its padding must point where nothing live is, so `pad` has to be given,
    and as a value. Steps may leave an `optional=True` input out, or give None: then it is `pad` in
    all rows, which has to be a value that changes nothing (1.0 for a factor).

    Inputs are packed anew for every size, so that one copy brings all that come from the host: an
    input has an address for each size.

    Raises `InvalidInputError` for a dtype, a shape or an axis that no input has, for a padding that
    does not exist or that `dtype` cannot hold, and for an index or optional input without one.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    pad: int | float | complex | bool | str | None = None
    index: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise _wrong_spec("dtype", self.dtype, "a torch.dtype", "torch.int64")
        for flag in ("index", "optional"):
            if not isinstance(getattr(self, flag), bool):
                raise _wrong_spec(flag, getattr(self, flag), "True or False", f"{flag}=True")
        _check_shape(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))
        _check_pad(self.dtype, self.pad, self.index)
        if self.optional and (self.pad is None or isinstance(self.pad, str)):
            expected = "a value, for optional=True, that steps without the input have in all rows"
            raise _wrong_spec(
                "pad", self.pad, expected, "pad=1.0 for a factor, pad=0 for a summand"
            )

    @classmethod
    def of(cls, tensor: torch.Tensor, axes: Sequence[int | str | None] = ("rows",)) -> InputSpec:
        """The spec of inputs like `tensor`. `axes` are those of its first dimensions; a dimension
        with None, or without an axis, keeps its size. Raises `InvalidInputError`."""
        if not isinstance(tensor, torch.Tensor):
            raise _wrong_spec("tensor", tensor, "a torch.Tensor", "torch.int64")
        named = isinstance(axes, tuple | list) and len(axes) <= tensor.dim()
        if not named or any(each is not None and not isinstance(each, int | str) for each in axes):
            raise refused(
                "the axes of an input do not fit its tensor",
                axes,
                f'a tuple with "rows", another axis or None for each of the first dimensions of '
                f"{tuple(tensor.shape)}",
                '("rows", None) if dimension 0 has the rows',
                InvalidInputError,
            )
        sizes = tuple(tensor.shape)
        front = tuple(
            size if axis is None else axis for axis, size in zip(axes, sizes, strict=False)
        )
        return cls(tensor.dtype, front + sizes[len(axes) :])

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

    def padding(self, tokens: int, reqs: int) -> torch.Tensor:
        """Padding in all rows of a batch of this size, on the host."""
        return torch.full(self.sizes(tokens, reqs), self.pad_value, dtype=self.dtype, device="cpu")


Inputs: TypeAlias = Mapping[str, "InputSpec | torch.Tensor | Mapping[str, Any]"]
"""What a runner is told of its inputs: the spec of each by name, or a tensor like it; a mapping is
an argument that is a dict."""


def specs_of(tensors: Mapping[str, torch.Tensor], how: str) -> dict[str, InputSpec]:
    """The specs of inputs like these: dimension 0 is their rows, if all agree on its length and it
    is above 1. An input without dimensions has no rows.

    Raises `InvalidInputError` where it cannot be told; `how` is the advice, with {} for the name of
    an input.
    """
    lengths = {name: tensor.shape[0] for name, tensor in tensors.items() if tensor.dim()}
    if len({*lengths.values()}) > 1 or any(length <= 1 for length in lengths.values()):
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in lengths)
        common = max([*lengths.values()], key=[*lengths.values()].count)
        unlike = [name for name in lengths if lengths[name] != common or common <= 1]
        raise InvalidInputError(
            "it cannot be told by the tensors in inputs= which dimension has the rows",
            got=shapes,
            expected="the same length, above 1, in dimension 0 of all",
            advice=" and ".join(how.format(name) for name in unlike)
            + ', or None in place of "rows" where none of the dimensions has rows',
        )
    return {
        name: InputSpec.of(tensor, ("rows",) if tensor.dim() else ())
        for name, tensor in tensors.items()
    }


LOWEST_ADDRESS = 1 << 24
"""A smaller address is checked before it is read: a tensor whose storage was freed has its offset
as address. Real addresses are rarely so low."""


_axis_of = lru_cache(maxsize=64)(Axis.parse)


def check_value(
    name: str,
    spec: InputSpec,
    value: Any,
    live: tuple[int, ...] | None,
    cause: Exception | None = None,
) -> None:
    """Raise what is wrong with a step's value for the input `name`, whose live shape is `live`, if
    that is known. `cause` is what using it raised, if it was used."""
    got: object = type(value).__name__
    wrong = "has no rows in memory that could be copied"
    advice = f"{name}.to_dense() of a sparse one, torch.cat({name}.unbind()) of a nested one"
    if not isinstance(value, torch.Tensor):
        wrong, advice = "is no tensor", f"torch.as_tensor({name}) of a list or an array"
    elif value.is_meta or value.is_nested or value.layout is not torch.strided:
        got = "meta" if value.is_meta else "nested" if value.is_nested else value.layout
    elif value.dtype is not spec.dtype:
        wrong, got = "has the wrong dtype", value.dtype
        advice = f"{name}.to({spec.dtype}), or change its InputSpec"
    elif value.dim() != len(spec.shape) if live is None else value.shape != live:
        wrong, got = "has the wrong shape", tuple(value.shape)
        axis, _ = spec.batch_axis()
        extra = f" and the {axis.extra} more of '{axis}'" if axis and axis.extra else " alone"
        advice = (
            f"the live rows of {name}{extra}, which graphrt pads, in the declared order; or "
            "Batch(...) with their number"
        )
    elif _in_memory(name, value, cause):
        return
    shape = "" if live is None else f"{live} from "
    raise InvalidInputError(
        f"input {name!r} {wrong}",
        got=got,
        expected=f"a dense tensor of {spec.dtype}, {shape}{spec.shape}",
        advice=advice,
    ) from cause


def _in_memory(name: str, value: torch.Tensor, cause: Exception | None) -> bool:
    """Whether a tensor can be read: where it cannot, a copy would end the process."""
    try:
        return value.numel() == 0 or (
            value.data_ptr() != 0 and value.untyped_storage().nbytes() > 0
        )
    except RuntimeError as error:
        if OverwrittenOutputError.__name__ not in str(error):
            return False
    raise OverwrittenOutputError(
        f"input {name!r} is an output of an earlier step, whose memory was overwritten",
        expected="an output of the step before, or a copy",
        advice='clone() what is needed longer, or GraphOptions(outputs="clone")',
    ) from cause


def _check_shape(shape: object) -> None:
    """Raise `InvalidInputError` unless it is a tuple of sizes with at most one batch axis."""
    if isinstance(shape, tuple | list):
        axes = [Axis.parse(size) for size in shape if isinstance(size, str)]
        front = list(itertools.takewhile(lambda size: not isinstance(size, str), shape))
        right = all(isinstance(size, str) or _is_size(size) for size in shape)
        if right and len(axes) <= 1 and (not axes or math.prod(front) <= _MOST_BLOCKS):
            return
    expected = (
        f"a tuple of ints >= 0 and at most one axis, with at most {_MOST_BLOCKS} pieces in front "
        "of the batch axis, each of which is a copy"
    )
    raise _wrong_spec("shape", shape, expected, '("tokens", 64)')


def _check_pad(dtype: torch.dtype, pad: object, index: bool) -> None:
    """Raise `InvalidInputError` for a padding that does not exist or that rows cannot hold."""
    numbers = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if not _holds(dtype, 0) or (index and not numbers):
        expected = "integers, for index=True" if index else "a dtype of dense tensors"
        raise _wrong_spec("dtype", dtype, expected, "torch.int64")
    if index and (pad is None or isinstance(pad, str)):
        # Padding rows are read and written: 0 is the first page, what is repeated live memory.
        expected = "a value, for index=True, with which rows read and write nothing live"
        raise _wrong_spec("pad", pad, expected, "pad=-1 if kernels skip it, or a page of nobody's")
    if pad is None or (isinstance(pad, str) and pad == "repeat"):
        return
    if not isinstance(pad, int | float | complex) or not _holds(dtype, pad):
        raise _wrong_spec("pad", pad, f'a number that {dtype} holds, or "repeat"', "pad=0")


def _holds(dtype: torch.dtype, value: complex) -> bool:
    """Whether rows can be filled with a value, which for integers is then itself."""
    try:
        filled = torch.full((1,), value, dtype=dtype, device="cpu").item()
    except (OverflowError, RuntimeError, TypeError):
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return bool(filled == value)
    # Some dtypes take their largest number for a larger one.
    return not value or not cmath.isfinite(value) or abs(value) <= torch.finfo(dtype).max


def _wrong_spec(field: str, value: object, expected: str, example: str) -> GraphRTError:
    what, advice = f"an InputSpec has a wrong {field}", 'InputSpec(torch.int64, ("tokens",)), with'
    return refused(what, value, expected, f"{advice} {example}", InvalidInputError)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
