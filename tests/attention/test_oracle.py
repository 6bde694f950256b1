"""The oracle against what attention is without pages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphrt.attention import GroupedShape, LatentShape, reference_attention
from tests.attention.problems import GARBAGE, Problem, random_problem

GROUPED = GroupedShape(6, 2, 8, page_size=4)
LATENT = LatentShape(6, 8, 4, page_size=4, scale=0.3)


def expected(problem: Problem) -> torch.Tensor:
    return reference_attention(problem.shape, problem.step, problem.query, *problem.caches)


def unpaged(problem: Problem, request: int, cache: int) -> torch.Tensor:
    length = int(problem.step.context_lens[request])
    pages = problem.step.block_table[request].tolist()
    rows = [problem.caches[cache][page] for page in pages]
    return torch.cat(rows)[:length].double()


def test_reference_prefill_is_causal_attention_over_its_own_keys() -> None:
    problem = random_problem(GROUPED, [7], 7)
    query = problem.query.double().transpose(0, 1)
    keys, values = (unpaged(problem, 0, cache).transpose(0, 1) for cache in (0, 1))
    plain = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(expected(problem), plain.transpose(0, 1))


def test_reference_decode_of_latents_is_attention_with_a_single_key_head() -> None:
    problem = random_problem(LATENT, [5, 9], 1)
    for request, row in enumerate(expected(problem)):
        latents = unpaged(problem, request, 0)
        scores = problem.query[request].double() @ latents.T * LATENT.scale
        torch.testing.assert_close(row, scores.softmax(-1) @ latents[:, : LATENT.rank])


@pytest.mark.parametrize("shape", [GROUPED, LATENT])
def test_reference_attention_of_a_ragged_batch_equals_its_requests_alone(
    shape: GroupedShape | LatentShape,
) -> None:
    lengths, query_lens = [9, 3, 0, 12], [4, 3, 0, 1]
    together = random_problem(shape, lengths, query_lens=query_lens, padding_tokens=2)
    output = expected(together)
    assert not output[-2:].any()
    table, start = together.step.block_table, 0
    for request, (length, query_len) in enumerate(zip(lengths, query_lens, strict=True)):
        alone = random_problem(shape, [length], query_len, max_blocks=table.shape[1])
        alone.step.block_table.copy_(table[request : request + 1])
        query = together.query[start : start + query_len]
        one = reference_attention(shape, alone.step, query, *together.caches)
        torch.testing.assert_close(output[start : start + query_len], one)
        start += query_len


def test_tokens_without_visible_keys_have_zero_output() -> None:
    output = expected(random_problem(GROUPED, [0, 2, 5], 4, poison=True))
    assert not output[:4].any() and not output[4:6].any()
    assert output[6:].flatten(1).any(1).all()


def test_poison_fills_all_invisible_cache_slots_except_the_dummy_page() -> None:
    problem = random_problem(GROUPED, [6, 0, 4], 1, spare_pages=2, max_blocks=5, poison=True)
    keys, table = problem.caches[0], problem.step.block_table
    assert keys.shape[0] == 1 + 2 + 0 + 1 + 2
    assert (keys[0] == GARBAGE).all()
    assert table[0, 2:].tolist() == [0, 0, 0] and not table[1].any()
    assert keys[table[0, 1], :2].isfinite().all() and keys[table[0, 1], 2:].isnan().all()
    pages = table[table > 0].tolist()
    assert len(set(pages)) == len(pages) == 3
    spare = set(range(1, 6)) - set(pages)
    assert keys[sorted(spare)].isnan().all()
    assert expected(problem).isfinite().all()


def test_poison_does_not_change_the_reference_output() -> None:
    plain, poisoned = (random_problem(LATENT, [6, 3], 2, seed=4, poison=p) for p in (False, True))
    assert torch.equal(expected(plain), expected(poisoned))
