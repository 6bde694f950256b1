"""All-reduces between two GPUs inside graphs: right, and gone before their communicator is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "all_reduce.py"


@pytest.fixture
def two_gpus() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, found {count}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs a torch that was built with NCCL")


def run_to_its_end(*command: str, seconds: float) -> tuple[int, str]:
    """Exit code and output; what hangs is killed with the processes that it spawned, and fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s:\n{output}")
    return process.returncode, output


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_replayed_all_reduces_equal_eager_ones_and_both_ranks_exit(mode):
    code, output = run_to_its_end(sys.executable, str(SCRIPT), mode, seconds=240)
    assert code == 0, output
    rows = [line.split() for line in output.splitlines()]
    results = [row[:3] for row in rows if len(row) == 5 and row[0].isdigit()]
    assert results == [["0", mode, "equal"], ["1", mode, "equal"]], output
