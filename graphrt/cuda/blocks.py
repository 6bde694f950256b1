"""The sizes of blocks that torch's caching allocator has given to libraries."""

from __future__ import annotations

from graphrt.cuda.private_torch import cublas_workspace_bytes, cublaslt_workspace_bytes

_WORKSPACES = frozenset({4096 * 8 * 1024, 4096 * 1024 * 2 + 16 * 1024 * 8})
"""What torch gives cuBLAS on Hopper and elsewhere, unless it is told otherwise."""


def workspace_sizes() -> frozenset[int]:
    """The sizes, in bytes, of what torch allocates for cuBLAS."""
    if cublas_workspace_bytes and cublaslt_workspace_bytes:
        return frozenset({cublas_workspace_bytes(), cublaslt_workspace_bytes()})
    return _WORKSPACES
