"""Decode attention with a declared support, so that its graphs are FULL where they can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphrt.attention.backend import AttentionBackend, AttentionStep, bind_all, supports_of
from graphrt.attention.levels.levels import get_cudagraph_support, known_backends
from graphrt.attention.libraries.flash import FlashAttention
from graphrt.attention.libraries.flashinfer import FlashInferAttention
from graphrt.attention.operator import OpaqueAttention
from graphrt.attention.sdpa import SdpaAttention
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape

if TYPE_CHECKING:
    from graphrt.attention.triton.backend import TritonAttention

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "AttentionStep",
    "FlashAttention",
    "FlashInferAttention",
    "GroupedShape",
    "LatentShape",
    "OpaqueAttention",
    "SdpaAttention",
    "TritonAttention",
    "bind_all",
    "get_cudagraph_support",
    "known_backends",
    "supports_of",
]


def __getattr__(name: str) -> Any:
    # Triton is an extra, and the interpreter has to be asked for before its first import.
    if name == "TritonAttention":
        from graphrt.attention.triton.backend import TritonAttention

        return TritonAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
