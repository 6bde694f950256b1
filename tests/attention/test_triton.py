"""The Triton kernels against the oracle: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from graphrt import Host

pytest.importorskip("triton", reason="the kernels are written in Triton")

from graphrt import AttentionSupport, Batch, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.attention import (
    AttentionShape,
    GroupedShape,
    LatentShape,
    TritonAttention,
    bind_all,
    reference_attention,
    supports_of,
)
from graphrt.attention.triton import backend as backend_module
from graphrt.attention.triton.launch import schedule
from graphrt.attention.triton.work import UNIT, Room, scheduled_splits
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.core.batch.context import forward_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from tests.attention.problems import Problem, random_problem
from tests.draws import rest_long

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Everywhere else they are ordinary tests.
pytestmark = [pytest.mark.cuda] if ON_GPU else []

LONG, ROOM = (600, 640) if ON_GPU else (150, 192)
"""Tokens of a long context, of several spans, and of the room for it: interpreters are slow."""
BLOCKS = ROOM // 16
"""Of the smallest page."""

CHECKS = None if ON_GPU else GraphOptions(check="off", warmups=0)
"""The interpreter is spared warm-ups and trials: these tests compare each step themselves."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SHAPES = [
    GroupedShape(8, 2, 64, page_size=16),
    GroupedShape(4, 4, 40, page_size=64),
    GroupedShape(5, 1, 32, page_size=128),
    LatentShape(4, 64, 16, page_size=32, scale=0.1),
    LatentShape(6, 48, 16, page_size=128, scale=0.2),
]

SMALL = SHAPES[0] if ON_GPU else GroupedShape(4, 1, 32, page_size=16)
"""Where graphs and plans are tested, and not what kernels compute: one head is interpreted."""


def sampled(kept: set[int], cases: Iterable[Any]) -> list[Any]:
    """All cases on a GPU; in the interpreter the rest of those `kept` are for `-m long`."""
    return [
        each if ON_GPU or at in kept else pytest.param(*each, marks=pytest.mark.long)
        for at, each in enumerate(cases)
    ]


def relative_error(problem: Problem, actual: torch.Tensor) -> float:
    """Largest difference from float64, in units of the largest value."""
    exact = reference_attention(problem.shape, problem.step, problem.query, *problem.caches)
    return float((actual.double().cpu() - exact.cpu()).abs().max() / exact.abs().max())


def attended(problem: Problem, splits: Any) -> torch.Tensor:
    step = problem.step
    reqs, query_len = len(step.context_lens), step.query_len
    assert query_len is not None
    backend = TritonAttention(
        problem.shape,
        max_num_reqs=reqs,
        max_query_len=query_len,
        splits=splits,
        max_context=step.max_context,
        dtype=problem.query.dtype,
        device=DEVICE,
    )
    # What an earlier step left there must not show.
    for leftover in (backend._workspace.partial, backend._workspace.sums):
        leftover.fill_(float("nan"))
    descriptor = BatchDescriptor(reqs * query_len, reqs, uniform=True, query_len=query_len)
    with forward_context(GraphMode.NONE, descriptor):
        begun = backend.begin(step.block_table, step.context_lens)
        return backend.attend(begun, problem.query, *problem.caches, out=problem.out)


# Each shape once, each dtype and length with several shapes.
@pytest.mark.parametrize(
    ("shape", "dtype", "query_len"),
    sampled({0, 9, 14, 19, 28}, product(SHAPES, TOLERANCE, (1, 3))),
    ids=str,
)
def test_decode_is_within_tolerance_of_float64(
    shape: AttentionShape, dtype: torch.dtype, query_len: int
) -> None:
    lengths = [33, 0, LONG, 4, 2]
    problem = random_problem(
        shape, lengths, query_len, dtype=dtype, device=DEVICE, poison=True, seed=query_len
    )
    assert relative_error(problem, attended(problem, "device")) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("shape", "splits"), sampled({0, 3}, product(SHAPES, ("fixed",))), ids=str)
def test_decode_is_within_tolerance_for_fixed_splits(shape: AttentionShape, splits: str) -> None:
    problem = random_problem(shape, [65, 0, LONG, 128], 2, device=DEVICE, poison=True)
    assert relative_error(problem, attended(problem, splits)) <= TOLERANCE[torch.float32]


