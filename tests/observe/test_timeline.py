"""`graphrt.observe.trace`: what the file holds, and that a runner is left as it was."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.observe import Metrics, trace
from graphrt.observe.timeline import TRACKS
from tests.observe.planted import MIXED, PADDED, TOO_LARGE, planted_runner, run_planted, step


def slices_of(path: Path, pid: int = 1) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    slices: dict[str, list[dict[str, Any]]] = {name: [] for name in TRACKS}
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            slices[TRACKS[event["tid"]]].append(event)
    return slices


def test_a_trace_file_shows_each_planted_fault(tmp_path: Path):
    runner = planted_runner()
    with trace(tmp_path / "trace.json", runner):
        run_planted(runner)
    slices = slices_of(tmp_path / "trace.json")
    names = [event["name"] for event in slices["findings"]]
    assert [name.partition(":")[0] for name in names] == ["error", "warning", "warning"]
    assert "quarantine" in names[0] and "TOO_LARGE" in names[1] and "50% padding" in names[2]
    assert all(event["args"]["try"] for event in slices["findings"])
    eager = [event["args"]["reason"] for event in slices["eager steps"]]
    assert eager == ["TOO_LARGE"] * TOO_LARGE + ["QUARANTINED"] * MIXED
    steps = slices["steps by graphs"]
    padded = [event for event in steps if event["args"]["live_tokens"] == 8]
    assert len(steps) == 4 + PADDED and len(padded) == PADDED
    assert {event["name"] for event in padded} == {"FULL [16 tokens 16 reqs], 8 live"}


def test_traced_captures_and_trials_lie_inside_of_their_steps_in_order(tmp_path: Path):
    runner = planted_runner()
    with trace(tmp_path / "trace.json", runner):
        step(runner, 2)
        runner.recapture()
        step(runner, 2)
    slices = slices_of(tmp_path / "trace.json")
    names = [event["name"].split()[0] for event in slices["captures and trials"]]
    # The captures before the trace are gone with their graphs.
    assert (names.count("capture"), names.count("warm-up"), names.count("trial")) == (6, 6, 2)
    for trial, its_step in zip(
        [e for e in slices["captures and trials"] if e["name"].startswith("trial")],
        slices["steps by graphs"],
        strict=True,
    ):
        assert its_step["ts"] <= trial["ts"]
        assert trial["ts"] + trial["dur"] <= its_step["ts"] + its_step["dur"]
        assert its_step["args"]["trial"]
    assert all(event["ts"] >= 0 for track in slices.values() for event in track)


def test_captures_before_the_trace_are_drawn_just_before_the_first_step(tmp_path: Path):
    runner = planted_runner()
    time.sleep(0.5)
    with trace(tmp_path / "trace.json", runner):
        step(runner, 2)
    slices = slices_of(tmp_path / "trace.json")
    spans = [e for e in slices["captures and trials"] if not e["name"].startswith("trial")]
    assert sum(event["name"].startswith("capture") for event in spans) == 6
    ended, (first,) = max(e["ts"] + e["dur"] for e in spans), slices["steps by graphs"]
    assert 0 <= first["ts"] - ended < 250_000
    assert ended == pytest.approx(1e6 * runner.report().capture_s, rel=0.5)


def test_a_step_inside_of_another_runners_capture_is_not_traced(tmp_path: Path):
    inner = planted_runner()
    outer = GraphRunner(
        lambda x: inner(x=x) + 1,
        mode="FULL",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cpu",
    )
    x = torch.randn(2, 8)
    with trace(tmp_path / "trace.json", inner, outer):
        outer.capture()
        for _ in range(2):
            assert torch.equal(outer(x=x), x + 1)
    inside = slices_of(tmp_path / "trace.json", 1)
    assert inside["steps by graphs"] == inside["eager steps"] == []
    assert len(slices_of(tmp_path / "trace.json", 2)["steps by graphs"]) == 2


def test_a_runner_is_restored_after_overlapping_traces_and_metrics(tmp_path: Path):
    runner = planted_runner()
    run, spans = runner._run, list(runner.graphs.spans)
    metrics = Metrics(runner)
    with trace(tmp_path / "a.json", runner):
        # The first to come is the first to go.
        metrics.close()
        metrics.close()
        step(runner, 2)
    assert runner._run is run and runner.graphs.spans == spans
    assert len(slices_of(tmp_path / "a.json")["steps by graphs"]) == 1


def test_a_step_that_raises_is_traced_as_eager_with_its_error(tmp_path: Path):
    runner = planted_runner()
    with trace(tmp_path / "trace.json", runner):
        step(runner, 2)
        with pytest.raises(InvalidInputError):
            runner(x=torch.zeros(2, 3))
    slices = slices_of(tmp_path / "trace.json")
    (failed,) = slices["eager steps"]
    assert failed["args"]["error"] == "InvalidInputError"
    assert len(slices["steps by graphs"]) == 1


def test_a_trace_file_is_written_when_the_traced_block_raises(tmp_path: Path):
    runner = planted_runner()
    run = runner._run
    with pytest.raises(KeyError), trace(tmp_path / "trace.json", runner):
        raise KeyError("of the host")
    assert (tmp_path / "trace.json").exists() and runner._run is run


def test_a_trace_keeps_the_last_steps_and_counts_earlier_steps(tmp_path: Path):
    runner = planted_runner()
    with trace(tmp_path / "trace.json", runner, most_steps=3):
        for tokens in (2, 4, 4, 8, 16):
            step(runner, tokens)
    slices = slices_of(tmp_path / "trace.json")
    assert [event["args"]["live_tokens"] for event in slices["steps by graphs"]] == [4, 8, 16]
    assert any("2 earlier steps" in event["name"] for event in slices["findings"])


def test_torchs_profiler_shows_steps_and_captures_while_a_trace_is_open(tmp_path: Path):
    runner = planted_runner()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step(runner, 2)
        with trace(tmp_path / "trace.json", runner):
            step(runner, 2)
            runner.recapture()
    names = [event.name for event in profile.events()]
    assert names.count("graphrt step 2 tokens") == 1
    assert names.count("graphrt capture FULL [16 tokens 16 reqs]") == 1


def test_two_traced_runners_have_separate_process_tracks(tmp_path: Path):
    first, second = planted_runner(), planted_runner()
    with trace(tmp_path / "trace.json", first, second):
        step(first, 2)
        step(second, 4)
    for pid, tokens in ((1, 2), (2, 4)):
        (only,) = slices_of(tmp_path / "trace.json", pid)["steps by graphs"]
        assert only["args"]["live_tokens"] == tokens


def test_a_traced_runner_gives_the_outputs_of_an_untraced_runner(tmp_path: Path):
    runner, plain = planted_runner(), planted_runner()
    x = torch.randn(3, 8)
    with trace(tmp_path / "trace.json", runner):
        for _ in range(3):
            assert torch.equal(runner(x=x), plain(x=x))
        slot = runner.slot(Batch(3, 3))
        slot["x"].copy_(x)
        assert torch.equal(runner(slot), plain(Batch(3, 3), x=x))
    assert len(slices_of(tmp_path / "trace.json")["steps by graphs"]) == 4


@pytest.mark.parametrize("path", [None, 5, b"trace.json", ["trace.json"]], ids=repr)
def test_a_trace_to_something_that_is_no_path_is_refused(path: Any):
    with pytest.raises(InvalidOptionError, match=r"path(.|\n)*trace\.json"):
        trace(path, planted_runner())


def test_a_trace_without_a_runner_or_without_nvtx_is_refused(tmp_path: Path):
    with pytest.raises(InvalidOptionError, match="runner"):
        trace(tmp_path / "trace.json", torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="got: none"):
        trace(tmp_path / "trace.json")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidOptionError, match="NVTX"):
            trace(tmp_path / "trace.json", planted_runner(), nvtx=True)


@pytest.mark.cuda
def test_a_trace_with_nvtx_on_a_gpu_has_steps_and_captures(tmp_path: Path):
    runner = GraphRunner(
        lambda x: x * 2,
        mode="FULL",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cuda",
    )
    with trace(tmp_path / "trace.json", runner, nvtx=True):
        runner.capture()
        for _ in range(3):
            x = torch.ones(3, 8)
            assert torch.equal(runner(x=x).cpu(), x * 2)
    slices = slices_of(tmp_path / "trace.json")
    assert len(slices["steps by graphs"]) == 3
    assert sum(e["name"].startswith("capture") for e in slices["captures and trials"]) == 2
