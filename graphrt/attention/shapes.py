"""The shapes of attention layers over paged caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.core.base.errors import InvalidInputError


@dataclass(frozen=True)
class GroupedShape:
    """Multi-head, grouped-query or multi-query attention.

    Query and output are [tokens, num_heads, head_dim]; `caches` are the keys and the values,
    [pages, page_size, num_kv_heads, head_dim] each. `scale` None is 1 / sqrt(head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidInputError(
                "query heads do not divide into groups",
                got=f"{self.num_heads} heads over {self.num_kv_heads} KV heads",
                expected="a multiple",
                advice="pass the heads of one rank",
            )

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores before softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kv_heads(self) -> int:
        """Heads of the caches, which the queries share."""
        return self.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of an output head."""
        return self.head_dim

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each cache behind its first dimension, the pages."""
        return ((self.page_size, self.num_kv_heads, self.head_dim),) * 2


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention, absorbed: every head attends to one compressed vector a token.

    Query is [tokens, num_heads, rank + rope_dim], the part that meets the compressed vector first;
    output [tokens, num_heads, rank]. The one cache is [pages, page_size, rank + rope_dim]; values
    are its first `rank` numbers. `scale` has no default, as it is that of the heads before
    compression (DeepSeek-V2: (128 + 64) ** -0.5, times YaRN's factor).
    """

    num_heads: int
    rank: int
    rope_dim: int
    page_size: int
    scale: float

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores before softmax."""
        return self.scale

    @property
    def kv_heads(self) -> int:
        """Heads of the caches, which the queries share."""
        return 1

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of an output head."""
        return self.rank

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each cache behind its first dimension, the pages."""
        return ((self.page_size, self.rank + self.rope_dim),)


AttentionShape = GroupedShape | LatentShape
"""Both kinds have `num_heads`, `page_size` and the properties: code for either reads only these."""


def check_tensors(
    shape: AttentionShape,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    out: torch.Tensor | None = None,
) -> None:
    """Raise `InvalidInputError` where a tensor does not have the declared shape."""
    expected = (shape.num_heads, shape.query_dim)
    if tuple(query.shape[1:]) != expected:
        raise InvalidInputError(
            "the query has another shape than its attention layer",
            got=tuple(query.shape),
            expected=("tokens", *expected),
            advice="pass [tokens, heads, dim]",
        )
    cache_shapes = tuple(tuple(cache.shape[1:]) for cache in caches)
    if cache_shapes != shape.cache_shapes:
        raise InvalidInputError(
            "the caches have another shape than their attention layer",
            got=cache_shapes,
            expected=shape.cache_shapes,
            advice="pass each cache as [pages, page_size, ...]",
        )
    found_out = None if out is None else tuple(out.shape)
    if found_out not in (None, (*query.shape[:2], shape.value_dim)):
        raise InvalidInputError(
            "the output has another shape than its attention layer",
            got=found_out,
            expected=(*query.shape[:2], shape.value_dim),
            advice="pass a view of [tokens, heads, dim]",
        )
    devices = {tensor.device for tensor in (query, *caches)}
    if len(devices) > 1:
        raise InvalidInputError(
            "query and caches are on different devices",
            got=", ".join(sorted(map(str, devices))),
            expected="one device",
            advice="move the query",
        )
    dtypes = {tensor.dtype for tensor in (query, *caches)}
    if len(dtypes) > 1:
        raise InvalidInputError(
            "query and caches have different dtypes",
            got=", ".join(sorted(map(str, dtypes))),
            expected="one dtype",
            advice="convert the query",
        )


def check_strides(*tensors: torch.Tensor) -> None:
    """Raise `InvalidInputError` for a tensor whose last dimension is not contiguous."""
    for tensor in tensors:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InvalidInputError(
                "the last dimension of a tensor is not contiguous",
                got=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
                expected="a last stride of 1",
                advice="pass it contiguous",
            )
