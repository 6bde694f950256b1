"""Attention of ragged batches by PyTorch's operators, and the tiles that it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.attention import AttentionShape, GroupedShape, LatentShape, reference_attention
from graphrt.attention.prefill import varlen
from graphrt.attention.prefill.query_tiles import QueryTiles, tile_size, tiles_of
from graphrt.attention.prefill.varlen import varlen_attention
from tests.attention.problems import Problem, random_problem

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attended(problem: Problem, **options: Any) -> torch.Tensor:
    out = problem.out
    varlen_attention(problem.shape, problem.step, problem.query, problem.caches, out, **options)
    return out


def check(problem: Problem, **options: Any) -> None:
    expected = reference_attention(problem.shape, problem.step, problem.query, *problem.caches)
    output = attended(problem, **options).double()
    bound = TOLERANCE[problem.query.dtype]
    torch.testing.assert_close(output, expected, rtol=bound, atol=bound)


@st.composite
def shapes(draw: Any) -> AttentionShape:
    page_size = draw(st.sampled_from([16, 32, 64, 128]))
    if draw(st.booleans()):
        kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
        return GroupedShape(kv_heads * group, kv_heads, draw(st.sampled_from([8, 32])), page_size)
    return LatentShape(draw(st.sampled_from([1, 4])), 32, 16, page_size, scale=0.2)


@st.composite
def ragged(draw: Any) -> tuple[list[int], list[int]]:
    """Context lengths and query lengths, padding requests among them."""
    one = st.tuples(st.integers(0, 150), st.integers(0, 40))
    pairs = draw(st.lists(st.one_of(one, st.just((0, 0))), min_size=1, max_size=7))
    if not any(query for _, query in pairs):
        pairs[0] = (5, 1)
    return [context for context, _ in pairs], [query for _, query in pairs]


@given(shapes(), ragged(), st.sampled_from(list(TOLERANCE)), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=120)
def test_ragged_batches_equal_the_reference_attention(
    shape: AttentionShape,
    lengths: tuple[list[int], list[int]],
    dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    contexts, queries = lengths
    problem = random_problem(
        shape, contexts, query_lens=queries, dtype=dtype, seed=seed, padding_tokens=padding
    )
    check(problem)


@given(shapes(), st.lists(st.integers(0, 130), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=60)
def test_uniform_batches_equal_the_reference_attention(
    shape: AttentionShape, contexts: list[int], query_len: int
) -> None:
    check(random_problem(shape, contexts, query_len))


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 10**9])
@pytest.mark.parametrize("queries", [[70, 1, 1, 0, 33], [1, 1, 1, 1, 1]])
def test_the_chunk_size_does_not_change_prefill_results(
    queries: list[int], chunk_bytes: int
) -> None:
    shape = GroupedShape(4, 2, 16, page_size=16)
    problem = random_problem(shape, [90, 33, 2, 0, 64], query_lens=queries)
    torch.testing.assert_close(attended(problem, chunk_bytes=chunk_bytes), attended(problem))


def test_a_long_prefill_never_holds_all_keys_of_all_tokens() -> None:
    shape = GroupedShape(8, 2, 32, page_size=16)
    problem = random_problem(shape, [2048], query_lens=[2048])
    limit = 4 * 2**20
    # A mode would not see what the fused kernel allocates inside, but that is no gathered key.
    with LargestTensor() as seen:
        attended(problem, chunk_bytes=limit)
    tiles = tiles_of(shape, problem.step, 2048)
    one_tile = 2048 * (2 * 2 * 32 * 4 + tiles.size * 4 * 5)
    assert seen.bytes <= max(limit, one_tile)
    assert seen.bytes < 2048 * 2048 * 2 * 32 * 4 / 20


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the bytes of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.integers(0, 5),
    st.sampled_from([GroupedShape(32, 8, 128, 16), LatentShape(16, 512, 64, 16, 0.1)]),
)
def test_every_token_has_a_tile_slot_that_sees_exactly_its_past(
    queries: list[int], padding: int, shape: AttentionShape
) -> None:
    if not sum(queries) + padding:
        padding = 1
    contexts = [query + index for index, query in enumerate(queries)]
    small = GroupedShape(1, 1, 1, 16)
    problem = random_problem(small, contexts, query_lens=queries, padding_tokens=padding)
    tokens = len(problem.query)
    tiles = tiles_of(shape, problem.step, tokens)
    assert isinstance(tiles.token, torch.Tensor) and isinstance(tiles.slot, torch.Tensor)
    assert len(tiles.token) == len(tiles.pages) * tiles.size
    visible, token = tiles.visible.flatten(), 0
    for context, query in zip(contexts, queries, strict=True):
        for place in range(query):
            slot = int(tiles.slot[token])
            assert tiles.token[slot] == token
            assert visible[slot] == context - query + place + 1
            assert not tiles.dead[token]
            token += 1
    assert tiles.dead[token:].all()
    assert (visible > 0).sum() == sum(queries)


def test_tiles_are_single_tokens_for_decode_and_large_for_prefill() -> None:
    shape = GroupedShape(32, 8, 128, 16)
    assert tile_size(shape, 64, 64) == 1
    assert tile_size(shape, 2048, 1) == 256
    assert 16 <= tile_size(shape, 519, 8) <= 128


def test_prepared_tiles_of_a_step_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(GroupedShape(2, 1, 8, 16), [20, 3], query_lens=[5, 1])
    tiles = tiles_of(problem.shape, problem.step, 6)
    expected, out = attended(problem), problem.out
    monkeypatch.setattr(varlen, "tiles_of", None)
    step = replace(problem.step, prepared=tiles)
    varlen_attention(problem.shape, step, problem.query, problem.caches, out)
    assert torch.equal(out, expected)


def test_tiles_for_another_number_of_tokens_are_not_used() -> None:
    problem = random_problem(GroupedShape(2, 1, 8, 16), [20, 3], query_lens=[5, 1])
    wrong: QueryTiles = tiles_of(problem.shape, problem.step, 9)
    step = replace(problem.step, prepared=wrong)
    out = problem.out
    varlen_attention(problem.shape, step, problem.query, problem.caches, out)
    assert torch.equal(out, attended(problem))


def test_queries_that_are_part_of_a_larger_tensor_are_read_in_place() -> None:
    shape = GroupedShape(4, 2, 8, 16)
    problem = random_problem(shape, [20, 3, 17], query_lens=[5, 1, 4])
    wide = torch.cat([problem.query, problem.query], dim=1)[:, :4]
    assert not wide.is_contiguous()
    expected, out = attended(problem), problem.out
    varlen_attention(shape, problem.step, wide, problem.caches, out)
    assert torch.equal(out, expected)
