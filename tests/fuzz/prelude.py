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


@torch.library.custom_op("graphrt_fuzz::weigh", mutates_args=())
def weigh(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What is made of other operators: autocast reaches those."""
    return (x.to(weight.dtype) @ weight).tanh()


@torch.library.custom_op("graphrt_fuzz::decay_", mutates_args=("x",))
def decay_(x: torch.Tensor, by: float) -> torch.Tensor:
    """Writes an argument, and returns something else."""
    x.mul_(by)
    return x.float().sum(-1)


@torch.library.custom_op("graphrt_fuzz::parts", mutates_args=())
def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results."""
    return x.cumsum(-1), (x * 0.5).contiguous()
