"""A small continuous-batching host: requests, pages, a scheduler, greedy sampling."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphrt import Batch, Dispatch, GraphRunner
from graphrt.core.base.errors import GraphRTError, InvalidBatchError


class OutOfPagesError(GraphRTError, MemoryError):
    """A request needs more pages of the KV cache than there are at all.

    One that only has to wait for pages waits: all that it can need are set aside at admission.
    """


@dataclass(frozen=True)
class EngineLimits:
    """The sizes of batches and of the KV cache. `num_pages` counts the dummy page 0, which padding
    writes to; `context` is in tokens."""

    max_num_reqs: int = 8
    max_num_tokens: int = 64
    context: int = 256
    page_size: int = 16
    num_pages: int = 129

    def pages(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.page_size)


@dataclass
class Request:
    """One prompt and its generated text: both are in `tokens`, `computed` of them in the cache."""

    tokens: list[int]
    prompt_len: int
    max_len: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next is sampled: one while it decodes."""
        return len(self.tokens) - self.computed


class StepRecord(NamedTuple):
    """How one step ran; `logits` are [reqs, vocab] on the CPU if they were kept. A `tried` step ran
    several times, to be compared."""

    dispatch: Dispatch
    num_tokens: int
    num_reqs: int
    seconds: float
    logits: Tensor | None
    tried: bool = False


class Engine:
    """Runs requests to their end: decode first, the rest of the token budget for prompts."""

    def __init__(
        self, runner: GraphRunner, limits: EngineLimits,
        eos_ids: Collection[int] = (), keep_logits: bool = False,
        decode_updates: Callable[[Sequence[int]], Any] | None = None, *, eager: bool = False,
    ) -> None:  # fmt: skip
        """`decode_updates` makes the updates of a decode step from the lengths in the cache. With
        `eager` every step runs eagerly on the padded inputs that its graph would read."""
        self.runner, self.limits = runner, limits
        self.eos_ids, self.keep_logits = eos_ids, keep_logits
        self.eager = eager
        self.decode_updates = decode_updates
        self.free_pages = list(range(limits.num_pages - 1, 0, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps: list[StepRecord] = []

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queue a prompt; its text ends with EOS, after `max_new_tokens` or with the context.

        Raises `InvalidBatchError` if it cannot fit the context, `OutOfPagesError` the cache.
        """
        limits = self.limits
        if not 0 < len(prompt) < limits.context or max_new_tokens < 1:
            raise InvalidBatchError(
                "the prompt is empty, or leaves no room in the context",
                got=f"{len(prompt)} prompt tokens, max_new_tokens {max_new_tokens}",
                expected=f"1 to {limits.context - 1} prompt tokens, max_new_tokens >= 1",
                advice="shorten the prompt, or give the engine a larger context",
            )
        max_len = min(len(prompt) + max_new_tokens, limits.context)
        if (pages := limits.pages(max_len)) >= limits.num_pages:
            raise OutOfPagesError(
                "a request needs more pages than the cache has",
                got=pages, expected=f"at most {limits.num_pages - 1}", advice="fewer new tokens",
            )  # fmt: skip
        request = Request(list(prompt), len(prompt), max_len)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Schedule, run and sample one batch; there must be a request that is not finished."""
        scheduled = self._schedule()
        inputs = inputs_of(scheduled, self.limits)
        counts = {count for _, count in scheduled}
        query_len = counts.pop() if len(counts) == 1 else None
        batch = Batch(len(inputs["input_ids"]), len(scheduled), query_len)
        updates: dict[str, Any] = {}
        if self.decode_updates is not None and query_len == 1:
            lengths = [request.computed + 1 for request, _ in scheduled]
            updates["updates"] = self.decode_updates(lengths)
        start = time.perf_counter()
        logits, dispatch = self._run(batch, inputs, **updates)
        sampled = logits.argmax(dim=-1).tolist()
        seconds = time.perf_counter() - start
        kept_logits = logits.to("cpu", copy=True) if self.keep_logits else None
        self.steps.append(
            StepRecord(dispatch, batch.num_tokens, len(scheduled), seconds, kept_logits)
        )
        for (request, count), token in zip(scheduled, sampled, strict=True):
            request.computed += count
            if not request.remaining:
                request.tokens.append(token)
                if token in self.eos_ids or len(request.tokens) == request.max_len:
                    self.running.remove(request)
                    self.free_pages += request.pages

    def _run(
        self, batch: Batch, inputs: dict[str, Tensor], **updates: Any
    ) -> tuple[Tensor, Dispatch]:
        if self.eager:
            dispatch = self.runner.dispatcher.dispatch(batch)
            if dispatch.slot >= 0:
                return self.runner.run_padded_eagerly(batch, dispatch, inputs, **updates), dispatch
        logits = self.runner(batch, **updates, **inputs)
        assert self.runner.last_dispatch is not None
        return logits, self.runner.last_dispatch

    def _schedule(self) -> list[tuple[Request, int]]:
        limits = self.limits
        while self.waiting and len(self.running) < limits.max_num_reqs:
            pages = limits.pages(self.waiting[0].max_len)
            if pages > len(self.free_pages):
                break
            request = self.waiting.popleft()
            request.pages = [self.free_pages.pop() for _ in range(pages)]
            self.running.append(request)
        # Prompts are served in order of admission, so those that decode always come first.
        scheduled, budget = [], limits.max_num_tokens
        for request in self.running:
            count = min(request.remaining, budget)
            budget -= count
            if count:
                scheduled.append((request, count))
        return scheduled


def inputs_of(scheduled: Sequence[tuple[Request, int]], limits: EngineLimits) -> dict[str, Any]:
    """The inputs of a step that computes so many tokens of each request."""
    size, width = limits.page_size, limits.pages(limits.context)
    ids, positions, slots, starts = list[int](), list[int](), list[int](), [0]
    for request, count in scheduled:
        span = range(request.computed, request.computed + count)
        ids += request.tokens[span.start : span.stop]
        positions += span
        slots += [request.pages[p // size] * size + p % size for p in span]
        starts.append(len(ids))
    return {
        "input_ids": torch.tensor(ids, device="cpu"),
        "positions": torch.tensor(positions, device="cpu"),
        "slot_mapping": torch.tensor(slots, device="cpu"),
        "block_table": torch.tensor(
            [(r.pages + [0] * width)[:width] for r, _ in scheduled], device="cpu"
        ),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device="cpu"),
    }


def random_step(
    batch: Batch, limits: EngineLimits, vocab: int, generator: torch.Generator
) -> list[tuple[Request, int]]:
    """Requests for a step of `batch`, with random tokens, some of them in the cache already.

    The first has token 0 at position 0, the values of padding, if there are several tokens. A trial
    without these in a live row would be followed by another one, at a served step.
    """
    reqs = batch.num_reqs or min(batch.num_tokens, limits.max_num_reqs)
    scheduled = []
    for request in range(reqs):
        count = (batch.num_tokens + request) // reqs
        cached = int(
            torch.randint(max(limits.context - count, 1), (), generator=generator, device="cpu")
        )
        as_padding = not request and batch.num_tokens > 1
        cached = 0 if as_padding else cached
        length = cached + count
        tokens = torch.randint(vocab, (length,), generator=generator, device="cpu").tolist()
        if as_padding:
            tokens[0] = 0
        pages = limits.pages(limits.context)
        first = 1 + request * pages
        pages_of_request = list(range(first, first + limits.pages(length)))
        scheduled.append((Request(tokens, length, limits.context, cached, pages_of_request), count))
    return scheduled
