"""vLLM's own unit tests of its graphs and of what compiles pieces, with or without graphrt.

    python -m tests.hosts.vllm_suite SOURCES [--own] [pytest's arguments]

SOURCES is an unpacked source distribution of vLLM, of the version that is installed; its tests run
unmodified. Where there is no GPU, vLLM's platform is a stand-in for a CPU, with and without
graphrt, and tests that need a GPU, or a model from a hub, say so themselves. `--own` leaves graphrt
out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

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


class Told:
    """What each test came to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = "" if crash is None else str(crash.message).splitlines()[0]
            self.outcomes[report.nodeid] = report.outcome, why


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
    """Run them; prints a table, and returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--own", action="store_true")
    known, rest = parser.parse_known_args()
    start(own=known.own)
    os.chdir(known.sources)
    sys.path.insert(0, str(known.sources))
    # `tests` is this repository's until here.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    told = Told()
    # graphrt's settings of pytest are not theirs; their conftest needs more than their tests.
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    options += ["--rootdir", str(known.sources)]
    paths = [str(Path("tests") / test) for test in TESTS if (Path("tests") / test).exists()]
    pytest.main([*options, *paths, *rest], plugins=[told])
    for test, (outcome, why) in told.outcomes.items():
        print(f"| {test.removeprefix('tests/')} | {outcome} | {why[:120]} |")
    counts = Counter(outcome for outcome, _ in told.outcomes.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return counts["failed"]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
