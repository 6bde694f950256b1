"""Whether tests notice a mutant: they run in a process of its own over a copy of the tree."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mutants.mutate import Mutant

ROOT = Path(__file__).resolve().parents[2]
NO_END = "no end"
CONFORMANCE = "tests/test_conformance.py"
# The tests of what a folder is for first: most mutants end there.
TESTS: dict[str, tuple[str, ...]] = {
    "graphrt/core/base/": (
        "tests/core/test_tree.py",
        "tests/core/test_undo.py",
        "tests/core/test_options.py",
        "tests/core/test_plan.py",
        "tests/core/test_size_bombs.py",
        "tests/core/test_named_errors.py",
        "tests/core/test_host_mistakes.py",
        "tests/core/test_tensors_left_by_eager_parts.py",
        "tests/trust/test_write_watch.py",
        "tests/trust/test_watching.py",
        "tests/trust/test_gradients.py",
        "tests/trust/test_modes.py",
        "tests/core/test_wrapper_arguments.py",
        "tests/test_private_torch.py",
        "tests/test_surface.py",
        "tests/observe/test_progress.py",
    ),
    "graphrt/core/batch/": (
        "tests/core/test_descriptor.py",
        "tests/core/test_modes.py",
        "tests/core/test_dispatcher.py",
        "tests/core/test_dispatch_odd.py",
        "tests/core/test_missing_graph.py",
        "tests/core/test_inputs.py",
        "tests/core/test_advice_followed.py",
        "tests/core/test_output*.py",
    ),
    "graphrt/core/device/": (
        "tests/core/test_devices.py",
        "tests/core/test_plugins.py",
        "tests/core/test_error_chain.py",
        "tests/core/test_lent_streams.py",
        "tests/core/test_open_captures.py",
        "tests/core/test_pool_memory.py",
        "tests/cuda/test_captures_logic.py",
        "tests/cpu/test_cpu_memory.py",
        "tests/accelerator",
        "tests/test_least_platform.py",
        CONFORMANCE,
    ),
    "graphrt/core/dispatch/": (
        "tests/core/test_dispatch*.py",
        "tests/core/test_missing_graph.py",
        "tests/core/test_counts_and_texts.py",
        CONFORMANCE,
    ),
    "graphrt/core/inputs/": (
        "tests/core/test_*put*.py",
        "tests/core/test_slots.py",
        "tests/core/test_size_bombs.py",
        "tests/core/test_named_errors.py",
        "tests/core/test_runner.py",
        CONFORMANCE,
        "tests/accelerator",
    ),
    "graphrt/core/replay/": (
        "tests/core/test_segments.py",
        "tests/core/test_host_args.py",
        "tests/core/test_wrapper_arguments.py",
        "tests/core/test_eager_parts.py",
        "tests/core/test_missing_graph.py",
        "tests/core/test_nested.py",
        "tests/core/test_*outputs.py",
        "tests/core/test_host_pools.py",
        "tests/core/test_pieces_of_a_step.py",
        CONFORMANCE,
        "tests/cpu/test_cpu_tasks.py",
        "tests/cpu/test_cpu_replay.py",
        "tests/accelerator",
    ),
    "graphrt/core/capture/": (
        "tests/core/test_segments.py",
        "tests/trust/test_state.py",
        "tests/core/test_source_lines.py",
        "tests/core/test_options.py",
        "tests/core/test_eager_parts.py",
        "tests/core/test_missing_graph.py",
        "tests/core/test_nested.py",
        "tests/core/test_named_errors.py",
        "tests/core/test_tensors_left_by_eager_parts.py",
        "tests/core/test_caller_tensors.py",
        "tests/core/test_copies_from_host.py",
        "tests/core/test_keyed_graphs.py",
        "tests/trust/test_*constants.py",
        "tests/trust/test_host_scalars.py",
        "tests/trust/test_saved_writes.py",
        CONFORMANCE,
        "tests/cpu/test_cpu_refusals.py",
        "tests/accelerator",
    ),
    "graphrt/core/plan/": (
        "tests/core/test_plan*.py",
        "tests/core/test_sizes.py",
        "tests/core/test_budget.py",
        "tests/core/test_modes.py",
        "tests/test_cli.py",
    ),
    "graphrt/core/runner/": (
        "tests/core/test_runner.py",
        "tests/core/test_counts_and_texts.py",
        "tests/core/test_lazy.py",
        "tests/core/test_capture_next.py",
        "tests/core/test_slots.py",
        "tests/core/test_runner_faults.py",
        "tests/core/test_stream_room.py",
        "tests/core/test_surroundings.py",
        "tests/core/test_weights.py",
        "tests/core/test_advice_followed.py",
        "tests/core/test_odd_arguments.py",
        "tests/core/test_host_mistakes.py",
        "tests/test_cli.py",
        "tests/trust/test_levels.py",
        "tests/trust/test_report.py",
        "tests/trust/test_trial.py",
        "tests/trust/test_modes.py",
        "tests/trust/test_gradients.py",
        "tests/trust/test_wrapper_trials.py",
        "tests/observe/test_progress.py",
        CONFORMANCE,
    ),
    "graphrt/trust/": (
        "tests/trust/test_*.py",
        "tests/core/test_weights.py",
        "tests/cuda/test_pointers_logic.py",
        CONFORMANCE,
    ),
    "graphrt/compile/pieces/": (
        "tests/compile/test_compiled_module.py",
        "tests/compile/test_partition.py",
        "tests/compile/test_one_size.py",
        "tests/compile/test_compile_runner.py",
        "tests/compile/test_cache_hits.py",
    ),
}
SIMULATED = os.environ.get("GRAPHRT_PLATFORM") == "ascend-sim"
_PROTOCOL = (
    "tests/ascend/test_update_orders.py",
    "tests/ascend/test_auto_dispatch.py",
    "tests/ascend/test_captures.py",
    "tests/ascend/test_watchdog.py",
    "tests/ascend/test_workspaces.py",
    "tests/ascend/test_protocol.py",
)
# Asked on the simulator, where core is not changed.
ASCEND_TESTS: dict[str, tuple[str, ...]] = {
    "graphrt/ascend/update/": (
        "tests/ascend/test_deferred.py",
        "tests/ascend/test_unchanged.py",
        *_PROTOCOL,
    ),
    "graphrt/ascend/attention/": (
        "tests/ascend/test_attention.py",
        "tests/ascend/test_workspaces.py",
        "tests/ascend/test_atb_attention.py",
        "tests/ascend/test_ascend_modes.py",
    ),
    "graphrt/hosts/vllm_ascend/": ("tests/hosts/test_vllm_ascend.py",),
    # What is left of it: captures, memory, options, platform, updates that come later, watchdog.
    "graphrt/ascend/": (
        "tests/ascend/test_deferred.py",
        *_PROTOCOL,
        "tests/ascend/test_streams_kept.py",
        "tests/ascend/test_ascend_modes.py",
        "tests/ascend/test_dropped.py",
    ),
}
ELSEWHERE = (
    "graphrt/ascend/budget/",
    "graphrt/ascend/driver/",
    "graphrt/core/base/_native_door.py",
    "graphrt/core/base/native_sources.py",
)
"""Tables of figures and of error texts, and the build of the C part: with tests of their own."""
CHANGED = ASCEND_TESTS if SIMULATED else TESTS
"""The folders that are changed, and what is asked first: by where the tests run."""
REST = (
    ("tests/ascend", "tests/hosts/test_vllm_ascend.py")
    if SIMULATED
    else (
        "tests/core",
        "tests/cpu",
        CONFORMANCE,
        "tests/accelerator",
        "tests/demo",
        "tests/trust",
        "tests/compile",
    )
)
"""What runs where the tests of the folder noticed nothing."""


@dataclass(frozen=True)
class Result:
    """`by` is the test that noticed; "" where none did."""

    mutant: Mutant
    by: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test failed, did not end, or nothing could be imported."""
        return bool(self.by)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what tests need; no byte code is written, which could be that of a mutant."""
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in ("graphrt", "tests", "examples", "benchmarks", "packages", "ci", "docs"):
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "build")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "Makefile", "mkdocs.yml", "constraints.txt"):
            shutil.copy(ROOT / name, tree / name)
        yield tree


def folder_of(file: str) -> str:
    """The folder of `TESTS` that a file is in."""
    return next(folder for folder in CHANGED if file.startswith(folder))


def asked_first(file: str) -> list[str]:
    """The tests that are asked first of a mutant in `file`."""
    patterns = CHANGED[folder_of(file)]
    files = []
    for pattern in patterns:
        files += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
    return list(dict.fromkeys(files))


def result_of(mutant: Mutant, tree: Path, *, thorough: bool, timeout_s: int) -> Result:
    """Run the tests over the mutant, those of its folder first."""
    place = tree / mutant.file
    was = place.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        place.write_text(mutant.source, encoding="utf-8")
        by = failing(tree, asked_first(mutant.file), timeout_s)
        if by == NO_END:
            # Perhaps the machine had stopped.
            by = failing(tree, asked_first(mutant.file), timeout_s)
        if not by and thorough:
            by = failing(tree, REST, timeout_s * 5)
    finally:
        place.write_text(was, encoding="utf-8")
    return Result(mutant, by, time.monotonic() - start)


def failing(tree: Path, tests: Sequence[str], timeout_s: int) -> str:
    """The first test that fails, "no end" or "no start"; "" if all pass.

    Forked, with torch already there: graphrt must not have been imported yet.
    """
    assert "graphrt" not in sys.modules
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        _run_tests(tree, tests, writer)
    os.close(writer)
    deadline = time.monotonic() + timeout_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            return NO_END
        time.sleep(0.02)
    with os.fdopen(reader) as said:
        # A process that died says nothing.
        return {"passed": "", "": "died"}.get(text := said.read(), text)


def _run_tests(tree: Path, tests: Sequence[str], writer: int) -> None:
    import pytest

    class First:
        name = "no start"

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and self.name == "no start":
                self.name = report.nodeid

    first = First()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(tree)
    # The tree's own tests, not those that this module is one of.
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".") != ROOT)]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    code = pytest.main([*options, *tests], plugins=[first])
    os.write(writer, (b"passed" if code == 0 else first.name.encode()))
    os._exit(0)
