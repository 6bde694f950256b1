"""A platform that reports its free streams: graphs that would exceed them are not captured."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphRunner,
    HostArg,
    InputSpec,
    Plan,
    UpdatableTask,
    eager_break,
    forward_context,
)
from graphrt.core.base.errors import GraphsDroppedWarning, ResourceExhaustedError, StreamBudgetError
from graphrt.core.runner.streams import WorkCount
from graphrt.cpu import CpuPlatform
from graphrt.platforms import GraphWork, StreamRoom
from tests.draws import rest_long

SIZES = [1, 2, 3, 4, 6, 8]
FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


class CountingPlatform(CpuPlatform):
    """A graph holds a stream from its beginning and `more` from its end, like one that is full."""

    def __init__(self, free: int, reserve: int = 0, *, more: int = 0, told: int | None = None):
        super().__init__()
        self.free, self.reserve, self.more = free, reserve, more
        self.told = more if told is None else told
        self.held: dict[Any, int] = {}
        self.begun: list[int] = []
        self.ran_out = 0
        self.lowest = free

    def stream_room(self) -> StreamRoom:
        return StreamRoom(self.free, self.reserve)

    def streams_needed(self, work: GraphWork) -> int:
        return work.graphs * (1 + self.told)

    def begin_capture(self, graph: Any, memory: Any) -> None:
        super().begin_capture(graph, memory)
        self._take(graph, 1)

    def end_capture(self, graph: Any) -> bool:
        self._take(graph, self.more)
        return super().end_capture(graph)

    def abort_capture(self, graph: Any) -> None:
        super().abort_capture(graph)
        self.free += self.held.pop(graph, 0)

    def reset_graphs(self, graphs: Any) -> None:
        super().reset_graphs(graphs)
        self.free += sum(self.held.pop(graph, 0) for graph in graphs)

    def _take(self, graph: Any, count: int) -> None:
        if self.free < count:
            self.ran_out += 1
            raise StreamBudgetError("none left", got=self.free)
        self.free -= count
        self.held[graph] = self.held.get(graph, 0) + count
        self.lowest = min(self.lowest, self.free)


@eager_break
def between(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def forward(x: torch.Tensor) -> torch.Tensor:
    return between(between(x + 1) + 1) + 1


def runner(device: CpuPlatform, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        outputs=("tokens", 2),
        platform=device,
        options=GraphOptions(**options),
    )


def captured(run: GraphRunner) -> list[tuple[GraphMode, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphsDroppedWarning)
        run.capture()
    return [(each.mode, each.descriptor.num_tokens) for each in run.report().graphs]


def serves_every_batch(run: GraphRunner) -> None:
    for tokens in range(1, 9):
        for query_len in (1, None):
            x = torch.arange(tokens * 2.0).view(tokens, 2)
            assert torch.equal(run(Batch(tokens, tokens, query_len), x=x), forward(x))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("more", "told"), rest_long([(0, None), (4, None), (4, 0)], (4, 0)))
def test_graphs_that_fit_the_free_streams_serve_and_release_returns_all_streams(mode, more, told):
    for free in (0, 1, 2, 4, 5, 9, 14, 17, 31, 44):
        device = CountingPlatform(free, min(3, free // 4), more=more, told=told)
        with runner(device, mode) as run:
            descriptors = captured(run)
            report = run.report()
            assert len(descriptors) + len(report.dropped) == len(run.plan.keys)
            assert sum(each.streams for each in report.graphs) == free - device.free
            assert device.free >= device.reserve
            serves_every_batch(run)
            run.release()
            assert device.free == free
        if told is None:
            assert device.ran_out == 0 and device.lowest >= device.reserve


@pytest.mark.parametrize("more", [0, 4])
def test_capture_next_captures_only_graphs_that_fit_the_free_streams(more):
    for free in (0, 2, 5, 9, 17, 31, 44):
        device = CountingPlatform(free, min(3, free // 4), more=more)
        with runner(device) as run:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GraphsDroppedWarning)
                while run.capture_next().left:
                    serves_every_batch(run)
            report = run.report()
            assert len(report.graphs) + len(report.dropped) == len(run.plan.keys)
            assert sum(each.streams for each in report.graphs) == free - device.free
            serves_every_batch(run)
            run.release()
            assert device.free == free
        assert device.ran_out == 0 and device.lowest >= device.reserve


def test_a_platform_with_stream_figures_captures_the_most_useful_graphs_first():
    device = CountingPlatform(100)
    run = runner(device)
    order = captured(run)
    assert order[:3] == [(FULL, 8), (FULL, 1), (FULL, 4)]
    assert [mode for mode, _ in order] == [FULL] * 6 + [PIECEWISE] * 6
    assert run.plan.capture_order() != run.plan.keys


def test_a_platform_without_stream_figures_captures_in_plan_order():
    run = runner(CpuPlatform())
    assert captured(run) == [(mode, each.num_tokens) for mode, each in run.plan.keys]
    assert run.plan.capture_order() is run.plan.keys
    assert {each.streams for each in run.report().graphs} == {None}


def test_pieces_that_exceed_the_free_streams_are_dropped_before_their_capture():
    device = CountingPlatform(6 + 2 * 3 + 2)
    run = runner(device)
    *full, first, last = captured(run)
    assert sorted(full) == [(FULL, size) for size in SIZES]
    assert (first, last) == ((PIECEWISE, 8), (PIECEWISE, 1))
    assert device.ran_out == 0 and device.free == 2
    (reason,) = {each.reason for each in run.report().dropped}
    assert "2 free" in reason and "expected: 3," in reason


def test_the_warm_up_of_a_modes_first_graph_predicts_its_streams():
    device = CountingPlatform(8, more=2)
    run = runner(device, "PIECEWISE")
    assert captured(run) == []
    assert device.lowest == 8
    assert "expected: 9," in run.report().dropped[0].reason


def test_without_warm_ups_running_out_of_streams_drops_the_remaining_graphs():
    device = CountingPlatform(8, more=2)
    run = runner(device, "PIECEWISE", warmups=0)
    assert captured(run) == []
    assert device.ran_out == 1 and device.free == 8
    reasons = [each.reason for each in run.report().dropped]
    assert "none left" in reasons[0]
    assert all("expected: 9," in each for each in reasons[1:])


def test_a_graph_that_used_reserved_streams_is_dropped():
    device = CountingPlatform(5, reserve=3, more=2, told=0)
    run = runner(device, "FULL")
    assert captured(run) == []
    assert device.free == 5
    assert "3 of them kept in reserve" in run.report().dropped[0].reason
    serves_every_batch(run)


def test_the_warning_of_dropped_graphs_has_a_line_for_each_reason():
    run = runner(CountingPlatform(7), "FULL_AND_PIECEWISE")
    with pytest.warns(GraphsDroppedWarning, match="6 of 12 graphs") as told:
        run.capture()
    head, *lines = str(told[0].message).splitlines()
    assert "run eagerly" in head
    assert len(lines) == 1 and lines[0].startswith("  PIECEWISE [8 tokens]: the device has too few")


def test_strict_refuses_graphs_that_exceed_the_free_streams():
    run = runner(CountingPlatform(7), strict=True)
    with pytest.raises(ResourceExhaustedError, match="too few free streams"):
        run.capture()


def count(function: Any, breaks: tuple[str, ...] = ()) -> GraphWork:
    counter = WorkCount(lambda: stream[0], frozenset(breaks))
    counter.run(function)
    return counter.work


stream = [0]


def test_work_count_counts_operators_by_stream_and_ignores_views():
    x = torch.ones(4, 2)

    def work() -> None:
        (x.view(8) + 1)[2:].t()
        stream[0] = 7
        torch.mul(x, 2)
        stream[0] = 0

    assert count(work).operators == {0: 1, 7: 1}


def test_work_count_counts_tasks_and_breaks_only_while_running():
    x, out = torch.ones(2), torch.empty(2)

    def issue(tensor: torch.Tensor, result: torch.Tensor, *, scale: int) -> None:
        torch.mul(tensor, scale, out=result)

    task = UpdatableTask("scale", issue, {"scale": HostArg(None)})

    def work() -> None:
        with forward_context(
            GraphMode.NONE, BatchDescriptor(2, 2), updates={"scale": {"scale": 2}}
        ):
            task(x, out)
        between(torch.sigmoid(x))

    counts = count(work, ("aten::sigmoid",))
    assert (counts.tasks, counts.breaks, sum(counts.operators.values())) == (1, 2, 3)
    assert (counts.graphs, GraphWork(breaks=2, in_pieces=True).graphs) == (1, 3)
    work()
    assert (counts.tasks, counts.breaks) == (1, 2)


def test_a_work_count_that_raises_does_not_affect_the_next_count():
    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 // 0)
    before = count(lambda: None)
    between(torch.ones(1))
    assert before == GraphWork()


def test_capture_order_is_the_plan_order_on_a_platform_without_stream_figures():
    plan = Plan("FULL", sizes=[1, 2, 4], platform="cpu")
    assert plan.capture_order() == plan.keys
