"""The blocks of torch's caching allocator that are in use, from its snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphrt.core.device.contract import MemoryBlock
from graphrt.cuda.private_torch import cublas_workspace_bytes, cublaslt_workspace_bytes

_NO_POOL = (0, 0)
_GENERATOR_STATE = 8
"""A seed or an offset, which torch keeps outside of pools for graphs that draw random numbers."""
_WORKSPACES = frozenset({4096 * 8 * 1024, 4096 * 1024 * 2 + 16 * 1024 * 8})
"""The sizes of torch's default workspaces for cuBLAS, on Hopper and elsewhere."""


def internal_sizes() -> frozenset[int]:
    """The sizes, in bytes, of blocks that torch allocates for itself, without a tensor."""
    return workspace_sizes() | {_GENERATOR_STATE}


def workspace_sizes() -> frozenset[int]:
    """The sizes, in bytes, of the workspaces that torch allocates for cuBLAS."""
    if cublas_workspace_bytes and cublaslt_workspace_bytes:
        return frozenset({cublas_workspace_bytes(), cublaslt_workspace_bytes()})
    return _WORKSPACES


def blocks_of(segments: Iterable[Mapping[str, Any]], internal: frozenset[int]) -> list[MemoryBlock]:
    """The blocks in use of a snapshot (`torch.cuda.memory_snapshot()`), of all devices.

    `internal` are the sizes of blocks that may be torch's own. A block that was freed and still
    waits for a stream is left out. Memory of a `torch.cuda.MemPool` counts as a graph pool's.
    """
    blocks = []
    for segment in segments:
        in_pool = tuple(segment["segment_pool_id"]) != _NO_POOL
        address = segment["address"]
        for block in segment["blocks"]:
            end = address + block["size"]
            if block["state"] == "active_allocated":
                requested = block["requested_size"]
                blocks.append(MemoryBlock(address, end, requested, in_pool, requested in internal))
            address = end
    return blocks