def test_rows_of_empty_requests_and_of_tokens_before_the_first_key_are_zero() -> None:
    problem = random_problem(SHAPES[0], [0, 2, LONG], 4, device=DEVICE, poison=True)
    output = attended(problem, "device").unflatten(0, (3, 4))
    assert not output[0].any() and not output[1, :2].any()
    assert output[1, 2:].any() and output[2].any()


@pytest.mark.parametrize("seed", range(40 if ON_GPU else 4))
def test_random_problems_are_within_tolerance(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=random))]

    page_size, dtype = pick(16, 32, 64, 128), pick(*TOLERANCE)
    if pick(True, False):
        kv_heads = pick(1, 2, 3)
        shape: AttentionShape = GroupedShape(
            kv_heads * pick(1, 3, 8), kv_heads, pick(16, 32, 80, 128), page_size
        )
    else:
        shape = LatentShape(pick(1, 5, 16), pick(32, 96, 128), pick(16, 32), page_size, 0.1)
    longest = 5000 if ON_GPU else 300
    lengths = [
        pick(0, 1, int(torch.randint(1, longest, (), generator=random)))
        for _ in range(pick(1, 2, 7))
    ] + [17]
    problem = random_problem(
        shape, lengths, pick(1, 2, 4), dtype=dtype, device=DEVICE, poison=True, seed=seed
    )
    output = attended(problem, pick("device", "fixed"))
    assert relative_error(problem, output) <= TOLERANCE[dtype]


