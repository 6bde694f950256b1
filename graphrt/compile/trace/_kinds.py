"""What code takes for granted of a tensor that it reads: all but its values and its address."""

from __future__ import annotations

import torch

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]


def kind_of(tensor: torch.Tensor) -> Kind:
    """The dtype, shape, strides and device of a tensor. The same tensor may have others later:
    `module.half()`, `.data =` and `resize_()` change it in place."""
    return tensor.dtype, tensor.shape, _strides(tensor), tensor.device


def kind_text(kind: Kind) -> str:
    dtype, shape, strides, device = kind
    return f"{dtype} {tuple(shape)} {strides} on {device}"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
