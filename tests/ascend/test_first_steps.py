"""The first steps after a capture are ordered behind it, on whichever stream they run."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("schedule", [f"random:{seed}" for seed in range(20)])
def test_first_steps_are_right_under_random_schedules(schedule):
    need_simulator()
    out = python("import first_steps; print(first_steps.all_of_it())", schedule=schedule)
    assert out.splitlines()[-1] == "[]"
