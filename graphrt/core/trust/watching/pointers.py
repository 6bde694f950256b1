"""What graphs may touch by the addresses in their nodes, beside what watched runs have used.

A block is found where a word of a node points into it. That is certain of no block, and says
nothing about memory that torch's allocator does not know. What is reported without being touched:
a block that an old word between two fields of a struct still points to, and a workspace of a
library of which the size is not known. Such words come and go with the capture; real ones stay.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import NamedTuple

import torch

from graphrt.core.base.homes import public
from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.contract import DeviceGraph, MemoryBlock
from graphrt.core.device.platform import Platform


@public("graphrt.types")
class UnknownBlock(NamedTuple):
    """Memory in use, outside of graph pools, that graphs may touch and no watched run has used.

    `bytes` is what was asked for, `nodes` how many nodes point to it, `name` where the forward has
    it, "" where no name was found.
    """

    address: int
    bytes: int
    nodes: int
    name: str = ""

    def __str__(self) -> str:
        name = f", {self.name}" if self.name else ""
        return f"{self.bytes} bytes at {self.address:#x}, in {self.nodes} nodes{name}"


@public("graphrt.types")
class UnknownMemory(NamedTuple):
    """All such blocks, the most used first; of `unread` nodes nobody can tell what they touch."""

    blocks: tuple[UnknownBlock, ...]
    unread: int


def unknown_memory(
    platform: Platform, graphs: Iterable[DeviceGraph], known: Iterable[int]
) -> UnknownMemory | None:
    """What `graphs` may touch that is not `known`, which are addresses in memory with a name.

    None if the platform cannot tell. It is a line for a report, and no proof of anything.
    """
    nodes: list[Collection[int]] = []
    unread = 0
    for graph in graphs:
        pointers = platform.pointers(graph)
        if pointers is None:
            return None
        nodes += pointers.nodes
        unread += pointers.unread
    blocks = platform.memory_blocks()
    if blocks is None:
        return None
    return UnknownMemory(unknown_blocks(nodes, blocks, known), unread)


def unknown_blocks(
    nodes: Iterable[Collection[int]],
    blocks: Iterable[MemoryBlock],
    known: Iterable[int],
    tensors: Callable[[], Iterable[int]] | None = None,
) -> tuple[UnknownBlock, ...]:
    """The blocks that words of `nodes` point into, the most used first, but for those with a
    `known` address, those of graph pools, and what torch keeps for itself.

    That is a block of a size that torch is known to use so, in which no tensor begins; `tensors`
    says where tensors do, by default all that Python has.
    """
    home_of = _homes(each for each in blocks if not each.in_graph_pool)
    counts: Counter[MemoryBlock] = Counter()
    for words in nodes:
        counts.update({home for home in map(home_of, words) if home is not None})
    named = set(map(home_of, known))
    touched = [block for block in counts if block not in named]
    if any(block.may_be_internal for block in touched):
        held = set(map(home_of, (tensors or tensor_addresses)()))
        touched = [block for block in touched if block in held or not block.may_be_internal]
    unknown = [UnknownBlock(block.address, block.bytes, counts[block]) for block in touched]
    return tuple(sorted(unknown, key=lambda each: (-each.nodes, each.address)))


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 for what has none, or must not be read any more."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def tensor_addresses() -> set[int]:
    """Where the storages of all tensors begin that Python has, but for what the host has frozen
    (`gc.freeze`)."""
    # Most objects of a process are none; isinstance() would ask each of them. Those that a trace
    # works with have no memory, and torch warns whoever asks for it.
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and type(each).__name__ != "FakeTensor"
    ]
    return unseen(lambda: {address for each in tensors if (address := address_of(each))})


def _homes(blocks: Iterable[MemoryBlock]) -> Callable[[int], MemoryBlock | None]:
    """What says which of the blocks an address is in."""
    ordered = sorted(blocks)
    starts = [block.address for block in ordered]

    @cache
    def home_of(address: int) -> MemoryBlock | None:
        at = bisect_right(starts, address) - 1
        return ordered[at] if at >= 0 and address < ordered[at].end else None

    return home_of
