"""Which graphs a budget keeps, in which order, and what the plan reports about those left out."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from graphrt.core.base.errors import InvalidModeError, InvalidOptionError
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.budget import (
    Budget,
    Captured,
    GraphCost,
    LeftOut,
    budget_lines,
    fit,
    total_of,
)
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.resolution import ModeResolution, resolve_mode
from graphrt.core.plan.sizes import CaptureKey, capture_sizes, descriptors_for
from graphrt.core.plan.traffic import by_worth, check_traffic, fitted_sizes

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
BOTH = GraphMode.FULL_AND_PIECEWISE
SIZES = capture_sizes(max_num_reqs=256, max_num_tokens=8192).mixed
MIB = 1 << 20


class Fitted(NamedTuple):
    """What `fit` returns."""

    resolution: ModeResolution
    captured: Captured
    left_out: tuple[LeftOut, ...]

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        return tuple((each.mode, each.descriptor) for each in self.captured)

    @property
    def total(self) -> GraphCost:
        return total_of(each.cost for each in self.captured)


def pieces_take(streams: int, full: int = 1) -> dict[GraphMode, GraphCost]:
    return {
        PIECEWISE: GraphCost(streams, streams, 8 * MIB, 0.5),
        FULL: GraphCost(full, 1, 4 * MIB, 0.25),
    }


def keys_of(mode: GraphMode, *sizes: int, reqs: int = 8) -> tuple[CaptureKey, ...]:
    fitted = capture_sizes(max_num_reqs=reqs, max_num_tokens=8192, sizes=sorted(sizes))
    return descriptors_for(mode, fitted)


def plan(
    keys: Sequence[CaptureKey],
    budget: Budget,
    cost: dict[GraphMode, GraphCost],
    *,
    mode: ModeResolution | GraphMode | str,
    min_piecewise: int = 2,
) -> Fitted:
    budget = replace(budget, cost=cost, min_piecewise=min_piecewise)
    resolution = mode if isinstance(mode, ModeResolution) else asked_for(mode)
    return Fitted(*fit(keys, budget, mode=resolution))


def asked_for(mode: GraphMode | str) -> ModeResolution:
    return ModeResolution(GraphMode.parse(mode), GraphMode.parse(mode))


def tokens(fitted: Fitted, mode: GraphMode) -> list[int]:
    return [each.descriptor.num_tokens for each in fitted.captured if each.mode is mode]


def test_a_budget_without_limits_captures_all_graphs_in_the_given_order() -> None:
    keys = keys_of(BOTH, 1, 2, 4, 8)
    fitted = plan(keys, Budget(), pieces_take(5), mode=BOTH)
    assert (fitted.keys, fitted.left_out, fitted.resolution.mode) == (keys, (), BOTH)
    assert fitted.total == GraphCost(4 * 5 + 4, 4 * 5 + 4, 48 * MIB, 3.0)


def test_full_graphs_take_the_budget_first_and_pieces_the_rest() -> None:
    fitted = plan(keys_of(BOTH, 1, 2, 4, 8), Budget(streams=15), pieces_take(5), mode=BOTH)
    assert tokens(fitted, FULL) == [8, 4, 2, 1]
    assert tokens(fitted, PIECEWISE) == [8, 1]
    assert [each.descriptor.num_tokens for each in fitted.left_out] == [4, 2]
    assert fitted.left_out[0].why == "needs 5 streams; free: 1 of 15 streams"


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (Budget(graphs=10), [8, 1]),
        (Budget(capture_s=1.0), [8, 1]),
        (Budget(device_bytes=25 * MIB), [8, 4, 1]),
        (Budget(device_bytes=17 * MIB, streams=100), [8, 1]),
    ],
)
def test_each_limit_of_a_budget_drops_piecewise_sizes(budget: Budget, kept: list[int]) -> None:
    fitted = plan(keys_of(PIECEWISE, 1, 2, 4, 8), budget, pieces_take(5), mode=PIECEWISE)
    assert tokens(fitted, PIECEWISE) == kept
    assert fitted.resolution.mode is PIECEWISE


def test_a_budget_for_too_few_piecewise_sizes_steps_the_mode_down() -> None:
    resolution = resolve_mode("FULL")
    assert resolution.steps == ()
    resolution = resolve_mode("FULL_AND_PIECEWISE")
    fitted = plan(keys_of(BOTH, 1, 2, 4, 8), Budget(streams=8), pieces_take(5), mode=resolution)
    assert fitted.resolution.mode is GraphMode.FULL_DECODE_ONLY
    step = fitted.resolution.steps[-1]
    assert (step.rule, step.before, step.after) == ("budget", BOTH, fitted.resolution.mode)
    assert "0 of 4 piecewise sizes" in step.why
    assert tokens(fitted, FULL) == [8, 4, 2, 1] and tokens(fitted, PIECEWISE) == []
    assert "captures no PIECEWISE graphs" in fitted.left_out[0].why


def test_a_budget_for_no_full_graph_steps_the_mode_down() -> None:
    cost = {**pieces_take(1), FULL: GraphCost(99, 1, 4 * MIB, 0.25)}
    fitted = plan(keys_of(BOTH, 1, 2, 4, 8), Budget(streams=8), cost, mode=BOTH)
    assert fitted.resolution.mode is PIECEWISE
    assert fitted.resolution.steps[-1].why == "the budget holds no FULL graph"
    assert tokens(fitted, FULL) == [] and tokens(fitted, PIECEWISE) == [8, 4, 2, 1]


@pytest.mark.parametrize(("fewest", "mode"), [(2, BOTH), (3, GraphMode.FULL_DECODE_ONLY)])
def test_min_piecewise_sets_how_many_piecewise_sizes_keep_the_mode(
    fewest: int, mode: GraphMode
) -> None:
    keys, budget = keys_of(BOTH, 1, 2, 4, 8), Budget(streams=15)
    fitted = plan(keys, budget, pieces_take(5), mode=BOTH, min_piecewise=fewest)
    assert fitted.resolution.mode is mode


def test_a_single_requested_piecewise_size_does_not_step_the_mode_down() -> None:
    fitted = plan(keys_of(BOTH, 4), Budget(streams=20), pieces_take(5), mode=BOTH)
    assert (fitted.resolution.mode, tokens(fitted, PIECEWISE)) == (BOTH, [4])


def test_the_budget_of_dropped_pieces_goes_to_full_graphs() -> None:
    fitted = plan(keys_of(BOTH, 1, 8), Budget(streams=9), pieces_take(3, full=4), mode=BOTH)
    assert tokens(fitted, FULL) == [8, 1]


def test_a_budget_for_no_graphs_ends_in_mode_none() -> None:
    fitted = plan(keys_of(FULL, 1, 8), Budget(streams=0), pieces_take(5), mode=FULL)
    assert (fitted.resolution.mode, fitted.keys) == (GraphMode.NONE, ())
    assert "no graph at all" in "\n".join(fitted.resolution.lines())


def test_refuse_steps_raises_if_the_budget_stepped_the_mode_down() -> None:
    fitted = plan(keys_of(BOTH, 1, 8), Budget(streams=4), pieces_take(5), mode=BOTH)
    with pytest.raises(InvalidModeError, match="piecewise sizes"):
        fitted.resolution.refuse_steps()


def test_fitting_no_graphs_into_a_budget_raises_nothing() -> None:
    fitted = plan((), Budget(streams=0), pieces_take(5), mode="none")
    assert (fitted.resolution.mode, fitted.keys, fitted.total.graphs) == (GraphMode.NONE, (), 0)


def test_query_lengths_share_the_budget_evenly() -> None:
    sizes = capture_sizes(max_num_reqs=64, max_num_tokens=8192, query_lens=(1, 4))
    keys = descriptors_for("FULL_DECODE_ONLY", sizes)
    fitted = plan(keys, Budget(streams=6), pieces_take(5), mode="FULL_DECODE_ONLY")
    by_length = {
        q: [
            each.descriptor.num_tokens for each in fitted.captured if each.descriptor.query_len == q
        ]
        for q in (1, 4)
    }
    assert by_length[4][0] == 256 and by_length[4][-1] == 4
    assert by_length[1][0] == 64 and by_length[1][-1] == 1
    assert {len(kept) for kept in by_length.values()} == {3}


def test_budget_lines_show_costs_totals_and_left_out_graphs() -> None:
    limits = Budget(streams=15, device_bytes=100 * MIB)
    fitted = plan(keys_of(BOTH, 1, 2, 4, 8), limits, pieces_take(5), mode=BOTH)
    text = "\n".join(budget_lines(limits, fitted.captured, fitted.left_out))
    assert "PIECEWISE [8 tokens]: 5 streams, 8.0 MiB, 0.50 s" in text
    assert "FULL [1 tokens 1 reqs uniform q=1]: 1 stream, 4.0 MiB, 0.25 s" in text
    assert "in all: 6 of 8 sizes, 14 of 15 streams, 32.0 of 100.0 MiB" in text
    assert "left out: PIECEWISE [4 tokens] and 1 more of 2 to 2 tokens: needs 5 streams" in text


def test_budget_lines_without_limits_count_graphs_only() -> None:
    fitted = plan(keys_of(FULL, 8), Budget(), {}, mode=FULL)
    assert budget_lines(Budget(), fitted.captured, fitted.left_out) == [
        "FULL [8 tokens 8 reqs]: 1 graph",
        "in all: 1 of 1 sizes, 1 graph",
    ]


@pytest.mark.parametrize(
    "limits", [{"streams": -1}, {"capture_s": -0.5}, {"capture_s": float("nan")}]
)
def test_a_negative_or_nan_budget_limit_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match="budget"):
        Budget(**limits)


def test_bytes_of_a_budget_as_text_are_refused_with_a_number_of_bytes() -> None:
    with pytest.raises(InvalidOptionError, match="budget of device_bytes") as caught:
        Budget(device_bytes="2GiB")  # type: ignore[arg-type]
    assert caught.value.advice == "device_bytes=1073741824"


def test_fitting_a_budget_to_an_unknown_mode_raises() -> None:
    with pytest.raises(InvalidModeError):
        plan((), Budget(), pieces_take(1), mode="HALF")


# What a size is worth ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (4, [1, 32, 256, 512]),
        (9, [1, 8, 32, 64, 128, 192, 256, 384, 512]),
        (15, [1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512]),
    ],
)
def test_by_worth_without_traffic_keeps_small_sizes_close_together(
    count: int, kept: list[int]
) -> None:
    """Evenly spaced in the list, 4 sizes would jump from 1 to 120, and 9 from 1 to 32 and 80."""
    assert sorted(by_worth(SIZES, landmarks=[256])[:count]) == kept


def test_by_worth_orders_the_end_sizes_first_and_landmarks_next() -> None:
    assert by_worth(SIZES, landmarks=[96, 100])[:3] == (512, 1, 96)
    assert by_worth([4]) == (4,) and by_worth([]) == ()


def test_by_worth_prefers_sizes_that_the_traffic_needs() -> None:
    assert by_worth([1, 2, 4, 8, 16, 32], {3: 0.9, 30: 0.1})[:2] == (32, 4)
    assert by_worth([1, 2, 4, 8, 16, 32], {7: 1})[:2] == (32, 8)


@pytest.mark.parametrize(
    "traffic", [{}, {1: 0.0}, {0: 1.0}, {1: -1.0}, {True: 1.0}, {2: float("nan")}]
)
def test_empty_zero_or_invalid_traffic_is_refused(traffic: dict[int, float]) -> None:
    with pytest.raises(InvalidOptionError, match="traffic"):
        check_traffic(traffic)


def padding(kept: list[int], traffic: dict[int, float]) -> float:
    return sum(
        share * (next(size for size in kept if size >= live) - live)
        for live, share in traffic.items()
    )


TRAFFIC = st.dictionaries(st.integers(1, 60), st.integers(0, 9), min_size=1, max_size=9).filter(
    lambda traffic: any(traffic.values())
)


def test_sizes_chosen_by_traffic_pad_nearly_as_little_as_the_optimum() -> None:
    drawn = random.Random(2)
    for _ in range(200):
        sizes = sorted(drawn.sample(range(1, 61), drawn.randint(2, 9)))
        traffic = {drawn.randint(1, sizes[-1]): drawn.random() for _ in range(6)}
        count = drawn.randint(2, len(sizes))
        got = sorted(by_worth(sizes, traffic)[:count])
        best = min(
            padding(sorted({sizes[-1], *others}), traffic)
            for others in itertools.combinations(sizes, count - 1)
        )
        assert got[-1] == sizes[-1]
        assert padding(got, traffic) <= best + 0.1 * sizes[-1] * sum(traffic.values())


def test_fitting_sizes_to_sixty_thousand_batch_sizes_takes_less_than_five_seconds() -> None:
    traffic = {size: 1 / size for size in range(1, 60_000)}
    started = time.thread_time()
    assert len(fitted_sizes(tuple(range(1, 60_000, 6000)), traffic)) == 10
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("default", "traffic", "multiple", "expected"),
    [
        ((8, 16, 32), {5: 1.0, 32: 1.0, 33: 9.0}, 1, (5, 16, 32)),
        # A size of no steps is no candidate, though an even traffic would need it.
        ((1, 2, 32), {20: 0.0, 32: 1.0}, 1, (1, 2, 32)),
        # Live sizes in whole requests, up to the largest of the list.
        ((4, 32), {5: 1.0}, 4, (8, 32)),
        ((4, 30), {29: 1.0}, 4, (4, 30)),
        ((), {5: 1.0}, 1, ()),
    ],
)
def test_fitted_sizes_replace_the_least_useful_default_sizes(
    default, traffic, multiple, expected
) -> None:
    assert fitted_sizes(default, traffic, multiple) == expected


BIMODAL = {9: 0.5, 33: 0.3, 70: 0.15, 200: 0.05}


def planned(**arguments: Any) -> Plan:
    return Plan(
        "FULL_DECODE_ONLY", max_num_reqs=256, max_num_tokens=2048, platform="cpu", **arguments
    )


def sizes_of(plan: Plan) -> list[int]:
    return sorted(descriptor.num_tokens for _, descriptor in plan.keys)


def test_a_plan_by_traffic_has_as_many_sizes_as_the_default_plan() -> None:
    default, fitted = sizes_of(planned()), sizes_of(planned(traffic=BIMODAL))
    assert len(default) == len(fitted) and default[-1] == fitted[-1] == 256
    assert set(BIMODAL) <= set(fitted)
    drawn = random.Random(3)
    traffic = {size: drawn.random() for size in range(1, 257)}
    fitted = sizes_of(planned(traffic=traffic))
    assert len(fitted) == len(default)
    assert padding(fitted, traffic) < padding(default, traffic)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_a_budget_with_traffic_keeps_sizes_of_nearly_optimal_padding(count: int) -> None:
    plan = planned(traffic=BIMODAL, budget=Budget(graphs=count))
    kept = sizes_of(plan)
    candidates = [*BIMODAL, 256]
    best = min(
        padding(sorted({256, *others}), BIMODAL)
        for others in itertools.combinations(candidates, min(count, 5) - 1)
    )
    assert padding(kept, BIMODAL) <= best * 1.05
    assert (len(kept), kept[-1], plan.total.graphs) == (count, 256, count)


def test_a_budget_with_traffic_keeps_only_sizes_of_the_hosts_list() -> None:
    own = [8, 16, 32, 64, 256]
    plan = planned(sizes=own, traffic=BIMODAL, budget=Budget(graphs=3))
    assert sizes_of(plan) == [16, 64, 256]
    assert sizes_of(planned(sizes=own, traffic=BIMODAL)) == own


def test_decode_sizes_chosen_by_traffic_are_multiples_of_the_query_length() -> None:
    traffic = {7: 0.5, 50: 0.5}
    plan = planned(query_lens=(1, 4), traffic=traffic, budget=Budget(graphs=6))
    for _, descriptor in plan.keys:
        assert descriptor.query_len is not None and descriptor.num_reqs is not None
        assert descriptor.num_tokens == descriptor.num_reqs * descriptor.query_len
    by_length = {q: [d.num_tokens for _, d in plan.keys if d.query_len == q] for q in (1, 4)}
    assert by_length == {1: [256, 50, 7], 4: [512, 52, 8]}


def test_a_budget_prefers_piecewise_graphs_over_a_few_more_decode_sizes() -> None:
    keys = keys_of(BOTH, *SIZES, reqs=256)
    for graphs, mode in ((3, "FULL_DECODE_ONLY"), (4, BOTH.name), (30, BOTH.name), (70, BOTH.name)):
        fitted = plan(keys, Budget(graphs=graphs), {}, mode=BOTH)
        assert (fitted.resolution.mode.name, len(fitted.keys)) == (mode, graphs)
    # An NPU's pieces, of 35 streams each: not for half of the sizes of decode.
    for streams, mode in ((80, "FULL_DECODE_ONLY"), (140, BOTH.name)):
        fitted = plan(keys, Budget(streams=streams), pieces_take(35), mode=BOTH)
        assert (fitted.resolution.mode.name, len(tokens(fitted, FULL))) == (mode, 35)
