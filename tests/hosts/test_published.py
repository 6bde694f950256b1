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


PACKAGES = ("vllm", "vllm_ascend", "graphrt_ascend_sim")
AFTER_0_23 = ("mixed", "ranks")
"""Kinds of graphs that vllm-ascend 0.23 does not have, or has under other names."""


def skip_reason(kind: str) -> str:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"needs {package} in this environment: see docs/how-to/vllm_ascend.md"
    version = importlib.metadata.version("vllm-ascend")
    is_absent = kind in AFTER_0_23 and version.startswith("0.23.")
    return f"vllm-ascend {version} has no such graphs: {KINDS[kind]}" if is_absent else ""


def run(*arguments: str) -> str:
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
    reason = skip_reason(kind)
    if reason:
        pytest.skip(reason)
    last = run("tests.hosts.published_decode", "200", kind).splitlines()[-1]
    wrapper = "__main__" if kind == "alone" else "graphrt.hosts.vllm_ascend.wrapper"
    assert last == f"{wrapper} served 200 steps of kind {kind}; [] differ"
