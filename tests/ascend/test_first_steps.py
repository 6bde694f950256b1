"""The first steps after a capture are ordered behind it, on whichever stream they run."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

from tests.draws import rest_long

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("first", rest_long(range(0, 20, 5), 0))
def test_the_first_steps_after_a_capture_are_right_under_random_schedules(first):
    need_simulator()
    # To start a process with torch_npu takes longer than the steps under one schedule.
    code = f"import first_steps; print(first_steps.under(range({first}, {first + 5})))"
    out = python(code, schedule=f"random:{first}")
    assert out.splitlines()[-1] == "[]"
