"""A CANN without a value wait, where the signals of tasks are events that are to be reset."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ascend.schedules import ROOT, need_simulator

pytestmark = pytest.mark.npu


def told(*command: str) -> str:
    """What a process says of such a device: its library cannot be changed in this one."""
    need_simulator()
    environment = {**os.environ, "GRAPHRT_SIM_VALUE_WAIT": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def test_with_reset_events_replays_wait_for_their_updates_under_random_schedules():
    chosen = "groups and (lazy-replay or random:2- or random:4- or raises)"
    said = told(
        *("-m", "pytest", "-m", "npu", "-q", "-p", "no:cacheprovider", "-k", chosen),
        "tests/ascend/test_protocol.py",
    )
    assert " passed" in said and " failed" not in said and " error" not in said, said[-3000:]


def test_auto_dispatch_is_refused_on_a_cann_without_value_waits():
    code = """
import graphrt
from graphrt.ascend import AscendOptions, AscendPlatform
import graphrt_ascend_sim as simulator
simulator.start()
platform = AscendPlatform(AscendOptions(update_strategy="auto_dispatch"))
try:
    print(platform._tasks)
except graphrt.GraphRTError as error:
    print(type(error).__name__, error)
"""
    said = told("-c", code)
    assert "MissingCapabilityError" in said and "aclrtValueWait" in said
