"""What an engine is told: its limits, and how each request is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.types import Mode


@dataclass(frozen=True)
class EngineConfig:
    """`num_pages` counts page 0, to which padding writes. `max_len` is in tokens, prompt included.

    `draft_tokens` is how many tokens the draft model proposes for each request and step.
    """

    max_num_reqs: int = 8
    max_num_tokens: int = 64
    max_len: int = 256
    page_size: int = 16
    num_pages: int = 129
    draft_tokens: int = 0
    mode: Mode = "FULL_AND_PIECEWISE"

    def __post_init__(self) -> None:
        if self.max_num_tokens < self.max_num_reqs * self.query_len:
            raise ValueError("max_num_tokens must hold a decode step of max_num_reqs requests")
        if self.num_pages <= self.pages(self.max_num_tokens) + self.max_num_reqs:
            raise ValueError("num_pages must hold the tokens of one step")
        if self.num_pages <= self.max_pages:
            raise ValueError("num_pages must hold one request of max_len tokens")

    @property
    def query_len(self) -> int:
        """Tokens of a request in a decode step: its last token, and the proposals behind it."""
        return 1 + self.draft_tokens

    @property
    def max_pages(self) -> int:
        """Pages of the longest request: rejected proposals are in the cache for one step too."""
        return self.pages(self.max_len + self.draft_tokens)

    def pages(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy. A request ends after `max_tokens` tokens, or with an EOS token."""

    max_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
