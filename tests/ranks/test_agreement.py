"""Ranks in processes of their own: the same graph at every step, or an error on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.draws import rest_long
from tests.ranks.launching import TIMEOUT_S, launch

SIZES = [1, 2, 4, 8]


def assert_same(by_rank: dict[int, dict[str, Any]]) -> None:
    for rank, seen in by_rank.items():
        assert "error" not in seen, (rank, seen)
        assert seen["wrong"] == [], (rank, seen["wrong"][:3])
        assert seen["log"] == by_rank[0]["log"], f"rank {rank} has made other collectives"
        assert seen["collectives"] == by_rank[0]["collectives"]
        # A trial that fails on one rank ends as an eager step there: the log has its collectives.
        failed = {"QUARANTINED", "CHANGED"}
        for step, first in zip(seen["steps"], by_rank[0]["steps"], strict=True):
            assert step == first or {step[2], first[2]} & failed


SEVERAL: list[tuple[int, dict[str, Any]]] = [
    (2, {"idle": 0.1, "beyond": 2, "check": "sample"}),
    (2, {"check": "always", "steps": 30}),
    (2, {"loras": [0, 1, 2], "plan": {"loras": [1, 2]}}),
    (4, {"idle": 0.2, "beyond": 1, "query_lens": [1, 2], "uniform": 0.7}),
]


@pytest.mark.parametrize(
    ("ranks", "case"),
    rest_long(SEVERAL, 0, 2, name=SEVERAL.index),
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, dict) else f"{value} ranks",
)
def test_ranks_with_different_batches_replay_the_same_graphs(
    ranks: int, case: dict[str, Any]
) -> None:
    by_rank = launch({"sizes": SIZES, "steps": 100, "seed": ranks, **case}, ranks)
    assert_same(by_rank)
    assert by_rank[0]["reasons"]["HIT"] > 20


@pytest.mark.parametrize("ranks", rest_long([2, 3], 2))
def test_without_a_graph_for_all_every_rank_runs_the_rows_of_the_largest(ranks: int) -> None:
    """Batches above the largest size on some ranks, idle ones on others, and collectives over
    rows: with other sizes gloo would end the processes."""
    case = {"sizes": SIZES, "steps": 60, "idle": 0.2, "beyond": 6, "sums_rows": True}
    by_rank = launch({**case, "query_lens": [1, 2], "uniform": 0.7, "seed": ranks}, ranks)
    assert_same(by_rank)
    assert 0 not in by_rank[0]["log"]
    reasons = by_rank[0]["reasons"]
    assert reasons["RANKS_DISAGREE"] > 10 and reasons["HIT"] > 5


def test_a_graph_dropped_on_a_rank_is_replayed_on_no_rank() -> None:
    drop = {"fault": {"kind": "drop", "at": 10, "size": 4}}
    by_rank = launch({"sizes": SIZES, "steps": 100, "of_rank": {"1": drop}}, 2)
    assert_same(by_rank)
    assert ["PIECEWISE", 4, "HIT"] not in by_rank[0]["steps"][10:]
    assert ["PIECEWISE", 8, "HIT"] in by_rank[0]["steps"][10:]


@pytest.mark.parametrize("forgets", [False, True])
def test_ranks_go_on_after_a_sleep_and_none_replays_what_one_has_lost(forgets: bool) -> None:
    """A step while all sleep raises before its vote, so that the ranks agree on the next."""
    case = {"sizes": SIZES, "steps": 90, "sleeps_at": 30, "recaptures_at": 60}
    by_rank = launch({**case, "of_rank": {"1": {"forgets": forgets}}}, 2)
    assert_same(by_rank)
    asleep, again = by_rank[0]["steps"][30:60], by_rank[0]["steps"][60:]
    assert {step[2] for step in asleep} == {"RANKS_DISAGREE" if forgets else "HIT"}
    # Some steps after a capture the log of the model is found to have changed.
    assert {step[2] for step in again} - {"CHANGED"} == {"HIT"}


@pytest.mark.parametrize("check", rest_long(["capture", "always"], "capture"))
def test_a_value_changed_on_a_single_rank_is_tried_on_all_ranks(check: str) -> None:
    change = {"fault": {"kind": "attribute", "name": "scale", "at": 30, "to": 3.0}}
    case = {"sizes": SIZES, "steps": 60, "check": check, "of_rank": {"1": change}}
    by_rank = launch(case, 2)
    for seen in by_rank.values():
        assert "error" not in seen, seen
        assert seen["log"] == by_rank[0]["log"]
        assert seen["steps"][-1][2] == "RANKS_DISAGREE"
    assert by_rank[0]["wrong"] == []


def test_a_harmless_change_on_a_single_rank_quarantines_no_graph() -> None:
    change = {"fault": {"kind": "attribute", "name": "unused", "at": 30, "to": 1}}
    case = {"sizes": SIZES, "steps": 80, "of_rank": {"1": change}}
    by_rank = launch(case, 2)
    for seen in by_rank.values():
        assert "error" not in seen, seen
        assert seen["log"] == by_rank[0]["log"]
        assert seen["wrong"] == []
        assert {step[2] for step in seen["steps"][60:]} == {"HIT"}
        assert "QUARANTINED" not in seen["reasons"]


def test_ranks_with_different_trial_findings_run_the_same_collectives() -> None:
    # Rows of zeros show nothing of what every third run does.
    case = {"sizes": [2, 4], "steps": 6, "counts": True, "of_rank": {"1": {"times": 0.0}}}
    by_rank = launch(case, 2)
    for seen in by_rank.values():
        assert "error" not in seen, seen
        assert seen["log"] == by_rank[0]["log"]
        assert seen["collectives"] == by_rank[0]["collectives"] > 20
    assert by_rank[0]["steps"][-1][2] == by_rank[1]["steps"][-1][2] == "RANKS_DISAGREE"


def test_lazy_ranks_capture_the_graph_that_was_voted() -> None:
    by_rank = launch({"sizes": SIZES, "steps": 60, "idle": 0.1, "lazy": True}, 2)
    assert_same(by_rank)
    assert {step[2] for step in by_rank[0]["steps"]} == {"HIT"}


@pytest.mark.parametrize(
    ("name", "value"),
    rest_long([("max_graphs", 3), ("max_graphs", 1), ("graph_bytes", 1 << 20)], ("max_graphs", 3)),
)
def test_lazy_ranks_under_a_limit_capture_and_evict_the_same_graphs(name: str, value: int) -> None:
    """Idle ranks, batches of different sizes, and collectives over rows; on one rank memory holds
    twice as much, so that it alone lacks bytes."""
    case = {"sizes": list(range(1, 17)), "steps": 200, "idle": 0.1, "lazy": True, "pace": 2}
    greedy = {"of_rank": {"1": {"greedy": True}}}
    by_rank = launch({**case, "sums_rows": True, "limit": {name: value}, **greedy}, 2)
    assert_same(by_rank)
    graphs, captures, evictions = by_rank[0]["log"][-1]
    assert graphs == captures - evictions < 16
    assert evictions or value == 1
    assert graphs <= value
    assert by_rank[0]["reasons"]["HIT"] > 50


def test_a_limit_that_is_too_small_on_one_rank_is_an_error_on_all() -> None:
    case = {"sizes": [8192], "steps": 1, "limit": {"graph_bytes": 1 << 20}}
    for seen in launch({**case, "of_rank": {"1": {"greedy": True}}}, 2).values():
        assert seen["error"] == "InvalidOptionError"
        assert "graph_bytes is too small for a single graph" in seen["text"]


def test_bytes_that_one_rank_lacks_leave_the_same_graphs_out_on_all() -> None:
    """The driver of rank 1 takes 2 MiB for each of the four graphs, that of rank 0 none."""
    case = {"sizes": SIZES, "steps": 40, "device_bytes": 8 << 20}
    by_rank = launch({**case, "of_rank": {"1": {"drives": True}}}, 2)
    assert_same(by_rank)
    assert by_rank[0]["reasons"]["HIT"] > 30
    assert by_rank[0]["log"][-1] == by_rank[1]["log"][-1] == [8, 4, 1]


def test_capture_next_captures_the_same_graphs_on_all_ranks() -> None:
    case = {"sizes": SIZES, "steps": 20, "next": True}
    by_rank = launch(case, 2)
    assert_same(by_rank)
    assert by_rank[0]["steps"][-1][2] == "HIT"


def test_capture_next_of_different_graphs_raises_on_all_ranks_before_capturing() -> None:
    release = {"fault": {"kind": "release", "at": 2}}
    case = {"sizes": SIZES, "steps": 9, "next": True, "of_rank": {"1": release}}
    for seen in launch(case, 2).values():
        assert seen["error"] == "RanksDifferError"
        assert "next is another one on rank 1" in seen["text"]
        assert "on rank 1: captures PIECEWISE [8 tokens]" in seen["text"]
        assert len(seen["steps"]) == 2


@pytest.mark.parametrize(
    ("kind", "lost", "error", "text"),
    rest_long(
        [
            ("kill inside", 1, "RankLostError", "rank 1, last heard at step"),
            ("stop", 1, "RankLostError", "rank 1, last heard at step"),
            ("raise", 1, "RankStoppedError", "rank 1: GraphRTError: a planted error"),
            ("kill", 0, "RankLostError", "rank 0"),
            ("stop", 0, "RankLostError", "rank 0"),
        ],
        *("stop on 1", "raise on 1", "kill on 0"),
        name=lambda case: f"{case[0]} on {case[1]}",
    ),
)
def test_the_remaining_ranks_raise_and_name_a_lost_rank(
    kind: str, lost: int, error: str, text: str
) -> None:
    fault = {"kind": kind, "at": 6}
    mine = {str(lost): {"fault": fault}}
    case = {"sizes": SIZES, "steps": 50, "timeout_s": TIMEOUT_S, "of_rank": mine}
    is_lost = () if kind == "raise" else (lost,)
    by_rank = launch(case, 3, lost=is_lost, limit_s=60)
    for rank in {0, 1, 2} - {lost}:
        assert by_rank[rank]["error"] == error, by_rank[rank]
        assert text in by_rank[rank]["text"], by_rank[rank]["text"]
        assert by_rank[rank]["took"] < 3 * TIMEOUT_S


def test_a_rank_that_dies_before_its_agreement_is_a_named_error_on_the_others() -> None:
    case = {"sizes": SIZES, "steps": 1, "timeout_s": TIMEOUT_S, "of_rank": {"0": {"dies": True}}}
    by_rank = launch(case, 2, lost=(0,), limit_s=60)
    assert by_rank[1]["error"] == "RankLostError"
    assert "the ranks did not come together" in by_rank[1]["text"]


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        ({"plan": {"max_num_reqs": 4}}, "plan is another one on rank 1"),
        ({"check": "always"}, "check is another one on rank 1"),
        ({"same": {"checkpoint": "b"}}, "same['checkpoint'] is another one on rank 1"),
    ],
)
def test_a_rank_with_another_configuration_raises_before_the_first_step(
    mine: dict[str, Any], text: str
) -> None:
    case = {"sizes": SIZES, "steps": 5, "of_rank": {"1": mine}}
    for seen in launch(case, 3).values():
        assert seen["error"] == "RanksDifferError"
        assert text in seen["text"]
        assert seen["steps"] == []


def test_a_rank_that_skipped_a_step_is_named_by_an_error() -> None:
    skip = {"fault": {"kind": "skip", "at": 6}}
    case = {"sizes": SIZES, "steps": 12, "timeout_s": TIMEOUT_S, "of_rank": {"1": skip}}
    by_rank = launch(case, 2)
    assert by_rank[0]["error"] == "RankStoppedError"
    assert "rank 1: it has left the agreement" in by_rank[0]["text"]


# Captures that are tried before a warm-up ---------------------------------------------------------


def tried(**of_ranks: dict[str, Any]) -> dict[str, Any]:
    """A case of FULL graphs without collectives."""
    names = {name.removeprefix("rank_"): mine for name, mine in of_ranks.items()}
    return {"sizes": SIZES, "tried": True, "alone": True, "mode": "FULL", "of_rank": names}


def test_a_capture_that_fails_on_a_single_rank_is_repeated_on_all() -> None:
    fails = {"fails_at": (4, "CaptureSyncError")}
    by_rank = launch(tried(rank_1=fails) | {"steps": 20}, 2)
    assert_same(by_rank)
    assert by_rank[0]["log"] == [[8, 1], [4, 2], [2, 1], [1, 1]]


def test_a_capture_that_no_rank_may_repeat_ends_after_one_attempt() -> None:
    fails = {"fails_at": (4, "RefusedOpError")}
    by_rank = launch(tried(rank_0=fails, rank_1=fails) | {"steps": 0}, 2)
    assert [seen["error"] for seen in by_rank.values()] == ["RefusedOpError"] * 2


def test_with_ranks_every_size_in_pieces_is_warmed_up() -> None:
    """A rank that fails would leave the others in collectives of the parts before."""
    by_rank = launch({"sizes": SIZES, "steps": 4, "tried": True}, 2)
    assert_same(by_rank)
    # Besides the steps each size sums over ranks in its warm-up, and in its capture.
    assert by_rank[0]["collectives"] >= 2 * len(SIZES)
