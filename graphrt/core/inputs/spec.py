"""`InputSpec`: what a runner must know about one input of a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.core.base import InvalidInputError
from graphrt.core.batch import Axis


@dataclass(frozen=True)
class InputSpec:
    """One input of a forward: its dtype, its shape with named batch axes, and its padding.

    A dimension of `shape` is an int or, for at most one of them, a batch axis: "tokens", "reqs", or
    either with a constant added ("reqs+1"). A step brings the live rows, a graph reads padded ones.
    `pad` is the value of padding rows, or "repeat" (the last live row) or "keep" (whatever was
    there). `index=True` marks what kernels use as an address (slot mappings, block tables): its
    padding must point where nothing live is, so "keep" is refused.

    Inputs are packed anew for every size, so that one copy brings all that come from the host.
    `fixed=True` keeps one address at every size instead, for work of the host's own on the device
    that writes into the buffer; so does "keep".

    Raises `InvalidInputError` for an axis or a padding that does not exist.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    pad: int | float | bool | str = 0
    index: bool = False
    fixed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.pad, str) and self.pad not in ("repeat", "keep"):
            raise InvalidInputError(
                "unknown padding", got=repr(self.pad), expected='a number, "repeat" or "keep"'
            )
        if self.index and isinstance(self.pad, str):
            raise InvalidInputError(
                "padding rows of an index input cannot hold old or live values: they would read "
                "and write live memory",
                got=f"pad={self.pad!r}, index=True",
                expected="a pad value that reads and writes nothing live",
                advice="pad=-1 if the kernel skips it, or the slot of a dummy page",
            )
        axes = [index for index, size in enumerate(self.shape) if isinstance(size, str)]
        for index in axes:
            Axis.parse(str(self.shape[index]))
        if len(axes) > 1:
            raise InvalidInputError(
                "an input has at most one batch axis", got=self.shape, expected="one of them named"
            )

    @property
    def packed(self) -> bool:
        """Whether the input moves with the size of the step."""
        return not self.fixed and self.pad != "keep"

    @property
    def pad_value(self) -> int | float | bool:
        """What fills rows of which nothing is known: the padding, if it is a value."""
        return 0 if isinstance(self.pad, str) else self.pad

    def batch_axis(self) -> tuple[Axis | None, int]:
        """The batch axis and its dimension; (None, 0) if there is none."""
        for dim, size in enumerate(self.shape):
            if isinstance(size, str):
                return Axis.parse(size), dim
        return None, 0

    def sizes(self, tokens: int, reqs: int) -> tuple[int, ...]:
        """The shape for a batch of this size."""
        return tuple(
            size if isinstance(size, int) else Axis.parse(size).size(tokens, reqs)
            for size in self.shape
        )


def check_value(
    name: str, spec: InputSpec, value: object, live: tuple[int, ...]
) -> InvalidInputError | None:
    """What is wrong with a step's value for the input `name`, whose live shape is `live`."""
    if not isinstance(value, torch.Tensor):
        return InvalidInputError(
            f"input {name!r} is no tensor",
            got=type(value).__name__,
            expected=f"a tensor of {spec.dtype}",
            advice=f"torch.tensor({name}, dtype={spec.dtype})",
        )
    if value.dtype is not spec.dtype:
        return InvalidInputError(
            f"input {name!r} has the wrong dtype",
            got=value.dtype,
            expected=spec.dtype,
            advice=f"{name}.to({spec.dtype}), or change its InputSpec",
        )
    if tuple(value.shape) != live:
        return InvalidInputError(
            f"input {name!r} has the wrong shape",
            got=tuple(value.shape),
            expected=f"{live} from {spec.shape}",
            advice="pass the live rows only; graphrt pads them",
        )
    return None
