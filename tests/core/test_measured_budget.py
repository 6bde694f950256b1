"""`Budget(device_bytes=)` without costs: what graphs take is measured, and the rest predicted."""

from __future__ import annotations

import io
import logging
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import (
    Batch,
    Budget,
    GraphCost,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Plan,
    Reason,
)
from graphrt.core.plan.memory import GraphMemory, MeasuredBudget, measured_costs
from graphrt.core.plan.sizes import graph_name
from graphrt.cpu import CpuPlatform
from graphrt.cpu.graph import TapeGraph
from graphrt.errors import (
    GraphMemoryWarning,
    InvalidOptionError,
    PlanChangedWarning,
    ResourceExhaustedError,
)
from graphrt.observe import MemoryWatch
from tests import alone
from tests.draws import MORE

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
WIDTH = 16384


class Executables(CpuPlatform):
    """The CPU, whose driver takes memory in chunks for its executables, as CUDA's does."""

    def __init__(self, graph_bytes: int = MIB, chunk_bytes: int = MIB, keeps: bool = False) -> None:
        super().__init__()
        self._graphs = weakref.WeakSet[TapeGraph]()
        self._each, self._chunk, self._keeps = graph_bytes, chunk_bytes, keeps
        self._most = 0

    def new_graph(self) -> TapeGraph:
        graph = super().new_graph()
        self._graphs.add(graph)
        return graph

    def driver_bytes(self) -> int:
        now = -(-len(self._graphs) * self._each // self._chunk) * self._chunk
        self._most = max(self._most, now) if self._keeps else now
        return self._most


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2).exp().sum(1, keepdim=True)


def runner_of(
    budget: Budget | None,
    platform: CpuPlatform | str | None = None,
    mode: Any = "FULL",
    **more: Any,
) -> GraphRunner[torch.Tensor]:
    return GraphRunner(
        forward,
        mode=mode,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        platform=platform or Executables(),
        **{"sizes": SIZES, "budget": budget, **more},
    )


def taken(runner: GraphRunner[torch.Tensor]) -> int:
    return (runner.pool.bytes() or 0) + (runner.platform.driver_bytes() or 0)


def tokens(runner: GraphRunner[torch.Tensor]) -> list[int]:
    return [each.descriptor.num_tokens for each in runner.report().graphs]


def test_a_plan_of_bytes_alone_has_all_graphs_and_says_that_they_are_measured() -> None:
    """Of vllm#54933 and sglang#40094; before, costs by hand were asked for."""
    plan = Plan("FULL", sizes=SIZES, budget=Budget(device_bytes=100 * MIB), platform="cpu")
    assert len(plan.keys) == len(SIZES)
    assert "at most 100.0 MiB: a runner captures two graphs of each mode" in str(plan)
    assert "0.0 of" not in str(plan)


def test_graphs_that_fit_are_all_captured_and_the_plan_has_what_they_took() -> None:
    runner = runner_of(Budget(device_bytes=100 * MIB))
    totals = []
    runner.capture(progress=lambda *_: totals.append(runner.plan.total.amount("device_bytes")))
    assert len(tokens(runner)) == len(SIZES)
    assert runner.plan.total.amount("device_bytes") == taken(runner)
    assert "8 of 8 sizes, 24.0 of 100.0 MiB, 16.0 MiB of it are the pool" in str(runner.plan)
    # Predicted after two graphs.
    assert totals[2] == taken(runner)


