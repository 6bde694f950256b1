"""The table of seeded defects, at the levels that find them; on CUDA with `-m cuda`."""

from __future__ import annotations

import pytest

from tests.draws import rest_long
from tests.trust.defects import DEFECTS, as_expected
from tests.trust.scenario import Defect
from tests.trust.twins import HAS_LEVELS, LEVELS, run

pytestmark = pytest.mark.skipif(not HAS_LEVELS, reason="GraphOptions has no levels of checks yet")

MARKS = {"cpu": (), "cuda": (pytest.mark.cuda,)}
LONG = (pytest.mark.long,)


def cases(clean: bool, kept: int = 1) -> list[object]:
    """The table, for each device that a defect is for; on a CPU only each `kept`-th of those that
    the default level names are not long."""
    return [
        pytest.param(
            each,
            device,
            id=f"{each.name}-{device}",
            marks=(
                *MARKS[device],
                *(LONG if device == "cpu" and place % kept and each.expected == "named" else ()),
            ),
        )
        for device in MARKS
        for place, each in enumerate(DEFECTS)
        if device in each.devices and clean is each.clean
    ]


@pytest.mark.parametrize(("each", "device"), cases(clean=False))
def test_at_the_default_level_a_defect_has_the_outcome_of_the_table(each: Defect, device: str):
    outcome = run(each, "capture", device)
    assert as_expected(outcome, each.expected_on(device)), outcome
    assert each.drifts or outcome.wrong_after == 0, outcome


# All that the default level does not name at once, and every third of the others.
@pytest.mark.parametrize(("each", "device"), cases(clean=False, kept=3))
def test_at_level_always_every_defect_is_right_or_named_in_time(each: Defect, device: str):
    outcome = run(each, "always", device)
    assert outcome.word in ("right", "named"), outcome
    assert each.drifts or outcome.wrong_after == 0, outcome


@pytest.mark.parametrize("level", rest_long(LEVELS, "capture", "always"))
@pytest.mark.parametrize(("each", "device"), cases(clean=True))
def test_a_clean_forward_is_replayed_without_warnings_at_every_level(
    each: Defect, device: str, level: str
):
    if each.watched and level == "off" and device == "cuda":
        pytest.skip("at off nobody keeps alive what a warm-up has made")
    outcome = run(each, level, device)
    assert outcome.word == "right", outcome
    assert outcome.hits >= 6, outcome
