"""Two threads with runners of their own under random schedules, on streams that they share."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

from tests.draws import MORE

pytestmark = [pytest.mark.npu, pytest.mark.draws]


def test_two_threads_on_shared_streams_equal_eager_whatever_fails_between():
    need_simulator()
    count = 6 * MORE
    code = f"import random_schedules; random_schedules.under(range({count}))"
    said = python(code, hang_ms=5000, timeout_s=60 * count)
    lines = [line for line in said.splitlines() if " | " in line]
    assert len(lines) == count
    assert [line for line in lines if not line.endswith("| right")] == []
