"""Many steps, and many ways to lose a rank at any moment."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.ranks.launching import launch
from tests.ranks.test_agreement import SIZES, assert_same

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("check", ["off", "capture", "first", "sample"])
@pytest.mark.parametrize("query_lens", [[1], [1, 2], [1, 2, 4]])
def test_random_steps(ranks: int, check: str, query_lens: list[int]) -> None:
    case = {
        "sizes": SIZES, "steps": 1000, "check": check, "idle": 0.1, "beyond": 1, "uniform": 0.8,
        "query_lens": query_lens, "loras": [0, 1], "seed": len(query_lens),
        "plan": {"query_lens": query_lens, "loras": [1]},
        "of_rank": {"1": {"fault": {"kind": "drop", "at": 500, "size": 4}}},
    }  # fmt: skip
    assert_same(launch(case, ranks, limit_s=600))


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_to_a_rank_the_others_stop_at_the_same_step(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    lost = rng.randrange(ranks)
    kind = rng.choice(["kill", "kill inside", "stop", "delay", "raise"])
    fault = {"kind": kind, "at": rng.randrange(30), "s": 20}
    case: dict[str, Any] = {
        "sizes": SIZES, "steps": 60, "timeout_s": 3, "idle": 0.2, "seed": seed,
        "check": rng.choice(["capture", "sample", "always"]),
        "of_rank": {str(lost): {"fault": fault}},
    }  # fmt: skip
    seen = launch(case, ranks, lost=() if kind == "raise" else (lost,), limit_s=60)
    others = [seen[rank] for rank in range(ranks) if rank != lost]
    for each in others:
        assert each["error"] == ("RankStoppedError" if kind == "raise" else "RankLostError"), each
        assert f"rank {lost}" in each["text"], each["text"]
        assert each["took"] < 9
        shorter = min(len(each["log"]), len(others[0]["log"]))
        assert each["log"][:shorter] == others[0]["log"][:shorter]
