"""The random steps of a long run."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from graphrt import Batch
from tests.long.models import ADAPTERS, LIMITS, NO_ADAPTER, QUERY_LENS
from tests.models.served import Span, paged_step


class Traffic:
    """Random steps of up to eight requests whose contexts grow until they are full."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths = [0] * LIMITS.max_num_reqs

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.random.random() < share

    def step(self) -> tuple[Batch, dict[str, Tensor]]:
        """A batch and its inputs, on the host."""
        number = self.random
        requests = number.sample(range(LIMITS.max_num_reqs), number.randint(1, 8))
        if self.chance(0.6):
            counts = [number.choice((*QUERY_LENS, 3))] * len(requests)
        else:
            counts = [number.randint(1, 6) for _ in requests]
        spans: list[Span] = []
        for request, count in zip(requests, counts, strict=True):
            if sum(span[2] for span in spans) + count > LIMITS.max_num_tokens:
                break
            if self._lengths[request] + count > LIMITS.context:
                self._lengths[request] = 0
            spans.append((request, self._lengths[request], count))
            self._lengths[request] += count
        batch, inputs = paged_step(spans, LIMITS, self._generator)
        active = number.choice((0, 0, 1, 2))
        first = number.randrange(NO_ADAPTER + 1, ADAPTERS - 1)
        numbers = [NO_ADAPTER, *range(first, first + active)]
        adapters = [number.choice(numbers) for _ in spans]
        inputs["adapters"] = torch.tensor(adapters)
        return batch._replace(num_active_loras=active), inputs
