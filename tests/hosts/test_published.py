"""The published vllm-ascend, served by graphrt, in an environment that has it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.published_decode import KINDS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.npu


def run(*arguments: str) -> str:
    for package in ("vllm", "vllm_ascend", "graphrt_ascend_sim"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} in this environment: see docs/how-to/vllm_ascend.md")
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"GRAPHRT_PLATFORM": "ascend-sim", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_published_vllm_ascend_attention_decodes_200_steps_as_eager(kind: str) -> None:
    if kind == "mixed":
        version = importlib.metadata.version("vllm-ascend")
        if version.startswith("0.23"):
            pytest.skip(f"vllm-ascend {version} has no PagedAttentionGraphParam")
    last = run("tests.hosts.published_decode", "200", kind).splitlines()[-1]
    served = f"graphrt.hosts.vllm_ascend.wrapper served 200 steps of kind {kind}"
    assert last == f"{served}; [] differ"
