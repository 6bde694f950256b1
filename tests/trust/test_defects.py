"""The table of seeded defects, at the levels that find them; on CUDA with `-m cuda`."""

from __future__ import annotations

import pytest

from tests.trust.defects import DEFECTS, as_expected
from tests.trust.scenario import Defect
from tests.trust.twins import HAS_LEVELS, LEVELS, run

pytestmark = pytest.mark.skipif(not HAS_LEVELS, reason="GraphOptions has no levels of checks yet")

MARKS = {"cpu": (), "cuda": (pytest.mark.cuda,)}


def cases(clean: bool | None = None) -> list[object]:
    """The table, for each device that a defect is for."""
    return [
        pytest.param(each, device, id=f"{each.name}-{device}", marks=MARKS[device])
        for device in MARKS
        for each in DEFECTS
        if device in each.devices and clean in (None, each.clean)
    ]


@pytest.mark.parametrize(("each", "device"), cases(clean=False))
def test_by_default_a_defect_is_found_as_the_table_says(each: Defect, device: str):
    outcome = run(each, "capture", device)
    assert as_expected(outcome, each.expected_on(device)), outcome
    assert each.drifts or outcome.wrong_after == 0, outcome


@pytest.mark.parametrize(("each", "device"), cases(clean=False))
def test_nothing_is_silent_or_said_too_late_at_always(each: Defect, device: str):
    outcome = run(each, "always", device)
    assert outcome.word in ("right", "named"), outcome
    assert each.drifts or outcome.wrong_after == 0, outcome


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("each", "device"), cases(clean=True))
def test_a_clean_forward_is_replayed_and_nothing_is_said(each: Defect, device: str, level: str):
    if each.watched and level == "off" and device == "cuda":
        pytest.skip("at off nobody keeps alive what a warm-up has made")
    outcome = run(each, level, device)
    assert outcome.word == "right", outcome
    assert outcome.hits >= 6, outcome
