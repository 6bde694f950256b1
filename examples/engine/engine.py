"""The engine: schedule, propose, run, sample, accept.

A decode step without a draft model computes one token of each request. With one, the draft proposes
k tokens in k small steps, and the model checks all of them in one step of 1 + k tokens a request.
Both are uniform batches, so both are full graphs. Steps with parts of prompts are mixed batches:
they are captured in pieces, around attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from types import TracebackType

import torch
from torch import Tensor

from examples.engine.config import EngineConfig, Sampling
from examples.engine.model import Decoder
from examples.engine.paged import PagedModel
from examples.engine.requests import Chunk, Request, RequestError, Scheduler
from graphrt import GraphPool


class Engine:
    def __init__(
        self, model: Decoder, config: EngineConfig | None = None, draft: Decoder | None = None
    ) -> None:
        """Captures all graphs. `draft` shares the vocabulary of `model`."""
        self.config = config = config or EngineConfig()
        if (draft is None) != (config.draft_tokens == 0):
            raise ValueError("a draft model and draft_tokens go together")
        if draft is not None and draft.config.vocab_size != model.config.vocab_size:
            raise ValueError("a draft model has the vocabulary of the model")
        # Draft and model never run at the same time, so their graphs share one pool of memory: of
        # the current platform, unless the model was left on the CPU of a machine with a device.
        self.pool = GraphPool("cpu" if model.lm_head.weight.device.type == "cpu" else None)
        self.model = PagedModel(model, config, config.query_len, self.pool)
        self.draft = None if draft is None else PagedModel(draft, config, 1, self.pool)
        self.scheduler = Scheduler(config)
        self.proposed = self.accepted = 0
        for each in (self.model, self.draft):
            if each is not None:
                each.runner.capture()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for each in (self.model, self.draft):
            if each is not None:
                each.runner.close()
        self.pool.close()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Request:
        """Queue a request, which may be done between any two steps. Raises `RequestError`."""
        request = self.request(prompt, sampling)
        self.scheduler.waiting.append(request)
        return request

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Run all prompts to their end: the generated tokens of each. Raises `RequestError` before
        any of them is queued."""
        requests = [self.request(prompt, sampling) for prompt in prompts]
        self.scheduler.waiting += requests
        while self.busy:
            self.step()
        return [request.generated for request in requests]

    def request(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Request:
        """A request that can be served to its end: an error in a step would end all of them. It is
        not queued. Raises `RequestError`."""
        sampling = sampling or Sampling()
        vocab, limit = self.model.model.config.vocab_size, self.config.max_len
        numbers, heat = (sampling.max_tokens, sampling.seed), sampling.temperature
        # NaN is in no range, and a large int has no float.
        valid = isinstance(heat, (int, float)) and abs(heat) < 1e9
        valid &= all(map(_is_integer, numbers)) and isinstance(sampling.eos_ids, (set, frozenset))
        if not valid:
            raise RequestError(
                f"{sampling} cannot be served: max_tokens and seed are integers, temperature is a "
                "number below 1e9, eos_ids a set of tokens"
            )
        # Of tensors and arrays it is unclear whether they are empty.
        if not isinstance(prompt, Sequence) or not prompt or sampling.max_tokens < 1:
            raise RequestError(
                "a request has a prompt, a list of tokens, and asks for a token at least"
            )
        if len(prompt) + sampling.max_tokens > limit:
            raise RequestError(f"prompt and max_tokens exceed max_len, {limit}")
        for token in prompt:
            if not _is_integer(token) or not 0 <= token < vocab:
                raise RequestError(
                    f"a prompt has token {token!r}, and tokens are 0 to {vocab - 1}: encode it "
                    "with the tokenizer of this model"
                )
        return Request(list(prompt), len(prompt), sampling)

    @torch.no_grad()
    def step(self) -> None:
        """One batch. There must be a request that is not done."""
        scheduled = self.scheduler.schedule()
        proposals = self._propose([request for request, _ in scheduled if request.decodes])
        chunks, prompts = list[Chunk](), list[Chunk]()
        for request, count in scheduled:
            start = request.cached
            if request.decodes:
                ids = [request.tokens[-1], *proposals.get(request, ())]
            else:
                ids = request.tokens[start : start + count]
            chunk = Chunk(ids, start, request.pages)
            chunks.append(chunk)
            if not request.decodes:
                prompts.append(chunk)
        sampled = self._sample(scheduled, self.model.run(chunks))
        if self.draft is not None and prompts:
            # The draft's cache holds the same tokens as the model's, always.
            self.draft.run(prompts)
        for (request, count), tokens in zip(scheduled, sampled, strict=True):
            if request.decodes:
                tokens = accepted(proposals.get(request, []), tokens)
                self.proposed += self.config.draft_tokens
                self.accepted += len(tokens) - 1
                request.cached += len(tokens)
            else:
                request.cached += count
            for token in tokens:
                request.tokens.append(token)
                if request.done:
                    self.scheduler.finish(request)
                    break

    def _propose(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """The draft's next tokens of each request, greedily: one small graph for each token."""
        proposals: dict[Request, list[int]] = {request: [] for request in requests}
        if self.draft is None or not requests:
            return proposals
        ids = [request.tokens[-1] for request in requests]
        # One step more than there are proposals: it writes the last proposal to the draft's cache,
        # which otherwise would lack a token whenever the model accepts all of them.
        for ahead in range(self.config.query_len):
            hidden = self.draft.run(
                [
                    Chunk([token], request.cached + ahead, request.pages)
                    for token, request in zip(ids, requests, strict=True)
                ]
            )
            if ahead < self.config.draft_tokens:
                ids = self.draft.model.logits(hidden).argmax(-1).tolist()
                for request, token in zip(requests, ids, strict=True):
                    proposals[request].append(token)
        return proposals

    def _sample(self, scheduled: Sequence[tuple[Request, int]], hidden: Tensor) -> list[list[int]]:
        """For each request the token behind each of its rows; none where a prompt goes on."""
        rows, owners, counts, end = list[int](), list[tuple[Request, int]](), list[int](), 0
        for request, count in scheduled:
            end += count
            wanted = count if request.decodes else int(count == request.remaining)
            counts.append(wanted)
            for row in range(end - wanted, end):
                rows.append(row)
                owners.append((request, request.cached + count - (end - row)))
        if not rows:
            return [[] for _ in scheduled]
        logits = self.model.model.logits(hidden[torch.tensor(rows, device=hidden.device)])
        sampled = iter(sample(logits, owners))
        return [[next(sampled) for _ in range(wanted)] for wanted in counts]


def _is_integer(value: object) -> bool:
    # True is an int to Python, and would be token 1.
    return isinstance(value, Integral) and not isinstance(value, bool)


def sample(logits: Tensor, owners: Sequence[tuple[Request, int]]) -> list[int]:
    """A token for each row, whose owner is a request and the position of the row's own token.

    Random numbers depend on the seed and the position alone. So a request has the same tokens in
    any batch, with and without proposals. They are drawn on the host, one row after the other: a
    larger engine draws them on the device.
    """
    for row, (request, position) in enumerate(owners):
        if request.sampling.temperature > 0:
            seed = (request.sampling.seed * 1_000_003 + position) % 2**63
            generator = torch.Generator().manual_seed(seed)
            noise = torch.rand(logits.shape[1], generator=generator).log().neg().log().neg()
            # As logits / temperature + noise, which overflows next to 0.
            logits[row] += request.sampling.temperature * noise.to(logits.device)
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def accepted(proposals: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens up to the first one that was not proposed, which is right as well.

    Row i was computed with the proposals before it, so its token counts only if they were right.
    """
    for index, proposal in enumerate(proposals):
        if sampled[index] != proposal:
            return list(sampled[: index + 1])
    return list(sampled)
