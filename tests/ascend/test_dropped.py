"""Streams run out in the middle of `capture()`: what fits serves, dropped sizes are reported."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

pytestmark = pytest.mark.npu


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("check('FULL', 2)", marks=pytest.mark.long),
        pytest.param("check('PIECEWISE', 4)", marks=pytest.mark.long),
        "check('PIECEWISE', 5)",
        pytest.param("check('FULL', 4, side=True)", marks=pytest.mark.long),
        "check('FULL', 5, side=True)",
    ],
)
def test_running_out_of_streams_at_the_third_size_keeps_two_graphs(call):
    need_simulator()
    out = python(f"import dropped; dropped.{call}; print('done')", streams=100)
    assert out.splitlines()[-1] == "done"


def test_a_launch_queue_error_during_capture_does_not_count_as_lack_of_streams():
    need_simulator()
    out = python("import dropped; dropped.ended_queue(); print('done')", streams=100, hang_ms=500)
    assert out.splitlines()[-1] == "done"


def test_a_capture_is_not_begun_if_its_side_streams_do_not_fit():
    need_simulator()
    out = python("import dropped; dropped.too_few_for_a_fork(); print('done')", streams=100)
    assert out.splitlines()[-1] == "done"
