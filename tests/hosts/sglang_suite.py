"""SGLang's own unit tests of its graph runners and backends, with or without graphrt.

    python -m tests.hosts.sglang_suite SOURCES [--own] [pytest's arguments]

SOURCES is a checkout of SGLang at tag v0.5.17, the version that is installed; its tests run
unmodified. Those that need a GPU or a model from a hub say so themselves. `--own` leaves graphrt
out.
"""

from __future__ import annotations

import os
import sys

from tests.hosts.engine_suite import run_suite

_UNITS = "registered/unit/model_executor/"
TESTS = (
    f"{_UNITS}runner_backend/test_full_cuda_graph_backend.py",
    f"{_UNITS}runner_backend/test_breakable_cuda_graph_backend.py",
    f"{_UNITS}runner_backend/test_backend_resolution.py",
    f"{_UNITS}runner/test_decode_cuda_graph_runner.py",
    f"{_UNITS}runner/test_decode_cuda_graph_shared_read_fence.py",
    f"{_UNITS}runner/test_hidden_state_graph_recapture.py",
    f"{_UNITS}runner/test_prefill_cuda_graph_padding.py",
    f"{_UNITS}model_runner_components/test_cuda_graph_setup.py",
    f"{_UNITS}test_cuda_graph_buffer_registry.py",
    f"{_UNITS}test_eager_on_graph.py",
    "registered/cuda_graph/breakable/test_breakable_cuda_graph.py",
)


def start(*, own: bool) -> None:
    """Put graphrt into SGLang, unless its own graphs are wanted."""
    os.environ["GRAPHRT_SGLANG"] = str(int(not own))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not own:
        from graphrt.hosts.sglang import install

        install()


def main() -> int:
    """Run them; prints a table, and returns 1 unless all that ran passed."""
    return run_suite(__doc__, "test", TESTS, start)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
