"""`expandable_segments:True`, vllm-ascend's default: segments of memory that grow over maps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from schedules import ROOT, need_simulator, python

from tests.draws import rest_long

pytestmark = pytest.mark.npu
EXPANDABLE = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}

TESTS = {
    "test_captures.py": "leak or returns_their_memory",
    "test_ascend_demo.py": "PIECEWISE",
    "test_protocol.py": "groups and (lazy-replay or random:2- or raises)",
    "test_workspaces.py": "",
}
"""Files of this folder that run again, and which of their tests."""

POOL = """
from attention_models import Decoder, differing, eager_outputs, replay_all, runner, steps
from graphrt import GraphPool
pool, decoder = GraphPool(graphrt.get_platform("ascend-sim")), Decoder(2)
torch.npu.empty_cache()
before = torch.npu.memory_reserved()
with runner(decoder, pool=pool) as run:
    run.capture()
    todo = steps(8, most=8)
    print(differing(replay_all(run, todo), eager_outputs(run, todo)))
    pools = {s["segment_pool_id"] for s in torch.npu.memory_snapshot() if s["is_expandable"]}
    print(pool.bytes() > 0, len(pools))
    run.release()
del run
pool.close()
print(torch.npu.memory_reserved() - before)
"""


def test_a_pool_of_expandable_segments_serves_graphs_and_is_given_back():
    need_simulator()
    said = python(POOL, environment=EXPANDABLE).splitlines()
    # Two pools: the process's own and the graphs'.
    assert said[-3:] == ["[]", "True 2", "0"]


@pytest.mark.parametrize("file", rest_long(list(TESTS), "test_captures.py", "test_ascend_demo.py"))
def test_expandable_segments_change_no_result_and_leak_nothing(file):
    need_simulator()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-m", "npu", "-q", "-p", "no:cacheprovider"),
            *("-k", TESTS[file], f"tests/ascend/{file}"),
        ],
        cwd=ROOT,
        env={**os.environ, **EXPANDABLE},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and " passed" in said, said[-3000:]
