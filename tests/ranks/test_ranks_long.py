"""Many steps, and many ways to lose a rank at any moment."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.ranks.launching import TIMEOUT_S, launch
from tests.ranks.test_agreement import SIZES, assert_same

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("check", ["off", "capture", "first", "sample", "always"])
@pytest.mark.parametrize("query_lens", [[1], [1, 2], [1, 2, 4]])
def test_ranks_agree_on_random_steps_with_lost_graphs(
    ranks: int, check: str, query_lens: list[int]
) -> None:
    """Rank 1 loses a graph half-way, and rank 0 all of them near the end: what its host changes is
    tried by all, and fails on rank 0 alone."""
    steps = 150 if check == "always" else 1000
    drop = {"kind": "drop", "at": steps // 2, "size": 4}
    change = {"kind": "attribute", "name": "scale", "to": 3.0, "at": steps * 4 // 5, "told": True}
    faults = {"1": {"fault": drop}} | ({} if check == "off" else {"0": {"fault": change}})
    case = {
        "sizes": SIZES, "steps": steps, "check": check, "idle": 0.1, "beyond": 1, "uniform": 0.8,
        "query_lens": query_lens, "loras": [0, 1], "seed": len(query_lens), "timeout_s": 120.0,
        "plan": {"query_lens": query_lens, "loras": [1]}, "of_rank": faults,
    }  # fmt: skip
    seen = launch(case, ranks, limit_s=600)
    assert_same(seen)
    before = [step[2] for step in seen[0]["steps"][: drop["at"]]]
    assert before.count("HIT") > len(before) // 4
    if check != "off":
        assert {step[2] for step in seen[0]["steps"][-steps // 10 :]} == {"RANKS_DISAGREE"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_agree_on_random_steps_that_capture_lazily(ranks: int) -> None:
    case = {
        "sizes": SIZES, "steps": 500, "idle": 0.2, "beyond": 1, "uniform": 0.8, "lazy": True,
        "query_lens": [1, 2], "loras": [0, 1], "plan": {"query_lens": [1, 2], "loras": [1]},
        "timeout_s": 120.0,
    }  # fmt: skip
    assert_same(launch(case, ranks, limit_s=600))


def test_a_rank_that_alone_released_its_graphs_raises_on_all_ranks() -> None:
    release = {"fault": {"kind": "release", "at": 10}}
    case = {"sizes": [4], "steps": 20, "lazy": True, "timeout_s": TIMEOUT_S}
    seen = launch(case | {"of_rank": {"1": release}}, 3)
    for rank in (0, 2):
        assert seen[rank]["error"] == "RanksDifferError"
        assert "capture a graph that this one has" in seen[rank]["text"]
    assert seen[1]["error"] == "RankStoppedError"


@pytest.mark.parametrize("seed", range(200))
def test_all_remaining_ranks_stop_at_the_same_step_after_a_loss(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    lost = rng.randrange(ranks)
    kind = rng.choice(["kill", "kill inside", "stop", "delay", "raise", "change"])
    fault = {"kind": kind, "at": rng.randrange(30), "s": 7 * TIMEOUT_S}
    case: dict[str, Any] = {
        "sizes": SIZES, "steps": 60, "timeout_s": TIMEOUT_S, "idle": 0.2, "seed": seed,
        "check": rng.choice(["capture", "sample", "always"]),
        "of_rank": {str(lost): {"check": "off"} if kind == "change" else {"fault": fault}},
    }  # fmt: skip
    stays = kind in ("raise", "change")
    seen = launch(case, ranks, lost=() if stays else (lost,), limit_s=60)
    others = [seen[rank] for rank in range(ranks) if rank != lost]
    error = {"raise": "RankStoppedError", "change": "RanksDifferError"}.get(kind, "RankLostError")
    for each in others:
        assert each["error"] == error, each
        assert f"rank {lost}" in each["text"], each["text"]
        assert each["took"] < 3 * TIMEOUT_S
        shorter = min(len(each["log"]), len(others[0]["log"]))
        assert each["log"][:shorter] == others[0]["log"][:shorter]
