"""Arguments that share memory: generated code takes what is written to be apart from all else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from graphrt.compile.errors import RetraceError
from graphrt.compile.trace.parameters import Leaf


class Overlaps:
    """The arguments that a graph writes, by their paths, and whether it writes the module's tensors
    too; the trace saw none of them overlap."""

    def __init__(self, written: Collection[str], *, writes_weights: bool) -> None:
        self._written = frozenset(written)
        self._writes_weights = writes_weights

    @property
    def matter(self) -> bool:
        return bool(self._written) or self._writes_weights

    def check(self, leaves: Sequence[Leaf], weights: Mapping[str, torch.Tensor]) -> None:
        """Raise `RetraceError` for two tensors of a call in one memory of which one is written."""
        tensors = [leaf for leaf in leaves if _has_memory(leaf.value)]
        for index, one in enumerate(tensors):
            for other in tensors[:index]:
                written = one.path in self._written or other.path in self._written
                if written and _overlap(one.value, other.value):
                    raise _overlapping(one.path, other.path)
            if one.path in self._written or self._writes_weights:
                for name, weight in weights.items():
                    if _has_memory(weight) and _overlap(one.value, weight):
                        raise _overlapping(one.path, f"the module's {name}")


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common; also for some, of different strides, that only lie
    between each other."""
    first, last = _extent(one)
    other_first, other_last = _extent(other)
    if last <= other_first or other_last <= first:
        return False
    return not _side_by_side(one, other, other_first - first)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte, and of the first behind the last one."""
    if not tensor.numel():
        return 0, 0
    both = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in both) + 1
    first = tensor.data_ptr()
    return first, first + reach * tensor.element_size()


def _side_by_side(one: torch.Tensor, other: torch.Tensor, apart: int) -> bool:
    """Whether they are columns of one matrix, apart from each other in every row."""
    if not one.dim() or one.dim() != other.dim() or one.dtype is not other.dtype:
        return False
    row = one.stride(0) * one.element_size()
    if other.stride(0) != one.stride(0) or not row:
        return False
    widths = []
    for tensor in (one, other):
        first, end = _extent(tensor[0])
        widths.append(end - first)
    offset = apart % row
    return widths[0] <= offset and offset + widths[1] <= row


def _overlapping(one: str, other: str) -> RetraceError:
    return RetraceError(
        f"argument {one} shares memory with {other}, and compiled code writes to one of them",
        input=one,
        got="overlapping memory",
        expected="tensors that are apart, as in the compiled call",
        advice="pass a clone, or compile with backend='eager'",
    )
