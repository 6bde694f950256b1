"""vllm-ascend's own unit tests of its graphs over the simulator, with or without graphrt.

    python -m tests.hosts.vllm_ascend_suite SOURCES [--own] [pytest's arguments]

SOURCES is an unpacked source distribution of vllm-ascend, of the version that is installed; its
tests run unmodified, over the real torch_npu. `--own` leaves graphrt out. It needs vllm,
vllm-ascend and graphrt-ascend-sim in this environment.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.hosts.engine_suite import run_suite

TESTS = (
    "compilation/a2/test_acl_graph.py",
    "compilation/test_lora_graph_params.py",
    "device_allocator/test_sleep_mem_optimized.py",
    "spec_decode/test_eagle_aclgraph_source_regression.py",
    "worker/test_encoder_acl_graph.py",
)

MOCKED = "it replaces torch by a mock in vllm-ascend's own module, and counts the calls of that"
NOT_OF_GRAPHRT = {
    "test_call_capture_graph_first_time": MOCKED,
    "test_call_capture_graph_with_gc_disable": MOCKED,
    "test_call_capture_graph_with_weak_ref_output": MOCKED,
    "test_call_replay_graph": MOCKED,
    "test_call_with_debug_mode_input_address_mismatch": "it expects an AssertionError; graphrt "
    "raises StaleInputError",
}
"""Tests that are not run with graphrt, by name, and why."""


def start(*, own: bool) -> None:
    """Load the simulator, and put graphrt into vllm-ascend unless its own graphs are wanted."""
    import graphrt

    graphrt.get_platform("ascend-sim")
    import torch_npu  # noqa: F401
    import vllm_ascend.ops  # noqa: F401 - its attention can only be imported behind it

    if not own:
        from graphrt.hosts.vllm_ascend import install

        install()


def pretend_npu_smi() -> None:
    """Its tests replace torch_npu with mocks where no tool of this name finds an NPU."""
    folder = Path(tempfile.mkdtemp())
    tool = folder / "npu-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> int:
    """Run them; prints a table, and returns 1 unless all that ran passed."""
    os.environ["GRAPHRT_PLATFORM"] = "ascend-sim"
    pretend_npu_smi()
    options = []
    for name, reason in NOT_OF_GRAPHRT.items() if "--own" not in sys.argv else ():
        print(f"not run: {name}: {reason}")
        options.append(f"--deselect=tests/ut/{TESTS[0]}::TestACLGraphWrapper::{name}")
    return run_suite(__doc__, "tests/ut", TESTS, start, options)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the simulator may crash when the process unloads it
