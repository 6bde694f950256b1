"""Memory that graphs may touch and no watched run has shown: found by addresses in their nodes.

If a word of a node points into a block of torch's allocator, the graph may touch that block. This
proves nothing, and memory of other allocators is not found. Blocks that are reported and never
touched: one to which an old word between two fields of a struct still points, and a library's
workspace of unknown size. Such words come and go with the capture; real ones stay.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache

import torch

from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.contract import DeviceGraph, MemoryBlock
from graphrt.core.device.platform import Platform
from graphrt.core.runner.findings import UnknownBlock, UnknownMemory


def unknown_memory(
    platform: Platform, graphs: Iterable[DeviceGraph], known: Iterable[int]
) -> UnknownMemory | None:
    """The memory that `graphs` may touch, without blocks that have a `known` address.

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
    `known` address, those of graph pools, and those that torch keeps for itself.

    Torch is known to keep blocks of certain sizes: such a block counts if a tensor begins in it.
    `tensors` returns where tensors begin, by default all that Python has.
    """
    block_of = _block_finder(each for each in blocks if not each.in_graph_pool)
    counts: Counter[MemoryBlock] = Counter()
    for words in nodes:
        counts.update({block for block in map(block_of, words) if block is not None})
    known_blocks = set(map(block_of, known))
    touched = [block for block in counts if block not in known_blocks]
    if any(block.may_be_internal for block in touched):
        with_tensors = set(map(block_of, (tensors or tensor_addresses)()))
        touched = [block for block in touched if block in with_tensors or not block.may_be_internal]
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
    # isinstance() would run the `__class__` of any object of the process. A tensor of a trace has
    # no memory, and torch warns if asked for that.
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and type(each).__name__ != "FakeTensor"
    ]
    return unseen(lambda: {address for each in tensors if (address := address_of(each))})


def _block_finder(blocks: Iterable[MemoryBlock]) -> Callable[[int], MemoryBlock | None]:
    """A function that returns the block that an address is in."""
    ordered = sorted(blocks)
    starts = [block.address for block in ordered]

    @cache
    def block_of(address: int) -> MemoryBlock | None:
        at = bisect_right(starts, address) - 1
        return ordered[at] if at >= 0 and address < ordered[at].end else None

    return block_of
