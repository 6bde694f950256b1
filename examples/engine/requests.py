"""Requests, the pages of their tokens in the cache, and the scheduler: which tokens run next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from examples.engine.config import EngineConfig, Sampling


@dataclass(eq=False)
class Request:
    """`tokens` are the prompt and the generated ones; the first `cached` of them are in the cache.

    A request is in no "phase": it decodes whenever a single token is not in the cache yet. That is
    also true of the last token of a prompt, and of a request that lost its pages and came back.
    """

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    @property
    def decodes(self) -> bool:
        return self.remaining == 1

    @property
    def done(self) -> bool:
        ended = self.tokens[-1] in self.sampling.eos_ids and len(self.tokens) > self.prompt_len
        return ended or len(self.tokens) - self.prompt_len == self.sampling.max_tokens


class RequestError(ValueError):
    """This request cannot be served. Nothing is queued, and other requests go on."""


class Chunk(NamedTuple):
    """Tokens of one request in one step. `ids` go to the positions from `start` on."""

    ids: Sequence[int]
    start: int
    pages: Sequence[int]


class Scheduler:
    """Continuous batching: requests join and leave between steps, and pages are given on demand.

    A step takes all requests that decode, and fills its token budget with parts of prompts. If no
    page is free, the request that came last gives its pages back. It waits in front, and its tokens
    are computed again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.free_pages = list(range(config.num_pages - 1, 0, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next step, and how many tokens of each it computes."""
        self._admit()
        scheduled: list[tuple[Request, int]] = []
        budget = self.config.max_num_tokens
        # In order of admission: prompts are finished in that order, so decodes always come first.
        for request in tuple(self.running):
            wanted = self.config.query_len if request.decodes else min(request.remaining, budget)
            if 0 < wanted <= budget and self._grow(request, request.cached + wanted):
                scheduled.append((request, wanted))
                budget -= wanted
        return scheduled

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps, wherever it is. One that has ended stays as it is."""
        if request in self.running:
            self.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_reqs:
            request = self.waiting[0]
            if self.config.pages(len(request.tokens)) > len(self.free_pages):
                return
            self.running.append(self.waiting.popleft())
            self._grow(request, len(request.tokens))

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give the request pages for so many tokens. False if it lost its own pages to others."""
        if request not in self.running:
            return False
        missing = self.config.pages(tokens) - len(request.pages)
        while missing > len(self.free_pages):
            last = self.running.pop()
            self._free(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is request:
                return False
        request.pages += [self.free_pages.pop() for _ in range(missing)]
        return True

    def _free(self, request: Request) -> None:
        self.free_pages += request.pages
        request.pages, request.cached = [], 0
