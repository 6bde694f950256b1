"""SGLang's own unit tests of its graph runners and backends, with or without graphrt.

    python -m tests.hosts.sglang_suite SOURCES [--own] [pytest's arguments]

SOURCES is a checkout of SGLang at tag v0.5.17, the version that is installed; its tests run
unmodified. Those that need a GPU say so themselves, or cannot be collected without one. `--own`
leaves graphrt out.
"""

from __future__ import annotations

import os
import sys

from tests.hosts.engine_suite import run_suite

_UNITS = "registered/unit/"
_EXECUTOR = f"{_UNITS}model_executor/"
TESTS = (
    f"{_EXECUTOR}model_runner_components/test_attention_backend_setup.py",
    f"{_EXECUTOR}model_runner_components/test_cuda_graph_setup.py",
    f"{_EXECUTOR}runner/test_hidden_state_graph_recapture.py",
    f"{_EXECUTOR}runner/test_prefill_cuda_graph_padding.py",
    f"{_EXECUTOR}test_cuda_graph_buffer_registry.py",
    f"{_EXECUTOR}test_forward_metadata_plan_record.py",
    f"{_EXECUTOR}test_mlp_sync_pad_unpad.py",
    f"{_EXECUTOR}test_prefill_cuda_graph_runner.py",
    f"{_EXECUTOR}test_prefill_cuda_graph_runner_helpers.py",
    f"{_UNITS}batch_overlap/test_tbo_cuda_graph_num_token_device.py",
    f"{_UNITS}layers/test_radix_attention.py",
    f"{_UNITS}multimodal/test_vit_cuda_graph_runner.py",
    f"{_UNITS}spec/test_eagle_draft_cuda_graph_runner.py",
    "registered/cuda_graph/breakable/test_breakable_cuda_graph.py",
    # Graph runners of drafts, which capture by their Full backend, over triton attention.
    "registered/attention/unittests/dense/test_triton.py",
)
OF_A_HUB = "TestBreakableCudaGraph::test_gsm8k_accuracy"
"""Starts a server on a model of a hub."""


def start(*, own: bool) -> None:
    """Put graphrt into SGLang, unless its own graphs are wanted."""
    os.environ["GRAPHRT_SGLANG"] = str(int(not own))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not own:
        from graphrt.hosts.sglang import install

        install()


def main() -> int:
    """Run them; prints a table, and returns 1 unless all that ran passed."""
    options = (f"--deselect=test/{TESTS[-2]}::{OF_A_HUB}", "--continue-on-collection-errors")
    return run_suite(__doc__, "test", TESTS, start, options)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
