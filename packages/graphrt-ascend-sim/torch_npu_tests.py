"""torch_npu's own graph tests over the simulator: `python torch_npu_tests.py TEST_NPU_FOLDER`.

TEST_NPU_FOLDER is `test/npu` of a checkout of github.com/Ascend/pytorch; its tests run from there,
unmodified. They need pytest, expecttest and numpy. Prints a table of results, a row per file.

Tests of torch_npu's update without a workspace, as the device allows and the simulator refuses.
Those of if-nodes skip themselves, whatever the device, as theirs lacks what the simulator has; so
this one skip is taken away, and they run on a device with software queues, which if-nodes need.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATTERNS = ("test_aclgraph_*.py", "test_aclnn_random_aclgraph.py", "test_compile_aclgraph_*.py")
PATTERNS += ("test_npugraph_handler.py", "test_graph_tree.py")
LIMIT_S = 600
CONDITIONS = "test_aclgraph_conditional_nodes.py"
LACKING = "Conditional ModelRI RTS interfaces are unavailable in the current UT environment"
skip = unittest.skip


def skip_but_for_conditions(reason: str) -> Callable[[Any], Any]:
    """`unittest.skip`, but for the one reason."""
    return (lambda tests: tests) if reason == LACKING else skip(reason)


def pytest_configure() -> None:
    """Of the plugin of pytest that this file is, too."""
    unittest.skip = skip_but_for_conditions


def counts(file: Path) -> dict[str, int]:
    """Tests by outcome, as pytest's last line says; `ended` is 1 where there is none."""
    environ = os.environ | {
        "GRAPHRT_SIM_ALLOCATING_UPDATES": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-m", "graphrt_ascend_sim", "-m", "pytest", "-q", file.name]
    command += ["-p", "no:cacheprovider"]
    if file.name == CONDITIONS:
        here = str(Path(__file__).resolve().parent)
        environ["PYTHONPATH"] = os.pathsep.join([here, environ.get("PYTHONPATH", "")])
        environ["GRAPHRT_SIM_SOFTWARE_QUEUES"] = "1"
        command += ["-p", Path(__file__).stem]
    try:
        done = subprocess.run(
            command, cwd=file.parent, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"ended": 1}
    lines = [line for line in done.stdout.splitlines() if re.search(r" in [\d.]+s", line)]
    if not lines:
        return {"ended": 1}
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", lines[-1])
    return {outcome: int(number) for number, outcome in found}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    print("| file | passed | failed | skipped |\n|---|---|---|---|")
    passed = failed = 0
    for file in sorted({path for pattern in PATTERNS for path in folder.glob(pattern)}):
        found = counts(file)
        bad = sum(found.get(name, 0) for name in ("failed", "error", "errors", "ended"))
        passed, failed = passed + found.get("passed", 0), failed + bad
        print(f"| {file.name} | {found.get('passed', 0)} | {bad} | {found.get('skipped', 0)} |")
    print(f"\n{passed} of {passed + failed} that are not skipped pass.")


if __name__ == "__main__":
    main()
