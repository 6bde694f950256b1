"""What programs are written with: it is printed in front of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    """A container that a forward returns, or is given."""

    first: Any
    second: Any


@dataclass
class Fields:
    """Another one."""

    left: Any
    right: Any = None


def tensor(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu", high: int = 16
) -> torch.Tensor:
    """Values of a seed, the same on every device: numbers below `high` for integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        made = torch.rand(shape, generator=generator) < 0.5
    elif dtype.is_complex:
        pairs = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        made = torch.view_as_complex(pairs).to(dtype)
    elif dtype.is_floating_point:
        made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    else:
        made = torch.randint(0, high, shape, generator=generator).to(dtype)
    return made.to(device)
