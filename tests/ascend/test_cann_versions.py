"""Other versions of CANN: one without a value wait, where the signals of tasks are events that are
to be reset, and those before and behind the stream attribute that torch_npu sets at a capture."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ascend.schedules import ROOT, need_simulator

pytestmark = pytest.mark.npu


def told(*command: str, cann: str = "8.1.RC1") -> str:
    """What a process says of such a device: its library cannot be changed in this one."""
    need_simulator()
    environment = {**os.environ, "GRAPHRT_SIM_CANN": cann}
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


@pytest.mark.parametrize(("cann", "attributes"), [("8.3.RC1", 0), ("8.5.0", 2)])
def test_torch_npu_captures_as_for_the_cann_that_the_device_says_it_is(cann, attributes):
    code = """
import graphrt_ascend_sim as simulator
simulator.start()
import torch
graph, x = torch.npu.NPUGraph(), torch.ones(4, device="npu")
with torch.npu.graph(graph):
    y = x + 1
graph.replay()
print("says", torch.npu.utils.get_cann_version(), simulator.calls("aclrtSetStreamAttribute"))
print("computes", y.tolist())
"""
    said = told("-c", code, cann=cann)
    assert f"says {cann} {attributes}" in said and "computes [2.0, 2.0, 2.0, 2.0]" in said, said


def test_attention_with_rope_and_the_protocol_run_on_the_cann_of_2025():
    said = told(
        *("-m", "pytest", "-m", "npu", "-q", "-p", "no:cacheprovider"),
        *("-k", "latent or groups and (lazy-replay or random:2- or raises)"),
        *("tests/ascend/test_latent_attention.py", "tests/ascend/test_protocol.py"),
        cann="8.3.RC1",
    )
    assert " passed" in said and " failed" not in said and " error" not in said, said[-3000:]


def test_a_cann_that_the_simulator_is_not_is_refused():
    said = told("-c", "import graphrt_ascend_sim; graphrt_ascend_sim.start()", cann="7.0")
    assert "PlatformError" in said and "8.3.RC1" in said
