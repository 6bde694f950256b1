"""What names one captured graph, and what a host knows about one step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from graphrt.core.base import InvalidBatchError
from graphrt.core.batch.modes import GraphMode


@dataclass(frozen=True, slots=True, order=False)
class BatchDescriptor:
    """The shape that one graph was captured for.

    `num_tokens` and `num_reqs` are padded; `num_reqs` None means any number of requests. `uniform`
    graphs serve batches whose requests all have `query_len` tokens. `num_active_loras` is the most
    LoRA adapters the graph can serve; `has_lora` without a count means any number. `bounds` are
    integers baked into kernels, such as the longest context: the graph serves batches whose bounds
    are not larger; () means unbounded. `variant` is anything hashable that the host needs to tell
    two graphs apart.

    Raises `InvalidBatchError` for numbers that no batch can have.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    query_len: int | None = None
    bounds: tuple[int, ...] = ()
    variant: Hashable = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidBatchError(
                "a descriptor needs at least one token", got=self.num_tokens, expected=">= 1"
            )
        if self.num_reqs is not None and self.num_reqs < 1:
            raise InvalidBatchError(
                "num_reqs must be positive, or None for any", got=self.num_reqs, expected=">= 1"
            )
        if self.num_active_loras < 0:
            raise InvalidBatchError(
                "num_active_loras cannot be negative", got=self.num_active_loras, expected=">= 0"
            )
        if self.num_active_loras and not self.has_lora:
            object.__setattr__(self, "has_lora", True)
        if self.uniform and self.query_len is None:
            if self.num_reqs is None or self.num_tokens % self.num_reqs:
                raise InvalidBatchError(
                    "a uniform descriptor needs its query length",
                    got=self,
                    expected="query_len, or num_tokens divisible by num_reqs",
                )
            object.__setattr__(self, "query_len", self.num_tokens // self.num_reqs)
        if self.uniform and self.query_len is not None and self.num_tokens % self.query_len:
            raise InvalidBatchError(
                "a uniform descriptor holds whole requests",
                got=f"{self.num_tokens} tokens, query length {self.query_len}",
                expected="num_tokens divisible by query_len",
            )

    @property
    def lora_capacity(self) -> float:
        """The most active LoRAs this graph serves; infinite for `has_lora` without a count."""
        if self.num_active_loras:
            return self.num_active_loras
        return float("inf") if self.has_lora else 0

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.num_reqs is not None:
            parts.append(f"{self.num_reqs} reqs")
        if self.uniform:
            parts.append(f"uniform q={self.query_len}")
        if self.has_lora:
            parts.append(f"loras<={self.num_active_loras or 'any'}")
        if self.bounds:
            parts.append(f"bounds<={','.join(map(str, self.bounds))}")
        if self.variant is not None:
            parts.append(f"variant={self.variant!r}")
        return " ".join(parts)


class Batch(NamedTuple):
    """What the host knows about this step; a tuple, because one is built for every step.

    `num_tokens` (at least 1) and `num_reqs` (None: unknown) count what is live. `query_len` is the
    tokens of each request when all have equally many, else None. `bounds` are what this step needs
    of a graph's bounds, in their order. `num_active_loras` and `variant` are as in the descriptor.
    `exclude` holds runtime modes that must not serve this batch (cascade attention: FULL).
    """

    num_tokens: int
    num_reqs: int | None = None
    query_len: int | None = None
    bounds: tuple[int, ...] = ()
    num_active_loras: int = 0
    variant: Hashable = None
    exclude: frozenset[GraphMode] = frozenset()
