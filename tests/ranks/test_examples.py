"""The examples of several ranks, as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.long


def output_of(*command: str) -> list[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT / "examples",
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ranks_started_by_torchrun_replay_every_step() -> None:
    lines = output_of("-m", "torch.distributed.run", "--nproc-per-node", "2", "ranks.py")
    assert lines == ["rank 0: {'HIT': 200}", "rank 1: {'HIT': 200}"]


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="tests/cuda has it on two GPUs")
def test_two_processes_decode_what_eager_does_on_the_cpu() -> None:
    rows = [line.split() for line in output_of("all_reduce.py")][1:]
    assert [row[:3] for row in rows] == [["0", "PIECEWISE", "equal"], ["1", "PIECEWISE", "equal"]]


def test_ray_actors_replay_the_same_graph_at_each_step() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    assert output_of("ray_ranks.py") == ["100 of 100 steps: one graph on all 2 ranks"]
