"""Kernels as a user has them, launched by a function that is compiled."""

import torch
import triton
import triton.language as tl


@triton.jit
def by(x, factor: tl.constexpr):
    return x * factor


@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, by(tl.load(x + offsets, mask), 2), mask)


@triton.jit
def tripled(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, by(tl.load(x + offsets, mask), 3), mask)


def forward(x):
    out = torch.empty_like(x)
    n = x.numel()
    doubled[(triton.cdiv(n, 64),)](x + 1, out, n, BLOCK=64)
    return out * 2
