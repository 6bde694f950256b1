"""What torch's `op_db` has to try: operators by dtype, varied samples, and new values for them."""

from __future__ import annotations

import random
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch

from graphrt.core.base import tree
from tests.operators.buffers import Values, fits, rolled, same

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
SAMPLES = 12
"""At most so many of one operator and dtype."""
_LOOKED_AT = 120
"""Samples of an operator from which those are chosen."""
_LARGEST = 1 << 18
"""Elements of a tensor above which a sample only costs time."""


@dataclass(frozen=True)
class Case:
    """One operator with one dtype on one kind of device."""

    name: str
    dtype: torch.dtype
    device: str

    @property
    def op(self) -> Any:
        """Its OpInfo."""
        return operators()[self.name]

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `float32`."""
    return str(dtype).removeprefix("torch.")


@cache
def operators() -> dict[str, Any]:
    """Every OpInfo by its name with its variant, such as `max.reduction_with_dim`.

    Importing torch's list takes two seconds, which a process that only collects tests is spared.
    """
    from torch.testing._internal import common_methods_invocations as torch_samples

    # A seed that is set in every call would hide whether a replay draws what eager code draws.
    torch_samples.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {op.full_name: op for op in torch_samples.op_db}


def cases(device: str, dtypes: tuple[torch.dtype, ...] = DTYPES, only: str = "") -> list[Case]:
    """Every operator with those of `dtypes` that it has; `only` is a part of its name, or, with a
    dot or not, exactly it."""
    names = [only] if only in operators() else [name for name in operators() if only in name]
    return [
        Case(name, dtype, device)
        for name in names
        for dtype in dtypes
        if dtype in operators()[name].supported_dtypes(device)
    ]


def seed(*parts: object) -> None:
    """Set every generator of this process by what `parts` say."""
    number = zlib.crc32(repr(parts).encode())
    random.seed(number)
    torch.manual_seed(number)


def drawn(case: Case, draw: int) -> Iterator[Any]:
    """The samples of `case`; another `draw` has other numbers in them."""
    seed(case.name, case.dtype, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from islice(
            # By itself torch sets the same seed before each sample: every draw would be the first.
            case.op.sample_inputs(case.device, case.dtype, requires_grad=False, set_seed=False),
            _LOOKED_AT,
        )


def chosen(case: Case, limit: int = SAMPLES, draws: int = 3) -> list[list[Values]]:
    """Up to `limit` samples, varied in the structure of their arguments, each with up to `draws`
    values of the same shapes, its own first."""
    every = [[values_of(each) for each in drawn(case, draw)] for draw in range(draws)]
    groups: dict[object, list[int]] = defaultdict(list)
    for place, values in enumerate(every[0]):
        if all(t.numel() <= _LARGEST for t in tree.tensors(values)):
            groups[_structure(values)].append(place)
    order: list[int] = []
    while len(order) < limit and any(groups.values()):
        order += [places.pop(0) for places in groups.values() if places]
    found = []
    for place in sorted(order[:limit]):
        first = every[0][place]
        alike = [first]
        for shift, later in enumerate(every[1:], 1):
            new = later[place] if place < len(later) else None
            usable = new and fits(first, new) and not same(first, new)
            alike.append(new if new and usable else rolled(first, shift))
        found.append(alike)
    return found


def values_of(sample: Any) -> Values:
    """The arguments of a torch `SampleInput`."""
    return (sample.input, *sample.args), dict(sample.kwargs)


def _structure(values: Values) -> object:
    args, kwargs = values

    def kind(leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            return str(leaf) if isinstance(leaf, str | bool | None) else type(leaf)
        strided = leaf.layout is torch.strided
        return leaf.dim(), leaf.numel() == 0, strided and leaf.is_contiguous(), leaf.dtype

    return len(args), tuple(kwargs), tuple((path, kind(x)) for path, x in tree.leaves(values))
