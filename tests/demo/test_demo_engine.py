"""The scheduler: everything finishes, mixed batches happen, pages come back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from graphrt import Dispatch, GraphMode, Reason
from graphrt.core.base.errors import InvalidBatchError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.demo import Engine, EngineLimits, OutOfPagesError

VOCAB = 50


class CheckingRunner:
    """Samples the last token + 1, and checks each batch against what the cache has seen."""

    def __init__(self, limits):
        self.limits = limits
        self.slots = {}
        self.batches = []

    def __call__(self, batch, *, input_ids, positions, slot_mapping, block_table, query_start_loc):
        starts = query_start_loc.tolist()
        assert starts[0] == 0 and starts[-1] == batch.num_tokens == len(input_ids)
        assert batch.num_tokens <= self.limits.max_num_tokens
        assert batch.num_reqs == len(block_table) <= self.limits.max_num_reqs
        counts = [end - start for start, end in pairwise(starts)]
        assert min(counts) >= 1
        assert batch.query_len == (counts[0] if len(set(counts)) == 1 else None)
        assert len(set(slot_mapping.tolist())) == batch.num_tokens
        owners = [set(row.tolist()) - {0} for row in block_table]
        assert sum(map(len, owners)) == len(set().union(*owners))
        for row, (start, end) in enumerate(pairwise(starts)):
            for at in range(start, end):
                position, size = int(positions[at]), self.limits.page_size
                page = int(block_table[row, position // size])
                assert page != 0
                assert int(slot_mapping[at]) == page * size + position % size
        self.batches.append(counts)
        self.last_dispatch = Dispatch(
            GraphMode.NONE, BatchDescriptor(batch.num_tokens), Reason.MODE_NONE
        )
        logits = torch.zeros(batch.num_reqs, VOCAB)
        last = input_ids[query_start_loc[1:].long() - 1]
        logits[range(batch.num_reqs), (last + 1) % VOCAB] = 1
        return logits


def finish(engine, limit=2000):
    while engine.waiting or engine.running:
        engine.step()
        limit -= 1
        assert limit, "the engine does not come to an end"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_load_generates_right_tokens_and_frees_all_pages(seed):
    rng = random.Random(seed)
    limits = EngineLimits(
        max_num_reqs=rng.randint(1, 6),
        max_num_tokens=rng.randint(6, 24),
        context=rng.choice([32, 40]),
        page_size=rng.choice([4, 7, 16]),
        num_pages=rng.randint(12, 30),
    )
    runner = CheckingRunner(limits)
    engine = Engine(runner, limits)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, limits.context - 1))]
        for _ in range(rng.randint(1, 12))
    ]
    requests = [engine.submit(prompt, rng.randint(1, 12)) for prompt in prompts]
    finish(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        count = request.max_len - len(prompt)
        assert request.generated == [(prompt[-1] + 1 + i) % VOCAB for i in range(count)]
    assert sorted(engine.free_pages) == list(range(1, limits.num_pages))
    assert sum(step.num_tokens for step in engine.steps) == sum(r.computed for r in requests)


def test_mixed_batches_take_decode_tokens_first_and_chunk_long_prompts():
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=8, context=64, page_size=8, num_pages=33)
    runner = CheckingRunner(limits)
    engine = Engine(runner, limits)
    for length in (2, 20, 3):
        engine.submit(list(range(length)), 10)
    finish(engine)
    assert runner.batches[:4] == [[2, 6], [1, 7], [1, 7], [1, 1, 3]]
    assert any(len(set(counts)) > 1 for counts in runner.batches)


def test_an_eos_token_ends_a_request():
    limits = EngineLimits()
    engine = Engine(CheckingRunner(limits), limits, eos_ids={7})
    request = engine.submit([3], 30)
    finish(engine)
    assert request.generated == [4, 5, 6, 7]


def test_a_request_ends_when_the_context_is_full():
    limits = EngineLimits(context=16)
    engine = Engine(CheckingRunner(limits), limits)
    request = engine.submit([0] * 15, 30)
    finish(engine)
    assert len(request.tokens) == 16


def test_a_request_without_free_pages_waits_and_then_finishes():
    limits = EngineLimits(max_num_reqs=4, context=32, page_size=16, num_pages=3)
    engine = Engine(CheckingRunner(limits), limits)
    requests = [engine.submit([1] * 20, 5) for _ in range(3)]
    engine.step()
    assert len(engine.running) == 1 and len(engine.waiting) == 2
    finish(engine)
    assert all(len(request.generated) == 5 for request in requests)


@pytest.mark.parametrize(("prompt", "new"), [([], 1), ([1] * 256, 1), ([1] * 300, 1), ([1], 0)])
def test_a_prompt_that_cannot_fit_the_context_is_refused(prompt, new):
    limits = EngineLimits()
    with pytest.raises(InvalidBatchError, match=f"{len(prompt)} prompt tokens"):
        Engine(CheckingRunner(limits), limits).submit(prompt, new)


def test_a_request_that_cannot_fit_the_cache_is_refused():
    limits = EngineLimits(num_pages=3)
    engine = Engine(CheckingRunner(limits), limits)
    engine.submit([1] * 20, 12)
    with pytest.raises(OutOfPagesError, match="at most 2"):
        engine.submit([1] * 20, 13)


def test_the_engine_keeps_logits_only_if_asked():
    limits = EngineLimits()
    for keep in (False, True):
        engine = Engine(CheckingRunner(limits), limits, keep_logits=keep)
        engine.submit([1, 2], 2)
        finish(engine)
        assert [step.logits is not None for step in engine.steps] == [keep, keep]