@pytest.mark.parametrize("by", ["capture", "capture_next", "lazy"])
def test_graphs_beyond_the_bytes_are_left_out_and_named(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graphrt")
    runner = runner_of(Budget(device_bytes=21 * MIB + 5), options=GraphOptions(lazy=by == "lazy"))
    if by == "capture":
        runner.capture()
        assert "captured in all: 5 of 8 sizes, 21.0 of 21.0 MiB" in caplog.text
    while by == "capture_next" and runner.capture_next():
        pass
    for rows in (128, *SIZES) if by == "lazy" else SIZES:
        out = runner(x=torch.ones(rows, WIDTH))
        torch.testing.assert_close(out, forward(torch.ones(rows, WIDTH)))
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
    assert len(tokens(runner)) == 5 and 128 in tokens(runner)
    assert taken(runner) <= 21 * MIB + 5
    assert len(runner.plan.captured) == 5 and len(runner.plan.left_out) == 3
    assert "needs 1.0 MiB; free: 0.0 of 21.0 MiB" in str(runner.plan)
    assert "took" not in caplog.text


def test_lazy_graphs_from_the_smallest_on_are_counted_once() -> None:
    runner = runner_of(Budget(device_bytes=100 * MIB), options=GraphOptions(lazy=True))
    for rows in (1, 2, 32, 16, 128, 64):
        runner(x=torch.ones(rows, WIDTH))
    assert tokens(runner) == [1, 2, 32, 16, 128, 64]
    held = runner.graphs.budget.plan(runner.graphs.held, runner.plan.keys)  # type: ignore[union-attr]
    assert held.total.amount("device_bytes") == taken(runner)


def test_after_a_release_all_is_measured_again() -> None:
    runner = runner_of(Budget(device_bytes=21 * MIB))
    for _ in range(2):
        runner.capture()
        assert len(tokens(runner)) == 5
        runner.release()
        assert len(runner.plan.keys) == len(SIZES)
    runner.recapture()
    runner.recapture(only_outdated=True)
    assert len(tokens(runner)) == 5


def test_two_graphs_of_each_mode_come_first_and_the_others_are_predicted_by_them() -> None:
    budget = Budget(device_bytes=26 * MIB)
    runner = runner_of(budget, mode="FULL_AND_PIECEWISE")
    runner.capture()
    first = [(each.mode, each.descriptor.num_tokens) for each in runner.report().graphs][:4]
    assert {*first[:2]} == {(GraphMode.FULL, 128), (GraphMode.PIECEWISE, 128)}
    assert {*first[2:]} == {(GraphMode.FULL, 64), (GraphMode.PIECEWISE, 64)}
    assert taken(runner) <= 26 * MIB and len(runner.plan.left_out) == 6


def test_bytes_below_the_largest_graph_are_an_error_that_says_what_it_takes() -> None:
    runner = runner_of(Budget(device_bytes=10 * MIB))
    with pytest.raises(InvalidOptionError, match="not one graph of the largest size") as caught:
        runner.capture()
    assert f"takes {17 * MIB}" in str(caught.value)
    assert runner.report().graphs == ()
    assert torch.equal(runner(x=torch.ones(1, WIDTH)), forward(torch.ones(1, WIDTH)))


def test_the_bar_of_a_capture_counts_what_fits_and_warns_of_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    runner, stream = runner_of(Budget(device_bytes=21 * MIB)), io.StringIO()
    watch = MemoryWatch(runner, stream=stream)
    runner.capture(progress=watch)
    assert not [each for each in recwarn if each.category is GraphMemoryWarning]
    assert {each.bytes for each in watch.forecasts} == {21 * MIB}
    assert len(watch.forecasts) == 7


def test_a_limit_of_graphs_holds_beside_the_bytes() -> None:
    for most, graphs in ((3, 3), (7, 5)):
        runner = runner_of(Budget(device_bytes=21 * MIB), options=GraphOptions(max_graphs=most))
        runner.capture()
        assert len(tokens(runner)) == graphs and taken(runner) <= 21 * MIB
        # The last ones that the limit has no room for would fit into the bytes.
        says = [each.why for each in runner.plan.left_out]
        assert any("max_graphs" in each for each in says) is (most == 3), says


def test_strict_refuses_what_the_bytes_have_no_room_for() -> None:
    runner = runner_of(Budget(device_bytes=21 * MIB), options=GraphOptions(strict=True))
    with pytest.raises(ResourceExhaustedError, match="the budget holds 5 of 8 graphs"):
        runner.capture()
    runner_of(Budget(device_bytes=24 * MIB), options=GraphOptions(strict=True)).capture()


def test_a_platform_that_tells_no_bytes_is_refused() -> None:
    class Silent(CpuPlatform):
        def memory_bytes(self, memory: Any) -> None:  # type: ignore[override]
            return None

    with pytest.raises(InvalidOptionError, match="tells the bytes of a pool"):
        runner_of(Budget(device_bytes=MIB), Silent())


def test_a_measured_plan_is_saved_with_its_costs_and_needs_no_measuring(tmp_path: Path) -> None:
    runner = runner_of(Budget(device_bytes=21 * MIB))
    runner.capture()
    runner.plan.save(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanChangedWarning)
        plan = Plan.load(tmp_path / "plan.json", platform=runner.platform)
    assert plan.keys == runner.plan.keys and not plan.is_measured
    assert str(plan) == str(runner.plan)


def test_costs_may_be_those_of_single_graphs() -> None:
    keys = Plan("FULL", sizes=[1, 2, 4], platform="cpu").keys
    cost = {graph_name(key): GraphCost(device_bytes=key[1].num_tokens * MIB) for key in keys}
    budget = Budget(device_bytes=5 * MIB, cost=cost)
    plan = Plan("FULL", sizes=[1, 2, 4], platform="cpu", budget=budget)
    assert [key.num_tokens for _, key in plan.keys] == [4, 1]
    with pytest.raises(InvalidOptionError, match=r'of which "FULL \[8 tokens'):
        Plan("FULL", sizes=[1, 2, 4, 8], platform="cpu", budget=budget)


def test_other_limits_and_costs_stay_beside_bytes_that_are_measured(tmp_path: Path) -> None:
    cost = {GraphMode.FULL: GraphCost(capture_s=0.5)}
    budget = Budget(device_bytes=100 * MIB, capture_s=2.0, graphs=9, cost=cost)
    runner = runner_of(budget)
    runner.capture()
    assert len(tokens(runner)) == 4
    assert "2.00 of 2.00 s" in str(runner.plan)
    runner.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", platform=runner.platform).keys == runner.plan.keys


def test_graphs_share_the_largest_pool() -> None:
    both = GraphCost(device_bytes=1, pool_bytes=5) + GraphCost(device_bytes=2, pool_bytes=3)
    assert both == GraphCost(graphs=2, device_bytes=3, pool_bytes=5)
    assert both.amount("device_bytes") == 8 and both.amount("graphs") == 2
    cost = {GraphMode.FULL: GraphCost(device_bytes=MIB, pool_bytes=4 * MIB)}
    budget = Budget(device_bytes=6 * MIB, cost=cost)
    plan = Plan("FULL", sizes=[1, 2, 4], platform="cpu", budget=budget)
    assert len(plan.keys) == 2 and plan.left_out[0].why == "needs 1.0 MiB; free: 0.0 of 6.0 MiB"


@pytest.mark.parametrize(("free_mib", "fits"), [(3, False), (4, True)])
def test_a_graph_fits_only_beside_the_largest_chunk_that_its_mode_has_taken(
    free_mib: int, fits: bool
) -> None:
    """By the average of 2 MiB the last graph would be captured, and be destroyed again."""
    limit = Budget(device_bytes=(100 + 8 + free_mib) * MIB)
    plan = Plan("FULL", sizes=[1, 2, 4, 8, 16], budget=limit, platform="cpu")
    budget, order = MeasuredBudget(plan), plan.capture_order()
    for key, chunk in zip(order, [4, 0, 4, 0], strict=False):
        budget.note(key, 100 * MIB if key is order[0] else 0, chunk * MIB)
    assert budget.has_room(order[4], order[:4]) is fits
    assert (order[4] in budget.plan(order[:4], ()).keys) is fits


def test_the_pool_of_a_list_without_its_largest_is_scaled_by_tokens() -> None:
    keys = Plan("FULL", sizes=[64, 128, 256], platform="cpu").keys
    pools = [202 * MIB, 0, 0]
    took = {
        key: GraphMemory(key[0].name, key[1].num_tokens, pool, 2 * MIB)
        for key, pool in zip(keys, pools, strict=True)
    }
    costs = measured_costs(took, keys[1:])
    assert costs[keys[1]] == GraphCost(device_bytes=2 * MIB, pool_bytes=101 * MIB)


@settings(deadline=None, max_examples=20)
@given(
    budget_mib=st.integers(17, 60),
    graph_kib=st.integers(100, 4000),
    chunk_kib=st.sampled_from([1, 512, 2048]),
    keeps=st.booleans(),
    mode=st.sampled_from(["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"]),
)
def test_graphs_take_never_more_than_the_bytes_and_the_widest_batch_is_served(
    budget_mib: int, graph_kib: int, chunk_kib: int, keeps: bool, mode: str
) -> None:
    platform = Executables(graph_kib << 10, chunk_kib << 10, keeps)
    runner = runner_of(Budget(device_bytes=budget_mib * MIB), platform, mode)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int, _: object) -> None:
        seen.append((taken(runner), int(runner.plan.total.amount("device_bytes"))))

    try:
        runner.capture(progress=progress)
    except InvalidOptionError:
        largest = 16 * MIB + -(-graph_kib // chunk_kib) * (chunk_kib << 10)
        assert largest > budget_mib * MIB
        return
    # A driver that keeps its chunks may be above by one, which nothing frees.
    assert max(each for each, _ in seen) <= budget_mib * MIB + keeps * (chunk_kib << 10)
    plan = runner.plan
    assert {*plan.keys} == {(each.mode, each.descriptor) for each in runner.report().graphs}
    assert all(each not in plan.keys for each in plan.left_out)
    runner(Batch(128, 128, 1), x=torch.ones(128, WIDTH))
    assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
    runner.close()


@pytest.mark.draws
@settings(max_examples=100 * MORE)
@given(st.data())
def test_simulated_captures_stay_within_the_bytes_whatever_graphs_take(data: st.DataObject) -> None:
    """By the plan alone: graphs of any size, each captured where the plan has it."""
    mode = data.draw(st.sampled_from(["FULL", "FULL_AND_PIECEWISE"]))
    limit = data.draw(st.integers(1, 400)) * MIB
    plan = Plan(mode, max_num_reqs=32, budget=Budget(device_bytes=limit), platform="cpu")
    amounts = st.integers(0, 30).map(lambda mib: mib * MIB)
    budget = MeasuredBudget(plan)
    held: list[Any] = []
    left_out: list[Any] = []
    for key in plan.capture_order():
        now = budget.plan(held, left_out)
        assert {*held} <= {*now.keys} and not {*left_out} & {*now.keys}
        assert {*now.keys} | {(each.mode, each.descriptor) for each in now.left_out} == {*plan.keys}
        if held:
            assert now.total.amount("device_bytes") <= limit
            assert budget.has_room(key, held) == (key in now.keys)
        if not budget.has_room(key, held):
            left_out.append(key)
            continue
        budget.note(key, data.draw(amounts), data.draw(amounts))
        held.append(key)
        has_freed = True
        while held and has_freed and budget.is_over(held):
            left_out.append(held.pop())
            has_freed = budget.lose(left_out[-1], budget.took[left_out[-1]].driver_bytes or 0)
        if not held:
            return


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_bytes_on_a_gpu_are_never_exceeded(mode: str) -> None:
    alone.skip_beside_others()
    whole = runner_of(Budget(device_bytes=1 << 40), "cuda", mode)
    whole.capture()
    report = whole.report()
    assert len(report.graphs) == len(whole.plan.keys)
    pool, driver = report.pool_bytes or 0, report.driver_bytes or 0
    limit = pool + driver // 2 + 4 * MIB
    whole.close()
    runner = runner_of(Budget(device_bytes=limit), "cuda", mode)
    runner.capture()
    report = runner.report()
    assert report.graphs and (report.pool_bytes or 0) + (report.driver_bytes or 0) <= limit
    x = torch.ones(128, WIDTH, device="cuda")
    assert torch.equal(runner(Batch(128, 128, 1), x=x), forward(x))
    assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
