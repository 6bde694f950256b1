"""Decode attention with a declared support, so that its graphs are FULL where they can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphrt.attention.backend import AttentionBackend, AttentionStep, bind_all, supports_of
from graphrt.attention.levels.facts import Condition, Fact, KnownBackend, Level
from graphrt.attention.levels.lookup import (
    facts_of,
    get_cudagraph_support,
    known_backend,
    known_backends,
    level_of,
)
from graphrt.attention.libraries.flash import FlashAttention, FlashAttention3
from graphrt.attention.libraries.flashinfer.backend import FlashInferAttention
from graphrt.attention.operator import OpaqueAttention
from graphrt.attention.oracle import reference_attention
from graphrt.attention.sdpa import SdpaAttention
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape
from graphrt.core.batch.descriptor import BatchDescriptor

# What hosts see of the core in the signatures here.
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.runner.host import Bind, Phase

if TYPE_CHECKING:
    from graphrt.attention.triton.backend import SplitPolicy, TritonAttention

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "AttentionStep",
    "AttentionSupport",
    "BatchDescriptor",
    "Bind",
    "Condition",
    "Fact",
    "FlashAttention",
    "FlashAttention3",
    "FlashInferAttention",
    "GroupedShape",
    "KnownBackend",
    "LatentShape",
    "Level",
    "OpaqueAttention",
    "Phase",
    "SdpaAttention",
    "SplitPolicy",
    "TritonAttention",
    "bind_all",
    "facts_of",
    "get_cudagraph_support",
    "known_backend",
    "known_backends",
    "level_of",
    "reference_attention",
    "supports_of",
]


def __getattr__(name: str) -> Any:
    # Triton is an extra, and the interpreter has to be asked for before its first import.
    if name in ("SplitPolicy", "TritonAttention"):
        from graphrt.attention.triton import backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