@pytest.mark.parametrize("lengths", [[5], [0, 0], [1, 64, 65, 4096], [100_000, 1, 1, 1], [900] * 9])
@pytest.mark.parametrize("wave", [0.25, 4, 132])
def test_a_schedule_of_splits_covers_every_request_within_its_limit(
    lengths: list[int], wave: float
) -> None:
    reqs, room = len(lengths), Room(wave, 132, merge_tokens=20)
    splits = scheduled_splits(reqs, room, max(lengths))
    written = torch.full((1 + reqs + splits.num_splits,), -7, dtype=torch.int32, device=DEVICE)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    schedule(tensor, written, room, max(lengths))
    chunk, *rest = written.tolist()
    first, owners = rest[:reqs], rest[reqs:]
    used = [owner for owner in owners if owner >= 0]
    assert owners == used + [-1] * (len(owners) - len(used))
    assert chunk % UNIT == 0 and set(used) == set(range(reqs))
    assert [owner for i, owner in enumerate(used) if owner not in used[:i]] == sorted(
        range(reqs), key=lambda request: first[request]
    )
    # The longest spans come first.
    spans = [-(-lengths[owner] // used.count(owner)) for owner in used]
    assert all(a + UNIT > b for a, b in pairwise(spans))
    for request, length in enumerate(lengths):
        count = used.count(request)
        assert used.index(request) == first[request]
        assert count == 1 or count <= -(-length // UNIT)
        assert count * max(chunk, 2 * UNIT) >= length


def test_the_number_of_splits_is_bounded_by_processors_and_requests() -> None:
    assert Room(132, 132, 50).limit(1) == 4 * 132
    assert Room(33, 132, 8).limit(16) == 8 * 33
    assert Room(33, 132, 8).limit(300) == 600


def test_triton_attention_declares_support_for_uniform_batches() -> None:
    backend = TritonAttention(SHAPES[0], max_num_reqs=2, device=DEVICE)
    assert backend.get_cudagraph_support() is AttentionSupport.UNIFORM_BATCH
    assert supports_of(backend) == {"graphrt-triton": AttentionSupport.UNIFORM_BATCH}


def test_a_batch_of_more_requests_than_max_num_reqs_is_refused() -> None:
    backend = TritonAttention(SHAPES[0], max_num_reqs=2, device=DEVICE)
    problem = random_problem(SHAPES[0], [4, 4, 4], 1, device=DEVICE)
    with pytest.raises(InvalidInputError, match="max_num_reqs"):
        backend.begin(problem.step.block_table, problem.step.context_lens, query_len=1)


def test_splits_by_the_host_are_refused_with_the_policies_there_are() -> None:
    wrong: Any = "task"
    with pytest.raises(InvalidOptionError, match=r"(?s)splits.*expected: device or fixed"):
        TritonAttention(SHAPES[0], max_num_reqs=2, splits=wrong, device=DEVICE)


def _runner(
    backend: TritonAttention,
    caches: tuple[torch.Tensor, ...],
    mode: str = "FULL_AND_PIECEWISE",
    forward: Any = None,
    bounds: Any = ((),),
    options: GraphOptions | None = None,
    sizes: Sequence[int] = (2, 4, 8),
    layers: int = 2,
) -> GraphRunner:
    def attending(
        query: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor:
        step = backend.begin(block_table, context_lens, query_start_loc=query_start_loc)
        out = backend.attend(step, query, *caches)
        for _ in range(layers - 1):
            out = backend.attend(step, query + out.sum() * 1e-3, *caches)
        return out

    shape = backend.shape
    return GraphRunner(
        forward or attending,
        mode=mode,
        sizes=sizes,
        max_num_reqs=4,
        max_num_tokens=8,
        query_lens=tuple(range(1, backend.max_query_len + 1)),
        bounds=bounds,
        options=options or CHECKS,
        platform="cuda" if ON_GPU else "cpu",
        inputs={
            "query": InputSpec(torch.float32, ("tokens", shape.num_heads, shape.query_dim)),
            "block_table": InputSpec(torch.int32, ("reqs", BLOCKS), pad=0, index=True),
            "context_lens": InputSpec(torch.int32, ("reqs",), pad=0),
            "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
        },
        outputs=("tokens", shape.num_heads, shape.value_dim),
        attention=supports_of(backend),
        host=Host(bind=bind_all(backend)),
    )


@pytest.mark.parametrize(
    ("shape", "splits"),
    sampled(
        {3},
        product([GroupedShape(4, 2, 16, 16), LatentShape(2, 32, 16, 16, 0.1)], ["device", "fixed"]),
    ),
    ids=str,
)
def test_graphs_equal_eager_for_uniform_and_mixed_batches(
    shape: AttentionShape, splits: Any
) -> None:
    backend = TritonAttention(
        shape,
        max_num_reqs=4,
        max_query_len=2,
        splits=splits,
        max_context=ROOM,
        dtype=torch.float32,
        device=DEVICE,
    )
    base = random_problem(shape, [LONG] * 3, 1, device=DEVICE)
    # A layer more and other sizes repeat these kernels: seconds where they are interpreted.
    sizes, layers = ((2, 4, 8), 2) if ON_GPU else ((2, 8), 1)
    runner = _runner(backend, base.caches, sizes=sizes, layers=layers)
    runner.capture()
    steps = [
        ([5, LONG], [1, 1]),
        ([LONG - 10, 3, 7], [2, 2, 2]),
        ([40, 9], [5, 1]),
        ([1], [1]),
        ([LONG], [2]),
    ]
    # The last ones take kernels that the first ones took: seconds where these are interpreted.
    steps, modes = steps if ON_GPU else steps[:3], []
    for seed, (lengths, query_lens) in enumerate(steps):
        problem = random_problem(
            shape, lengths, query_lens=query_lens, max_blocks=BLOCKS, device=DEVICE, seed=seed
        )
        uniform = query_lens[0] if len(set(query_lens)) == 1 else None
        batch = Batch(sum(query_lens), len(lengths), query_len=uniform)
        table = problem.step.block_table % len(base.caches[0])
        inputs = {
            "query": problem.query,
            "block_table": table,
            "context_lens": problem.step.context_lens,
            "query_start_loc": problem.step.query_start_loc,
        }
        output = runner.verify(batch, **inputs)
        assert output.shape[0] == batch.num_tokens and output.any()
        modes.append(runner.last_dispatch.mode if runner.last_dispatch else None)
    assert (
        modes
        == [
            GraphMode.FULL,
            GraphMode.FULL,
            GraphMode.PIECEWISE,
            GraphMode.FULL,
            GraphMode.FULL,
        ][: len(steps)]
    )


def test_uniform_piecewise_batches_use_decode_kernels_and_plan_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TritonAttention(
        SMALL, max_num_reqs=4, max_query_len=2, dtype=torch.float32, device=DEVICE
    )
    problem = random_problem(SMALL, [LONG, 64], 1, max_blocks=BLOCKS, device=DEVICE)
    unchecked = GraphOptions(check="off")
    runner = _runner(backend, problem.caches, mode="PIECEWISE", options=unchecked, sizes=[2])
    runner.capture()
    ran, begun = [], []
    run, begin = TritonAttention.run, TritonAttention.begin

    def spy_run(self: Any, step: Any, *args: Any) -> None:
        ran.append((step.query_len, len(step.context_lens)))
        run(self, step, *args)

    def spy_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append(1)
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(TritonAttention, "run", spy_run)
    monkeypatch.setattr(TritonAttention, "begin", spy_begin)
    inputs = {
        "block_table": problem.step.block_table,
        "context_lens": problem.step.context_lens,
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
    }
    runner(Batch(2, 2, query_len=1), query=problem.query, **inputs)
    assert runner.last_dispatch is not None and runner.last_dispatch.mode is GraphMode.PIECEWISE
    assert ran == [(1, 2), (1, 2)] and len(begun) == 1
    runner(Batch(2, 2), query=problem.query, **inputs)
    assert [query_len for query_len, _ in ran[2:]] == [None, None]


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
def test_uniform_and_mixed_batches_in_turn_keep_every_piecewise_graph() -> None:
    backend = TritonAttention(
        SMALL, max_num_reqs=4, max_query_len=2, dtype=torch.float32, device=DEVICE
    )
    problem = random_problem(SMALL, [LONG, 64, 30, 9], 1, max_blocks=BLOCKS, device=DEVICE)
    options = GraphOptions(warmups=1)
    runner = _runner(
        backend, problem.caches, "PIECEWISE", options=options, sizes=[4], layers=1 + ON_GPU
    )
    runner.capture()
    before = dict(vars(backend))
    steps = ([1, 1, 1], [2, 1], [2], [1, 2], [1, 1], [2, 2])
    for query_lens in steps if ON_GPU else steps[:3]:
        reqs, tokens = len(query_lens), sum(query_lens)
        same = query_lens[0] if len(set(query_lens)) == 1 else None
        query = torch.randn(tokens, SMALL.num_heads, SMALL.query_dim, device=DEVICE)
        runner(
            Batch(tokens, reqs, query_len=same),
            query=query,
            block_table=problem.step.block_table[:reqs],
            context_lens=problem.step.context_lens[:reqs],
            query_start_loc=torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(),
        )
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
    assert {each.status for each in runner.report().trust.trials} <= {"tried", "untried"}
    assert vars(backend) == before


def test_a_query_with_scattered_rows_or_another_dtype_is_refused() -> None:
    problem = random_problem(SHAPES[0], [40, 3], 1, device=DEVICE)
    backend = TritonAttention(SHAPES[0], max_num_reqs=2, dtype=torch.float32, device=DEVICE)
    step = backend.begin(problem.step.block_table, problem.step.context_lens, query_len=1)
    scattered = problem.query.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(InvalidInputError, match="last stride of 1"):
        backend.attend(step, scattered, *problem.caches)
    with pytest.raises(InvalidInputError, match="different dtypes"):
        backend.attend(step, problem.query.half(), *problem.caches)


def _two_steps(forward_of: Any, mode: str, lengths: list[int]) -> tuple[Any, Any]:
    """What a forward with two steps in it gives by a graph, and the problem that it solved."""
    backend = TritonAttention(SMALL, max_num_reqs=4, dtype=torch.float32, device=DEVICE)
    problem = random_problem(SMALL, lengths, 1, max_blocks=BLOCKS, device=DEVICE)
    forward = forward_of(backend, problem.caches)
    runner = _runner(backend, problem.caches, mode=mode, forward=forward, sizes=[2])
    runner.capture()
    step = problem.step
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    output = runner(
        Batch(len(lengths), len(lengths), query_len=1),
        query=problem.query,
        block_table=step.block_table,
        context_lens=step.context_lens,
        query_start_loc=starts,
    )
    return output.clone(), problem


MODES = rest_long(["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"], "FULL_AND_PIECEWISE")


@pytest.mark.parametrize("mode", MODES)
def test_two_attention_steps_in_a_forward_keep_their_own_plans(mode: str) -> None:
    def interleaved(backend: TritonAttention, caches: tuple[torch.Tensor, ...]) -> Any:
        def forward(query: Any, block_table: Any, context_lens: Any, query_start_loc: Any) -> Any:
            tables = {"query_start_loc": query_start_loc}
            whole = backend.begin(block_table, context_lens, **tables)
            backend.begin(block_table, context_lens.clamp(max=64), **tables)
            return backend.attend(whole, query, *caches)

        return forward

    output, problem = _two_steps(interleaved, mode, [LONG - 10, LONG // 2])
    assert relative_error(problem, output) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("mode", MODES)
def test_lengths_changed_inside_a_forward_are_planned_again(mode: str) -> None:
    def advancing(backend: TritonAttention, caches: tuple[torch.Tensor, ...]) -> Any:
        def forward(query: Any, block_table: Any, context_lens: Any, query_start_loc: Any) -> Any:
            tables = {"query_start_loc": query_start_loc}
            lengths = context_lens // 6
            step = backend.begin(block_table, lengths, **tables)
            backend.attend(step, query, *caches)
            lengths.copy_(context_lens)
            step = backend.begin(block_table, lengths, **tables)
            return backend.attend(step, query, *caches)

        return forward

    output, problem = _two_steps(advancing, mode, [LONG, 240 * LONG // 600])
    assert relative_error(problem, output) <= TOLERANCE[torch.float32]


def test_a_uniform_prefill_runs_eagerly_like_any_other_mixed_batch() -> None:
    backend = TritonAttention(SHAPES[0], max_num_reqs=2, dtype=torch.float32, device=DEVICE)
    problem = random_problem(SHAPES[0], [40], 20, device=DEVICE)
    descriptor = BatchDescriptor(20, 1, uniform=True, query_len=20)
    with forward_context(GraphMode.NONE, descriptor):
        step = backend.begin(problem.step.block_table, problem.step.context_lens)
        output = backend.attend(step, problem.query, *problem.caches)
    assert relative_error(problem, output) <= TOLERANCE[torch.float32]


def test_fewer_query_rows_than_requests_are_refused() -> None:
    backend = TritonAttention(SHAPES[0], max_num_reqs=4, dtype=torch.float32, device=DEVICE)
    problem = random_problem(SHAPES[0], [4, 4, 0, 0], 1, device=DEVICE)
    step = backend.begin(problem.step.block_table, problem.step.context_lens, query_len=1)
    with pytest.raises(InvalidInputError, match="fewer tokens than its requests"):
        backend.attend(step, problem.query[:2], *problem.caches)


def test_zero_requests_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="max_num_reqs must be an integer >= 1"):
        TritonAttention(SHAPES[0], max_num_reqs=0, device=DEVICE)


def test_graphs_of_a_context_bound_are_split_for_that_bound_and_equal_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not ON_GPU:  # enough of them for a second span
        monkeypatch.setattr(backend_module, "_processors", lambda device: 8)
    backend = TritonAttention(
        SMALL, max_num_reqs=4, splits="fixed", dtype=torch.float32, device=DEVICE
    )
    problem = random_problem(SMALL, [LONG, 64], 1, max_blocks=BLOCKS, device=DEVICE)
    bounds, mode = ((128,), (ROOM,)), "FULL_DECODE_ONLY"
    runner = _runner(backend, problem.caches, mode, bounds=bounds, sizes=[2], layers=1)
    # No list and no StringIO: after a warm-up they are put back.
    scheduled: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    begin = TritonAttention.begin

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = begin(self, *args, **kwargs)
        if step.query_len is not None:
            scheduled.put((step.max_context, step.prepared[0].num_splits))
        return step

    monkeypatch.setattr(TritonAttention, "begin", spy)
    runner.capture()
    splits = dict(scheduled.get_nowait() for _ in range(scheduled.qsize()))
    assert splits[128] == 1 and splits[ROOM] > 1
    inputs = {
        "query": problem.query,
        "block_table": problem.step.block_table,
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
    }
    steps = (([100, 64], 128), ([LONG, 64], ROOM), ([128, 1], 128))
    for lengths, bound in steps if ON_GPU else steps[:2]:
        context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        batch = Batch(2, 2, query_len=1, bounds=(max(lengths),))
        assert runner.verify(batch, context_lens=context_lens, **inputs).any()
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.mode is GraphMode.FULL
        assert runner.last_dispatch.descriptor.bounds == (bound,)
