"""Side streams, replays from several streams, random numbers, and hooks around captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from graphrt import (
    Batch,
    GraphMode,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
    eager_break,
    get_platform,
)
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
MODULUS = 1_000_003


def capturing() -> bool:
    return DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()


class Hooks:
    """A log of calls, and whether each came inside of a capture."""

    def __init__(self, join: Callable[[], None] = lambda: None) -> None:
        self.join = join
        self.calls: list[tuple[str, bool]] = []

    def before_capture(self) -> None:
        self.calls.append(("before_capture", capturing()))

    def end_of_capture(self) -> None:
        self.calls.append(("end_of_capture", capturing()))
        self.join()

    def before_replay(self) -> None:
        self.calls.append(("before_replay", capturing()))


@eager_break
def between(x: torch.Tensor) -> torch.Tensor:
    return x * 1


@eager_break
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def with_rand(x: torch.Tensor) -> torch.Tensor:
    return noisy(x + torch.rand_like(x)) + torch.rand(x.shape, device=x.device)


def with_dropout(x: torch.Tensor) -> torch.Tensor:
    return noisy(F.dropout(x + 1, 0.5, training=True)) + torch.randn_like(x)


class TestSideStreams(ConformanceBase):
    platform = get_platform("cuda", must_be_available=False)

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_a_stream_forked_and_joined_inside_a_segment_is_captured(
        self, pool: GraphPool, mode: GraphMode
    ) -> None:
        sides = [torch.cuda.Stream() for _ in range(2)]

        def forked(x: torch.Tensor) -> torch.Tensor:
            main, parts = torch.cuda.current_stream(), []
            for factor, side in enumerate(sides, 2):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    parts.append(x * factor)
            own = x + 1
            for side in sides:
                main.wait_stream(side)
            return own + parts[0] + parts[1]

        wrapper = self.wrap(lambda x: forked(between(forked(x))), mode, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, mode, x)
        for value in (1.0, 5.0):
            x.copy_(self.tensor(1, 2, 3, 4) * value)
            expected = [6 * (6 * row * value + 1) + 1 for row in (1, 2, 3, 4)]
            assert self.first(self.step(wrapper, mode, x)) == expected

    def test_a_capture_hook_may_join_a_stream_the_forward_forked(self, pool: GraphPool) -> None:
        side = torch.cuda.Stream()
        copied = self.tensor(0, 0, 0, 0)

        def forward(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copied.copy_(x)
            return x + 1

        hooks = Hooks(join=lambda: torch.cuda.current_stream().wait_stream(side))
        wrapper = self.wrap(forward, FULL, pool, hooks=hooks)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        x.copy_(self.tensor(5, 6, 7, 8))
        assert self.first(self.step(wrapper, FULL, x)) == [6, 7, 8, 9]
        assert self.first(copied) == [5, 6, 7, 8]

    @pytest.mark.parametrize("seed", [torch.manual_seed, torch.cuda.manual_seed_all])
    @pytest.mark.parametrize("forward", [with_rand, with_dropout])
    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_replayed_random_numbers_equal_eager_random_numbers_of_the_same_seed(
        self, pool: GraphPool, mode: GraphMode, forward: Callable, seed: Callable
    ) -> None:
        wrapper = self.wrap(forward, mode, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, mode, x)
        seed(11)
        replayed = [self.host(self.step(wrapper, mode, x)) for _ in range(6)]
        assert all(not torch.equal(one, two) for one, two in pairwise(replayed))
        seed(11)
        with torch.no_grad():
            eager = [self.host(forward(x)) for _ in range(6)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, eager, strict=True))
        # Replays and eager steps draw from one sequence.
        seed(11)
        with torch.no_grad():
            turns = [
                self.host(forward(x) if turn % 2 else self.step(wrapper, mode, x))
                for turn in range(6)
            ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(turns, eager, strict=True))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_steps_from_several_streams_run_in_order_with_their_inputs(mode: str) -> None:
    total = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    log = torch.zeros(60, dtype=torch.int64, device=DEVICE)

    def forward(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        total.mul_(3).add_(between(x).sum()).remainder_(MODULUS)
        log.index_copy_(0, step, total)
        return x + 1

    one = InputSpec(torch.int64, (1,))
    with GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4, 8],
        inputs={"x": InputSpec(torch.int64, ("tokens",)), "step": one},
        outputs=("tokens",),
        host=Host(state=[total]),
        platform=DEVICE,
    ) as runner:
        runner.capture()
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        expected, value = [], 0
        for number in range(60):
            with torch.cuda.stream(streams[number % 3]):
                # The other streams have nothing of their own to wait for.
                torch.cuda._sleep(4_000_000 * (number % 3))
                rows = 1 + number % 8
                x = torch.full((rows,), number + 1)
                runner(Batch(rows), x=x, step=torch.tensor([number]))
            value = (3 * value + rows * (number + 1)) % MODULUS
            expected.append(value)
        torch.cuda.synchronize()
        assert log.tolist() == expected


def test_capture_and_replay_hooks_run_for_every_graph() -> None:
    hooks = Hooks()
    with GraphRunner(
        lambda x: between(between(x + 1) + 1) + 1,
        mode="FULL_AND_PIECEWISE",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        host=Host(around_graph=hooks),
        platform=DEVICE,
    ) as runner:
        runner.capture()
        # A segment runs at its capture where the next eager part reads what it writes: of three
        # segments the first two do. The last one and the FULL graph are uploaded.
        graph = [("before_capture", False), ("end_of_capture", True)]
        replayed = [*graph, ("before_replay", False)]
        assert hooks.calls == replayed * 2 + graph + graph
        for batch, graphs in ((Batch(2, 1), 3), (Batch(2, 2, 1), 1)):
            hooks.calls.clear()
            out = runner(batch, x=torch.zeros(2, 8))
            assert (out == 3).all()
            assert hooks.calls == [("before_replay", False)] * graphs


def test_the_capture_context_is_entered_once_for_all_graphs() -> None:
    log: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        log.append(f"enter, capturing {capturing()}")
        yield
        log.append(f"exit, capturing {capturing()}")

    with GraphRunner(
        lambda x: between(x + 1) + 1,
        mode="FULL_AND_PIECEWISE",
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        host=Host(around_capture=context),
        platform=DEVICE,
    ) as runner:
        runner.capture()
        assert len(runner.report().graphs) == 6
        runner(Batch(1, 1, 1), x=torch.zeros(1, 8))
    assert log == ["enter, capturing False", "exit, capturing False"]
