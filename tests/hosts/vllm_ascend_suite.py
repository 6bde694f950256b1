"""vllm-ascend's own unit tests of its graphs over the simulator, with or without graphrt.

    python -m tests.hosts.vllm_ascend_suite SOURCES [--own] [pytest's arguments]

SOURCES is an unpacked source distribution of vllm-ascend, of the version that is installed; its
tests run unmodified, over the real torch_npu. `--own` leaves graphrt out. It needs vllm,
vllm-ascend and graphrt-ascend-sim in this environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = (
    "compilation/a2/test_acl_graph.py",
    "device_allocator/test_sleep_mem_optimized.py",
    "worker/test_encoder_acl_graph.py",
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
    """Run them; prints a table, and returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--own", action="store_true")
    known, rest = parser.parse_known_args()
    os.environ["GRAPHRT_PLATFORM"] = "ascend-sim"
    pretend_npu_smi()
    start(own=known.own)
    os.chdir(known.sources)
    sys.path.insert(0, str(known.sources))
    # `tests` is this repository's until here.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    told = Told()
    # graphrt's settings of pytest are not theirs.
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(known.sources), "-c", os.devnull]
    paths = [str(Path("tests/ut") / test) for test in TESTS if (Path("tests/ut") / test).exists()]
    pytest.main([*options, *paths, *rest], plugins=[told])
    for test, (outcome, why) in told.outcomes.items():
        print(f"| {test.removeprefix('tests/ut/')} | {outcome} | {why[:120]} |")
    outcomes = [outcome for outcome, _ in told.outcomes.values()]
    failed = outcomes.count("failed")
    print(f"{outcomes.count('passed')} passed, {failed} failed of {len(outcomes)}")
    return failed


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the simulator may crash when the process unloads it
