"""Whether a task that is issued again still touches the memory that it was captured with.

Only the bytes of a kernel's arguments are known. So changed words of eight bytes are looked at: one
that was an address of device memory, and now is in another tensor, is a *stranger*. The tensors
that the task was captured with are told apart exactly. Other memory is known by its block of the
allocator, so two parts of one block are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from graphrt.cuda.driver.api import allocation_of
from graphrt.cuda.driver.pointers import LEAST_ADDRESS

Range = tuple[int, int]


class Homes:
    """Tells for each address in a task's captured parameters which memory it belongs to.

    `tensors` are the ranges of the captured tensors, `block_of` returns the range of other memory.
    """

    def __init__(self, tensors: Iterable[Range], block_of: Callable[[int], Range | None]) -> None:
        self._tensors = sorted(set(tensors))
        self._block_of = block_of
        # Captured address -> the memory that it belongs to; None if it is no device memory.
        self._homes: dict[int, Range | None] = {}

    def stranger(self, captured: Sequence[int], words: Sequence[int]) -> int | None:
        """An address among the `words` of a node, of a tensor that it did not touch when it was
        `captured` with as many words."""
        for old, new in zip(captured, words, strict=True):
            if old != new and min(old, new) >= LEAST_ADDRESS and self._strange(old, new):
                return new
        return None

    def _strange(self, old: int, new: int) -> bool:
        # Any captured tensor is accepted: `old` may be the end of one and the beginning of another.
        if any(start <= new < end for start, end in self._tensors):
            return False
        if old not in self._homes:
            self._homes[old] = self._home(old)
        home = self._homes[old]
        # Two small numbers side by side may look like an address, but hardly both times.
        return home is not None and not home[0] <= new < home[1] and bool(self._block_of(new))

    def _home(self, address: int) -> Range | None:
        for start, end in self._tensors:
            if start <= address < end:
                return start, end
        return self._block_of(address)


def ranges_of(tensors: Iterable[torch.Tensor]) -> list[Range]:
    """The memory of the whole storages of device tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cuda]
    return [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]


def block_of(address: int) -> Range | None:
    """The block of torch's allocator that has `address`, else the driver's allocation; None if it
    is no device memory."""
    allocation = allocation_of(address)
    if allocation is None:
        return None
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        start = segment["address"]
        if start <= address < start + segment["total_size"]:
            for block in segment["blocks"]:
                if address < start + block["size"]:
                    return start, start + block["size"]
                start += block["size"]
    return allocation
