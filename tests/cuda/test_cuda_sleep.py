"""Graphs whose memory sleeps: its pages go, and come back at the same addresses."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    InputSpec,
    eager_break,
    forward_context,
)
from graphrt.cuda.driver.api import is_mapped
from graphrt.errors import GraphsDroppedWarning, PoolAsleepError
from tests import alone
from tests.cuda.sleeping import SleepingAllocator

pytestmark = pytest.mark.cuda

WIDTH, ROWS = 1024, 2048


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> SleepingAllocator:
    return SleepingAllocator(tmp_path_factory.mktemp("allocator"))


class Model(torch.nn.Module):
    """Two layers with an eager part between them, a constant of the host, and noise at will."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.noise = noise
        self.to("cuda").eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        hidden = part(torch.relu(first(x)))
        hidden = second(hidden) + torch.tensor([1.0, 2.0], device="cuda").repeat(WIDTH // 2)
        return hidden + torch.rand_like(hidden) * self.noise if self.noise else hidden


@eager_break
def part(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 0.5


@contextmanager
def runner_of(
    model: Model, mem_pool: torch.cuda.MemPool, **options: Any
) -> Iterator[GraphRunner[torch.Tensor]]:
    pool = GraphPool("cuda", handle=mem_pool.id, around_memory=nullcontext)
    with torch.no_grad():
        runner = GraphRunner(
            model,
            mode="FULL_AND_PIECEWISE",
            sizes=[8, 256, ROWS],
            inputs={"x": InputSpec(torch.float32, ("rows", WIDTH))},
            outputs=("rows", WIDTH),
            options=GraphOptions(**options),
            pool=pool,
        )
        runner.capture()
        try:
            yield runner
        finally:
            runner.close()
            pool.close()


def night(runner: GraphRunner[Any], allocator: SleepingAllocator) -> int:
    """One sleep; returns the bytes of the device that were free in it, and not before."""
    pool = runner.pool
    pool.suspend()
    before = torch.cuda.mem_get_info()[0]
    allocator.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    with pytest.raises(PoolAsleepError):
        runner(x=torch.zeros(8, WIDTH, device="cuda"))
    allocator.wake()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.resume() == ()
    return freed


@pytest.mark.parametrize("outputs", ["pool", "static"])
def test_graphs_replay_after_sleeps_in_which_their_memory_was_free(allocator, outputs):
    model, mem_pool = Model(), allocator.pool()
    with runner_of(model, mem_pool, outputs=outputs) as runner:
        pool = runner.pool
        held, captures = pool.bytes(), pool.captures
        assert held is not None and held > 16 << 20
        inputs = [torch.randn(rows, WIDTH, device="cuda") for rows in (3, 8, 200, ROWS)]
        for _ in range(2):  # the first step of a graph may be a trial
            expected = [runner(x=x).clone() for x in inputs]
        levels = []
        for _ in range(10):
            freed = night(runner, allocator)
            # What the device has free is moved by other tests of other processes meanwhile.
            assert freed >= 0.9 * held or not alone.IS_ALONE
            for x, y in zip(inputs, expected, strict=True):
                assert torch.equal(runner(x=x), y)
            levels.append((pool.bytes(), torch.cuda.memory_allocated(), allocator.mapped_bytes))
        assert pool.captures == captures
        assert len({*levels[1:]}) == 1, levels


def test_random_numbers_of_graphs_go_on_after_a_sleep(allocator):
    model, mem_pool = Model(noise=1.0), allocator.pool()
    x = torch.randn(8, WIDTH, device="cuda")
    with runner_of(model, mem_pool) as runner:
        runner(x=x)  # may be a trial
        torch.manual_seed(5)
        expected = [runner(x=x).clone() for _ in range(3)]
        torch.manual_seed(5)
        for y in expected:
            night(runner, allocator)
            assert torch.equal(runner(x=x), y)


def test_static_outputs_of_a_wrapper_have_their_contents_after_a_sleep(allocator):
    mem_pool = allocator.pool()
    pool = GraphPool("cuda", handle=mem_pool.id, around_memory=nullcontext)
    options = GraphOptions(outputs="static", lazy=True)
    wrapper = GraphWrapper(lambda x: x * 2, "FULL", pool=pool, options=options)
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(2):
        with forward_context(GraphMode.FULL, BatchDescriptor(64)):
            out = wrapper(x)
    assert pool._is_in_graphs(out)
    pool.suspend()
    allocator.sleep()
    allocator.wake()
    pool.resume()
    assert torch.equal(out, x * 2)
    pool.close()


def test_handed_out_outputs_are_unreadable_in_a_sleep(allocator):
    model, mem_pool = Model(), allocator.pool()
    with runner_of(model, mem_pool) as runner:
        for _ in range(2):  # the first step of a graph may be a trial, whose result stays
            out = runner(x=torch.randn(8, WIDTH, device="cuda"))
        night(runner, allocator)
        with pytest.raises(RuntimeError, match="OverwrittenOutputError"):
            out.sum()


def test_memory_that_stays_away_destroys_the_graphs_and_recapture_brings_them_back(allocator):
    model, mem_pool = Model(), allocator.pool()
    x = torch.randn(8, WIDTH, device="cuda")
    with runner_of(model, mem_pool) as runner:
        pool = runner.pool
        for _ in range(2):
            expected = runner(x=x).clone()
        assert pool.bytes()
        starts = [start for start, _ in pool.memory._ranges]
        assert starts and all(map(is_mapped, starts))
        pool.suspend()
        allocator.sleep()
        assert not any(map(is_mapped, starts))
        with pytest.warns(GraphsDroppedWarning, match="did not come back"):
            gone = pool.resume()
        assert len(gone) == 6 and not pool.graphs
        torch.testing.assert_close(runner(x=x), expected)
        runner.recapture()
        assert torch.equal(runner(x=x), expected)
        pool.suspend()
        assert pool.resume() == ()
        assert torch.equal(runner(x=x), expected)
        allocator.wake()
    torch.cuda.synchronize()


@pytest.mark.parametrize("order", ["runner", "pool"])
def test_a_runner_of_two_is_closed_asleep_and_the_other_goes_on(allocator, order):
    model, mem_pool = Model(), allocator.pool()
    x = torch.randn(8, WIDTH, device="cuda")
    with runner_of(model, mem_pool) as target:
        draft = GraphRunner(
            model,
            mode="FULL",
            sizes=[8],
            inputs={"x": InputSpec(torch.float32, ("rows", WIDTH))},
            outputs=("rows", WIDTH),
            pool=target.pool,
        )
        with torch.no_grad():
            draft.capture()
        for _ in range(2):
            expected = target(x=x).clone()
        target.pool.suspend()
        allocator.sleep()
        draft.close()
        if order == "pool":
            target.pool.close()
            gc.collect()
            torch.cuda.synchronize()
            allocator.wake()
            return
        allocator.wake()
        assert target.pool.resume() == ()
        assert torch.equal(target(x=x), expected)


def test_graphs_of_another_pool_are_right_after_one_was_closed_asleep_for_good(allocator):
    """A stream that the first pool captured on has its scratch memory where no pages are: a pool
    that was lent it would read and write there."""
    model, mem_pools = Model(), [allocator.pool() for _ in range(3)]
    x = torch.randn(ROWS, WIDTH, device="cuda")
    with torch.no_grad():
        expected = model(x)
    for mem_pool in mem_pools:
        with runner_of(model, mem_pool) as runner:
            for _ in range(2):
                torch.testing.assert_close(runner(x=x), expected)
            runner.pool.suspend()
            allocator.sleep()
    with runner_of(model, torch.cuda.MemPool()) as runner:
        for _ in range(2):
            torch.testing.assert_close(runner(x=x), expected)
    torch.cuda.synchronize()
    allocator.wake()


def test_a_runner_that_was_made_in_the_sleeping_pool_finds_its_inputs_there(allocator):
    """Its buffers and its ring are then blocks in use, which are saved."""
    mem_pool = allocator.pool()
    x = torch.randn(8, WIDTH)
    # Before: torch lets nobody begin with a pool that the thread allocates in.
    pool = GraphPool("cuda", handle=mem_pool.id, around_memory=nullcontext)
    with torch.cuda.use_mem_pool(mem_pool):
        runner = GraphRunner(
            lambda x: x * 2 + 1,
            mode="FULL",
            sizes=[8, 64],
            inputs={"x": InputSpec(torch.float32, ("rows", WIDTH))},
            outputs=("rows", WIDTH),
            pool=pool,
        )
    runner.capture()
    for _ in range(3):
        night(runner, allocator)
        assert torch.equal(runner(x=x).cpu(), x * 2 + 1)
    runner.close()
    runner.pool.close()
