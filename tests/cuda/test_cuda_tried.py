"""Captures on a GPU that are tried before a warm-up, and graphs that are uploaded."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec, eager_break
from graphrt.core.replay.recording import current_capture

pytestmark = pytest.mark.cuda

WIDTH = 64
SIZES = [1, 2, 4, 8]


def runner_of(forward: Any, mode: str = "FULL", **options: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        platform="cuda",
        options=GraphOptions(**options),
    )


def by_calls(runner: GraphRunner) -> None:
    """Capture each size in a session of its own."""
    while runner.capture_next():
        pass


def by_steps(runner: GraphRunner) -> None:
    """The same by steps of a runner that is lazy."""
    for size in reversed(SIZES):
        runner(x=torch.ones(size, WIDTH, device="cuda"))


def attempts_of(runner: GraphRunner) -> dict[int, int]:
    return {each.descriptor.num_tokens: each.attempts for each in runner.report().graphs}


def assert_equal_to_eager(runner: GraphRunner, forward: Any) -> None:
    with torch.no_grad():
        for size in (*SIZES, *reversed(SIZES)):
            x = torch.randn(size, WIDTH, device="cuda")
            eager = forward(x)
            assert torch.equal(runner(x=x), eager), size


@pytest.mark.parametrize("check", ["off", "capture", "always"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_sizes_after_the_largest_are_captured_without_a_warm_up(mode, check):
    weight = torch.randn(WIDTH, WIDTH, device="cuda")
    eager: list[int] = []

    @eager_break
    def part(x):
        return x.relu()

    def forward(x):
        if current_capture() is None:
            eager.append(len(x))
        return part(x @ weight) @ weight

    runner = runner_of(forward, mode, check=check)
    runner.capture()
    if mode == "FULL":
        assert {2, 4}.isdisjoint(eager)
    assert attempts_of(runner) == dict.fromkeys(SIZES, 1)
    assert_equal_to_eager(runner, forward)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_first_call_that_waits_for_the_device_is_warmed_up_and_captured_again(mode):
    tables: dict[int, float] = {}

    @eager_break
    def part(x):
        return x + 1

    def forward(x):
        if len(x) not in tables:
            # A first call at this size tunes something: it waits for the device.
            torch.cuda.synchronize()
            tables[len(x)] = 2.0
        return part(x * tables[len(x)])

    runner = runner_of(forward, mode)
    before = torch.cuda.get_rng_state()
    runner.capture()
    assert torch.equal(before, torch.cuda.get_rng_state())
    # The third one that fails is warmed up at once.
    assert attempts_of(runner) == {8: 1, 4: 2, 2: 2, 1: 1}
    assert_equal_to_eager(runner, forward)


@pytest.mark.parametrize("capture", [by_calls, by_steps])
@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_later_sessions_warm_up_no_size_either(mode, check, capture):
    weight, cache = torch.randn(WIDTH, WIDTH, device="cuda"), torch.zeros(16, device="cuda")

    @eager_break
    def part(x):
        cache[: len(x)] = x[:, 0]
        return x.relu()

    def forward(x):
        return part(x @ weight) @ weight

    runner = runner_of(forward, mode, check=check, lazy=capture is by_steps)
    capture(runner)
    graphs = runner.report().graphs
    assert [each.warm_up_s > 0 for each in graphs] == [True, False, False, False]
    assert attempts_of(runner) == dict.fromkeys(SIZES, 1)
    assert capture is by_steps or check == "off" or not cache.any()
    assert_equal_to_eager(runner, forward)


@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls, by_steps])
def test_an_interrupted_try_leaves_no_tensor_of_its_graph_in_python(capture):
    class Model:
        fails = True

        def __init__(self) -> None:
            self.tables: dict[int, torch.Tensor] = {}

        def __call__(self, x):
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.arange(len(x), device="cuda", dtype=x.dtype)[:, None]
            if len(x) == 4 and self.fails and current_capture() is not None:
                raise KeyboardInterrupt
            return x + self.tables[len(x)]

    model = Model()
    runner = runner_of(model, lazy=capture is by_steps)
    with pytest.raises(KeyboardInterrupt):
        capture(runner)
    assert 4 not in model.tables
    model.fails = False
    assert_equal_to_eager(runner, model)


@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls, by_steps])
def test_tables_that_captures_make_are_made_by_warm_ups_then(capture):
    tables: dict[int, torch.Tensor] = {}

    def forward(x):
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), device="cuda", dtype=x.dtype)[:, None] * 2
        return x + tables[len(x)]

    runner = runner_of(forward, lazy=capture is by_steps)
    capture(runner)
    assert attempts_of(runner) == {8: 1, 4: 2, 2: 2, 1: 1}
    assert not any(runner.pool._owns(each) for each in tables.values())
    assert_equal_to_eager(runner, forward)


def test_a_failed_attempt_gives_its_memory_back():
    # Not taken back with the rest: no walk knows how far an iterator is.
    fails = iter([True])

    def large(x):
        # No product: cuBLAS's workspace is in the pool if its stream is new, elsewhere if not.
        return (x[:, None] * x).sum(-1).repeat(64, 64) + 1

    def forward(x):
        hidden = large(x)
        if len(x) == 4 and current_capture() is not None and next(fails, False):
            torch.cuda.synchronize()
        return x + hidden.sum()

    plain = runner_of(lambda x: x + large(x).sum())
    plain.capture()
    runner = runner_of(forward)
    runner.capture()
    assert attempts_of(runner)[4] == 2
    assert runner.pool.bytes() <= plain.pool.bytes() + (4 << 20)
    assert_equal_to_eager(runner, forward)


def test_draws_of_a_device_graph_go_on_after_a_failed_attempt():
    fails = iter([True])

    def forward(x):
        noise = torch.rand_like(x)
        if len(x) == 4 and current_capture() is not None and next(fails, False):
            torch.cuda.synchronize()
        return x + noise

    runner = runner_of(forward, check="off")
    runner.capture()
    x = torch.zeros(4, WIDTH, device="cuda")
    torch.manual_seed(3)
    first = [runner(x=x).clone() for _ in range(2)]
    torch.manual_seed(3)
    again = [runner(x=x).clone() for _ in range(2)]
    assert not torch.equal(*first) and all(map(torch.equal, first, again))


def test_state_that_one_smaller_size_writes_is_as_before_the_capture():
    state = torch.zeros(WIDTH, device="cuda")

    @eager_break
    def part(x):
        return x + 1

    for mode in ("FULL", "PIECEWISE"):

        def forward(x):
            if len(x) == 4:
                state.add_(1)
            return part(x) + state

        state.zero_()
        runner = runner_of(forward, mode)
        runner.capture()
        assert not state.any(), mode
        x = torch.zeros(4, WIDTH, device="cuda")
        assert torch.equal(runner(x=x), torch.full_like(x, 2.0))


def test_a_graph_that_was_uploaded_runs_at_its_first_step_with_inputs_of_the_host():
    def forward(x, y):
        return x * 2 + y

    spec = InputSpec(torch.float32, ("tokens", WIDTH))
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=SIZES,
        inputs={"x": spec, "y": spec},
        outputs=("tokens", WIDTH),
        platform="cuda",
        host=Host(),
    )
    runner.capture()
    for size in (3, 8, 1, 2):
        x, y = torch.randn(size, WIDTH), torch.randn(size, WIDTH)
        out = runner(Batch(size), x=x, y=y)
        assert torch.equal(out.cpu(), x * 2 + y)


def test_memory_that_a_capture_leaves_where_no_walk_looks_is_found():
    kept: queue.Queue[torch.Tensor] = queue.Queue()

    def forward(x):
        # Of the second tried size: the first may be the first to need a library's workspace.
        if len(x) == 2 and not kept.qsize():
            kept.put(x + 1)
        return x * 2

    runner = runner_of(forward)
    runner.capture()
    assert attempts_of(runner) == {8: 1, 4: 1, 2: 2, 1: 1}
    assert torch.equal(kept.get(), torch.ones(2, WIDTH, device="cuda"))
