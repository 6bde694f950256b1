"""vLLM's own unit tests of its graphs and of what compiles pieces, with or without graphrt.

    python -m tests.hosts.vllm_suite SOURCES [--own] [pytest's arguments]

SOURCES is an unpacked source distribution of vLLM, of the version that is installed; its tests run
unmodified. Where there is no GPU, vLLM's platform is a stand-in for a CPU, with and without
graphrt, and tests that need a GPU, or a model from a hub, say so themselves. `--own` leaves graphrt
out.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.hosts.engine_suite import run_suite

TESTS = (
    "v1/cudagraph/test_cudagraph_dispatch.py",
    "v1/cudagraph/test_cudagraph_manager.py",
    "v1/cudagraph/test_breakable_cudagraph.py",
    "v1/cudagraph/test_encoder_cudagraph.py",
    "compile/test_config.py",
    "compile/test_codegen.py",
    "compile/test_graph_partition.py",
    "compile/test_wrapper.py",
    "compile/test_decorator.py",
)


def start(*, own: bool) -> None:
    """Put graphrt into vLLM, unless its own graphs are wanted."""
    os.environ["GRAPHRT_VLLM"] = str(int(not own))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.cuda.is_available():
        os.environ["GRAPHRT_PLATFORM"] = "cpu"
        from tests.hosts import vllm_on_cpu

        vllm_on_cpu.load()
    if not own:
        from graphrt.hosts.vllm import install

        install()


def main() -> int:
    """Run them; prints a table, and returns 1 unless all that ran passed."""
    # Their conftest needs more than their tests.
    return run_suite(__doc__, "tests", TESTS, start, ["--noconftest"])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
