"""Backends over attention libraries, each imported when its first backend is made."""

from graphrt.attention.libraries.flash import FlashAttention, FlashAttention3
from graphrt.attention.libraries.flashinfer import FlashInferAttention

__all__ = ["FlashAttention", "FlashAttention3", "FlashInferAttention"]
