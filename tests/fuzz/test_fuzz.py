"""Random programs: none may give a silent wrong result, raise an unnamed error, or crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import starts
from tests.draws import MORE
from tests.fuzz.counting import Counts, counted, judged_on
from tests.fuzz.growing import grown
from tests.fuzz.minimising import minimised
from tests.fuzz.printing import printed
from tests.fuzz.running import judge, program_of
from tests.test_plugin_example import add_plugin

ROOT = Path(__file__).parents[2]


def _check(counts: Counts) -> None:
    assert not counts.defects, {n: (v.outcome, v.detail) for n, v in counts.defects.items()}
    assert counts.refused_share < 0.4
    assert counts.hits > counts.total  # else they prove little


def test_a_fuzz_seed_gives_the_same_program_each_time() -> None:
    assert [grown(seed) for seed in range(5)] == [grown(seed) for seed in range(5)]


@pytest.mark.draws
def test_random_programs_give_eager_results_or_a_named_error() -> None:
    _check(counted(range(25 * MORE)))


@pytest.mark.long
def test_thousands_of_random_programs_give_eager_results_or_a_named_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--count=5000"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()[-8000:]


PLUGIN = """
from graphrt.cpu import CpuPlatform
from graphrt.platforms import hookimpl

class Mine(CpuPlatform):
    name = "mine"

    def new_graph(self, *args, **kwargs):
        raise SystemError("a graph of the plugin")

@hookimpl
def graphrt_platforms():
    return [Mine()]
"""


@pytest.mark.parametrize("apart", [True, False])
def test_the_fuzzer_runs_the_plugin_that_the_environment_names(tmp_path: Path, apart: bool) -> None:
    add_plugin(tmp_path, "mine", PLUGIN)
    arguments = ["--count=2"] if apart else ["--count=2", "--one-process"]
    done = _fuzz(*arguments, platform="mine", site=tmp_path)
    assert "platform mine, on cpu" in done.stdout and "named 2" in done.stdout, done.stderr
    assert "PlatformError" in done.stdout  # as its graphs raise


def test_the_fuzzer_refuses_a_platform_that_is_not_there(tmp_path: Path) -> None:
    done = _fuzz("--count=2", platform="mine", site=tmp_path)
    assert done.returncode == 2 and "right" not in done.stdout
    assert "'mine'" in done.stderr


def _fuzz(*arguments: str, platform: str, site: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(site), str(ROOT)))
    environ = {**os.environ, "GRAPHRT_PLATFORM": platform, "PYTHONPATH": path}
    return starts.run("-m", "tests.fuzz", *arguments, env=environ)


@pytest.mark.cuda
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_programs_on_a_gpu_give_eager_results_or_a_named_error(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, which run beside each other: in one it was the longest test on a GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _check(counted(range(first, first + 100), "cuda"))


def test_the_fuzzer_finds_and_minimises_a_planted_unfilled_bridge_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the programs can find something: replays leave results of eager parts where they are."""
    monkeypatch.setattr(
        "graphrt.core.replay.entry.EagerPart._deliver_tensor", lambda *args, **kwargs: None
    )
    counts = counted(range(115, 120))
    assert {verdict.outcome for verdict in counts.defects.values()} == {"wrong"}
    number = next(iter(counts.defects))
    small = minimised(program_of(number), judged_on("cpu"), most=80)
    assert judge(small).outcome == "wrong"
    assert len(small.body) <= len(program_of(number).body)


def test_a_printed_fuzz_program_runs_as_a_script(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(printed(program_of(3)))
    done = starts.run(str(file), cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert "outcome=" in done.stdout, done.stderr
