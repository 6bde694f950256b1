"""`SdpaAttention` by itself and in graphs of the CPU platform, for both shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphrt
from graphrt import Batch, GraphRunner, InputSpec
from graphrt.attention import (
    AttentionShape,
    GroupedShape,
    LatentShape,
    SdpaAttention,
    bind_all,
    reference_attention,
    supports_of,
)
from graphrt.attention.prefill.query_tiles import LARGEST_TILE, QueryTiles
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.batch.context import forward_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport, GraphMode
from graphrt.core.dispatch.reasons import Reason
from tests.attention.problems import Problem, random_problem

GROUPED = GroupedShape(6, 2, 16, page_size=16)
LATENT = LatentShape(4, 32, 16, page_size=16, scale=0.2)
SHAPES = [GROUPED, LATENT]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COLUMNS = 6


def expected(problem: Problem) -> torch.Tensor:
    return reference_attention(problem.shape, problem.step, problem.query, *problem.caches)


def attended(problem: Problem, **options: int) -> torch.Tensor:
    backend, step = SdpaAttention(problem.shape, **options), problem.step
    begun = backend.begin(
        step.block_table,
        step.context_lens,
        query_len=step.query_len,
        query_start_loc=step.query_start_loc,
    )
    return backend.attend(begun, problem.query, *problem.caches, out=problem.out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_decode_equals_the_reference_attention(
    shape: AttentionShape, dtype: torch.dtype, query_len: int, table_dtype: torch.dtype
) -> None:
    lengths = [33, 0, 1, 16, 70, 0]
    problem = random_problem(shape, lengths, query_len, dtype=dtype, table_dtype=table_dtype)
    output = attended(problem)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected(problem), rtol=bound, atol=bound)
    assert not output.unflatten(0, (-1, query_len))[[1, 5]].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_cache_pages_of_no_request_are_not_read(shape: AttentionShape) -> None:
    # All slots of the pages in use are live, so that what is poisoned is in other pages only.
    problem = random_problem(shape, [32, 0, 48], 2, poison=True, spare_pages=5)
    torch.testing.assert_close(attended(problem).double(), expected(problem), rtol=1e-5, atol=1e-5)


def test_pages_beyond_max_context_are_left_out_of_a_step() -> None:
    problem = random_problem(GROUPED, [20, 5], 1, max_blocks=9)
    backend, step = SdpaAttention(GROUPED), problem.step
    begun = backend.begin(step.block_table, step.context_lens, query_len=1, max_context=20)
    assert begun.prepared.pages.shape == (2, 2)
    output = backend.attend(begun, problem.query, *problem.caches)
    torch.testing.assert_close(output, attended(problem))


def test_uniform_queries_longer_than_the_largest_tile_give_reference_results() -> None:
    query_len = LARGEST_TILE + 10
    problem = random_problem(GROUPED, [query_len + 3, 0, query_len], query_len)
    torch.testing.assert_close(attended(problem).double(), expected(problem), rtol=1e-5, atol=1e-5)


def test_the_chunk_size_does_not_change_decode_results() -> None:
    problem = random_problem(LATENT, [40, 3, 0, 17], 2)
    torch.testing.assert_close(attended(problem, chunk_bytes=1), attended(problem))


def test_a_query_with_more_tokens_than_its_requests_is_refused() -> None:
    problem = random_problem(GROUPED, [3, 3], 1)
    backend, step = SdpaAttention(GROUPED), problem.step
    with pytest.raises(InvalidInputError, match="4 tokens"):
        backend.run(step, problem.query.repeat(2, 1, 1), problem.caches, problem.out)


def test_ragged_tiles_are_prepared_once_where_the_context_gives_the_token_count() -> None:
    problem = random_problem(GROUPED, [9, 5], query_lens=[4, 1])
    backend, step = SdpaAttention(GROUPED), problem.step
    tables = step.block_table, step.context_lens
    assert backend.begin(*tables, query_start_loc=step.query_start_loc).prepared is None
    with forward_context(GraphMode.NONE, BatchDescriptor(5)):
        begun = backend.begin(*tables, query_start_loc=step.query_start_loc)
    assert isinstance(begun.prepared, QueryTiles) and begun.prepared.tokens == 5
    output = backend.attend(begun, problem.query, *problem.caches)
    torch.testing.assert_close(output, attended(problem))


def test_sdpa_attention_declares_support_for_every_batch() -> None:
    assert supports_of(SdpaAttention(GROUPED)) == {"graphrt-sdpa": AttentionSupport.ALWAYS}


@dataclass
class Host:
    """Two layers of attention, the second with queries that the first one's result moved."""

    shape: AttentionShape
    caches: list[torch.Tensor]

    def __post_init__(self) -> None:
        # Small chunks, so that a graph holds several.
        self.backend = SdpaAttention(self.shape, chunk_bytes=40_000)

    def __call__(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor:
        backend = self.backend
        step = backend.begin(block_table, context_lens, query_start_loc=query_start_loc)
        first = backend.attend(step, query * 1.5, *self.caches)
        moved = query + first.mean(-1, keepdim=True)
        return backend.attend(step, moved, *self.caches) + first

    def runner(self, mode: str, **options: Any) -> GraphRunner:
        shape = self.shape
        return GraphRunner(
            self,
            mode=mode,
            platform="cpu",
            inputs={
                "query": InputSpec(torch.float32, ("tokens", shape.num_heads, shape.query_dim)),
                "block_table": InputSpec(torch.int32, ("reqs", COLUMNS), pad=0, index=True),
                "context_lens": InputSpec(torch.int32, ("reqs",)),
                "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
            },
            outputs=("tokens", shape.num_heads, shape.value_dim),
            sizes=(2, 4, 8, 24),
            max_num_tokens=24,
            max_num_reqs=8,
            host=graphrt.Host(bind=bind_all(self.backend)),
            attention=supports_of(self.backend),
            **options,
        )

    def oracle(self, problem: Problem) -> torch.Tensor:
        query = problem.query.double()
        shape, step, caches = self.shape, problem.step, self.caches
        first = reference_attention(shape, step, query * 1.5, *caches)
        moved = query + first.mean(-1, keepdim=True)
        return reference_attention(shape, step, moved, *caches) + first


def steps(shape: AttentionShape, lists: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """Problems with these query lengths, each with contexts, pages and numbers of its own."""
    for seed, query_lens in enumerate(lists):
        random = torch.Generator().manual_seed(seed)
        past = torch.randint(0, 60, (len(query_lens),), generator=random).tolist()
        lengths = [query + more for query, more in zip(query_lens, past, strict=True)]
        yield random_problem(
            shape,
            lengths,
            query_lens=query_lens,
            seed=seed,
            max_blocks=COLUMNS,
            spare_pages=COLUMNS * 8 - sum(-(-length // shape.page_size) for length in lengths),
        )


def check_steps(
    host: Host, runner: GraphRunner, lists: Sequence[Sequence[int]], mode: GraphMode
) -> None:
    """Replays, equal to eager bit for bit and to the oracle but for rounding."""
    for problem, query_lens in zip(steps(host.shape, lists), lists, strict=True):
        for cache, values in zip(host.caches, problem.caches, strict=True):
            cache.copy_(values)
        assert problem.step.query_start_loc is not None
        output = runner.verify(
            Batch(sum(query_lens), len(query_lens), uniform_len(query_lens)),
            query=problem.query,
            block_table=problem.step.block_table,
            context_lens=problem.step.context_lens,
            query_start_loc=problem.step.query_start_loc,
        )
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.HIT
        assert runner.last_dispatch.mode is mode
        torch.testing.assert_close(output.double(), host.oracle(problem), rtol=2e-5, atol=2e-5)


def check_served(host: Host, runner: GraphRunner, lists: Sequence[Sequence[int]]) -> None:
    """Steps by graphs as a host makes them, equal to the oracle but for rounding."""
    for problem, query_lens in zip(steps(host.shape, lists), lists, strict=True):
        for cache, values in zip(host.caches, problem.caches, strict=True):
            cache.copy_(values)
        assert problem.step.query_start_loc is not None
        output = runner(
            Batch(sum(query_lens), len(query_lens), uniform_len(query_lens)),
            query=problem.query,
            block_table=problem.step.block_table,
            context_lens=problem.step.context_lens,
            query_start_loc=problem.step.query_start_loc,
        )
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.HIT
        torch.testing.assert_close(output.double(), host.oracle(problem), rtol=2e-5, atol=2e-5)


def uniform_len(query_lens: Sequence[int]) -> int | None:
    return query_lens[0] if len(set(query_lens)) == 1 else None


def new_host(shape: AttentionShape) -> Host:
    pages = 1 + COLUMNS * 8
    return Host(shape, [torch.zeros(pages, *kind) for kind in shape.cache_shapes])


DECODE = [[1] * 3, [1] * 8, [1], [1] * 5]
SPECULATIVE = [[3] * 2, [3] * 7, [3]]
MIXED = [[7, 1, 1], [1, 12, 4, 1, 1], [24], [2, 1], [3, 3, 2, 5, 1, 1, 1, 2]]


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_steps_in_full_graphs_equal_eager(shape: AttentionShape) -> None:
    host = new_host(shape)
    with host.runner("FULL_DECODE_ONLY") as runner:
        runner.capture()
        check_steps(host, runner, DECODE, GraphMode.FULL)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_of_several_tokens_in_full_graphs_equal_eager(shape: AttentionShape) -> None:
    host = new_host(shape)
    with host.runner("FULL_DECODE_ONLY", query_lens=(3,)) as runner:
        runner.capture()
        check_steps(host, runner, SPECULATIVE, GraphMode.FULL)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", [GraphMode.PIECEWISE, GraphMode.FULL])
def test_mixed_batches_in_graphs_equal_eager(shape: AttentionShape, mode: GraphMode) -> None:
    host = new_host(shape)
    with host.runner(mode.name) as runner:
        assert runner.mode is mode
        runner.capture()
        check_steps(host, runner, MIXED, mode)


def test_alternating_decode_and_mixed_batches_equal_eager() -> None:
    host = new_host(GROUPED)
    with host.runner("FULL_AND_PIECEWISE") as runner:
        runner.capture()
        for decode, mixed in zip(DECODE, MIXED, strict=False):
            check_steps(host, runner, [decode], GraphMode.FULL)
            check_steps(host, runner, [mixed], GraphMode.PIECEWISE)


@pytest.mark.parametrize("check", ["capture", "always"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
def test_uniform_and_mixed_batches_in_turn_keep_every_piecewise_graph(
    mode: str, check: str
) -> None:
    host = new_host(GROUPED)
    options = graphrt.GraphOptions(check=check)
    with host.runner(mode, options=options) as runner:
        runner.capture()
        before = dict(vars(host.backend))
        for lists in ([[3, 2], [3], [5, 1], [3], [5], [4, 4], [2, 1], [6]], [[7, 1], [7]]):
            check_served(host, runner, lists)
        assert {each.status for each in runner.report().trust.trials} == {"tried", "untried"}
        # A trial asks what a model does when its state has moved on.
        assert vars(host.backend) == before


def test_a_batch_of_padding_rows_only_gives_zeros_in_a_graph() -> None:
    host = new_host(GROUPED)
    with host.runner("FULL_DECODE_ONLY") as runner:
        runner.capture()
        for cache in host.caches:
            cache.fill_(3.0)
        output = runner(
            Batch(3, 3, 1),
            query=torch.randn(3, GROUPED.num_heads, GROUPED.head_dim),
            block_table=torch.zeros(3, COLUMNS, dtype=torch.int32),
            context_lens=torch.zeros(3, dtype=torch.int32),
            query_start_loc=torch.arange(4, dtype=torch.int32),
        )
        assert not output.any()
