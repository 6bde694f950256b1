"""Attention of requests with any number of tokens, by PyTorch's operators on tiles of queries."""

from graphrt.attention.prefill.query_tiles import QueryTiles, with_tiles
from graphrt.attention.prefill.varlen import CHUNK_BYTES, varlen_attention

__all__ = ["CHUNK_BYTES", "QueryTiles", "varlen_attention", "with_tiles"]
