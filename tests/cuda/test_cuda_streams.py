"""Side streams, replays from several streams, random numbers, and hooks around captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphrt import (
    Batch,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    Host,
    InputSpec,
    Reason,
    eager_break,
    get_platform,
)
from graphrt.core.replay.entry import graphs_of
from graphrt.cuda.driver.nodes import KERNEL, kernel_attribute, node_type, nodes_of
from graphrt.errors import CaptureError
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase
from tests.test_readme import blocks

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
MODULUS = 1_000_003
PRIORITY = 8
"""CU_LAUNCH_ATTRIBUTE_PRIORITY"""


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

    def priorities(self, wrapper: GraphWrapper) -> set[int]:
        """The priorities of the kernels of a wrapper's only graph."""
        (entry,) = wrapper.entries.values()
        (graph,) = graphs_of(entry.parts)
        nodes = nodes_of(graph.raw_cuda_graph())
        told = [kernel_attribute(node, PRIORITY) for node in nodes if node_type(node) == KERNEL]
        return {int.from_bytes(each[:4], "little", signed=True) for each in told if each}

    def test_kernels_keep_the_priority_of_their_side_stream(self, pool: GraphPool) -> None:
        side = torch.cuda.Stream(priority=-1)

        def forward(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                doubled = x * 2
            tripled = x * 3
            torch.cuda.current_stream().wait_stream(side)
            return doubled + tripled

        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        assert self.first(self.step(wrapper, FULL, x)) == [5, 10, 15, 20]
        assert self.priorities(wrapper) == {0, -1}

    def test_a_pool_made_under_a_stream_of_high_priority_captures_with_it(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            pool = GraphPool(self.platform)
        assert pool.stream.priority == -1
        wrapper = self.wrap(lambda x: x * 2, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        assert self.first(self.step(wrapper, FULL, x)) == [2, 4, 6, 8]
        assert self.priorities(wrapper) == {-1}
        pool.close()
        other = GraphPool(self.platform)
        assert other.stream.priority == 0
        other.close()


@pytest.mark.parametrize("name", ["streams", "adapters", "encoders"])
def test_the_code_of_a_page_runs_on_a_gpu(name: str, tmp_path: Any) -> None:
    """Where its code names the CPU it runs there."""
    page, names = f"docs/how-to/{name}.md", dict[str, Any]()
    for block in blocks(page):
        if "import transformers" in block.code:
            pytest.importorskip("transformers", reason="transformers is not installed")
        if block.not_run is None:
            exec(compile(block.code, page, "exec"), names)


@pytest.mark.parametrize("check", ["capture", "always"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_shared_expert_on_a_side_stream_equals_eager_in_each_layer(mode: str, check: Any) -> None:
    side = torch.cuda.Stream()
    experts = [torch.nn.Linear(256, 256, device=DEVICE) for _ in range(8)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        for routed, shared in zip(experts[::2], experts[1::2], strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)  # a side stream that is behind
                beside = torch.tanh(shared(x))
            own = torch.tanh(routed(x))
            main.wait_stream(side)
            x = between(own + beside)
        return x

    with (
        torch.no_grad(),
        GraphRunner(
            forward,
            mode=mode,
            sizes=[1, 2, 4, 8],
            inputs={"x": InputSpec(torch.float32, ("tokens", 256))},
            outputs=("tokens", 256),
            platform=DEVICE,
            options=GraphOptions(check=check),
        ) as runner,
    ):
        runner.capture()
        for step in range(24):
            x = torch.randn(1 + step % 8, 256, device=DEVICE)
            ours = runner(Batch(len(x)), x=x).clone()
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
            torch.testing.assert_close(ours, forward(x), rtol=1e-3, atol=1e-3)


def test_a_forgotten_join_names_the_line_of_its_fork_and_steps_go_on_eagerly() -> None:
    side = torch.cuda.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())  # the fork
        with torch.cuda.stream(side):
            beside = x * 2
        return x + 1 + 0 * beside.shape[0]

    with GraphRunner(
        forward,
        mode="FULL",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform=DEVICE,
    ) as runner:
        with pytest.raises(CaptureError, match="not joined") as caught:
            runner.capture()
        assert "the fork" in str(caught.value)
        assert (runner(x=torch.ones(2, 8, device=DEVICE)) == 2).all()


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
