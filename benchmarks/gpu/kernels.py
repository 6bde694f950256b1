"""Triton kernels as engines have some: `copied` is compiled for each power of two of a batch,
`softcap` once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(source, target, width, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at, is_inside = row * width + column, (row < rows) & (column < width)
    tl.store(target + at, tl.load(source + at, mask=is_inside), mask=is_inside)


def copied(hidden: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor [rows, width]."""
    result = torch.empty_like(hidden)
    rows, width = hidden.shape
    _copy[(triton.cdiv(width, 16),)](
        hidden, result, width, rows, ROWS=triton.next_power_of_2(rows), COLUMNS=16
    )
    return result


@triton.jit
def _softcap(x, out, count, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count).to(tl.float32) / cap
    value = cap * (2 / (1 + tl.exp(-2 * value)) - 1)
    tl.store(out + at, value.to(out.dtype.element_ty), at < count)


def softcap(x: torch.Tensor) -> torch.Tensor:
    """30 tanh(x / 30)"""
    out = torch.empty_like(x)
    _softcap[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), 30.0, BLOCK=1024)
    return out
