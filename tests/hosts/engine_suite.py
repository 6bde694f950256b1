"""An engine's own tests, unmodified, in this process: what both suites of an engine do."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


class Told:
    """What each test came to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = "" if crash is None else str(crash.message).splitlines()[0]
            self.outcomes[report.nodeid] = report.outcome, why

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "not collected", str(report.longrepr).splitlines()[-1]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.outcomes |= {item.nodeid: ("not run", "deselected") for item in items}


def run_suite(
    description: str | None,
    folder: str,
    tests: Sequence[str],
    start: Callable[..., None],
    options: Sequence[str] = (),
) -> int:
    """Run `tests` of `folder` in the sources that the command line names, and print a table.

    Returns 0 only if all that ran passed, and one did: a run that collects nothing has failed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--own", action="store_true", help="leave graphrt out")
    known, rest = parser.parse_known_args()
    sources = known.sources.resolve()
    paths = [Path(folder) / test for test in tests if (sources / folder / test).exists()]
    if not paths:  # without a path pytest would take all tests of the engine
        print(f"no test is there: {', '.join(tests)} in {sources / folder}")
        return 1
    start(own=known.own)
    os.chdir(sources)
    sys.path.insert(0, str(sources))
    # `tests` is this repository's until here.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    told = Told()
    # graphrt's settings of pytest are not theirs.
    common = ["-q", "-p", "no:cacheprovider", "--rootdir", str(sources), "-c", os.devnull]
    code = pytest.main([*common, *options, *map(str, paths), *rest], plugins=[told])
    for test, (outcome, why) in told.outcomes.items():
        print(f"| {test.removeprefix(folder + '/')} | {outcome} | {why[:120]} |")
    counts = Counter(outcome for outcome, _ in told.outcomes.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test")
    return int(code != 0 or not counts["passed"])
