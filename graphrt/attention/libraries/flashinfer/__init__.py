"""Attention by FlashInfer: its wrappers are planned on the host, over lists of pages."""

from graphrt.attention.libraries.flashinfer.backend import FlashInferAttention

__all__ = ["FlashInferAttention"]
