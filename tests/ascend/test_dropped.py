"""Streams that run out in the middle of `capture()`: what fits serves, the rest is named."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

pytestmark = pytest.mark.npu


@pytest.mark.parametrize(
    "call",
    [
        "check('FULL', 2)",
        pytest.param("check('PIECEWISE', 4)", marks=pytest.mark.long),
        "check('PIECEWISE', 5)",
        pytest.param("check('FULL', 4, side=True)", marks=pytest.mark.long),
        "check('FULL', 5, side=True)",
    ],
)
def test_running_out_at_the_third_of_20_sizes_leaves_two_on_graphs(call):
    need_simulator()
    out = python(f"import dropped; dropped.{call}; print('done')", streams=100)
    assert out.splitlines()[-1] == "done"


def test_an_error_in_the_queue_of_launches_is_not_taken_for_a_lack_of_room():
    need_simulator()
    out = python("import dropped; dropped.ended_queue(); print('done')", streams=100, hang_ms=500)
    assert out.splitlines()[-1] == "done"


def test_a_graph_whose_side_streams_do_not_fit_is_not_begun():
    need_simulator()
    out = python("import dropped; dropped.too_few_for_a_fork(); print('done')", streams=100)
    assert out.splitlines()[-1] == "done"
