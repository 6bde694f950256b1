"""The bar of a capture, and the lines of the log."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt._forecast import CaptureBar, seconds_left
from graphrt.core.base.errors import InvalidOptionError
from tests import starts
from tests.observe.planted import planted_runner, run_planted, step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("method", ["capture", "recapture"])
def test_a_terminal_shows_a_capture_bar_ended_by_a_summary_line(method, monkeypatch):
    runner = planted_runner()
    runner.release()
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    began = time.perf_counter()
    getattr(runner, method)(progress=True)
    took = time.perf_counter() - began
    lines = stream.getvalue().split("\r")
    assert lines[0] == "" and len(lines) == 8
    time_of = r"[\d.]+ (us|ms|s)"
    assert re.match(rf"\[\.{{12}}\] 0/6, {time_of}, next: 16 tokens 16 reqs", lines[1])
    assert re.match(rf"\[##\.{{10}}\] 1/6, {time_of}, next: 16 tokens 16 reqs", lines[2])
    for line in lines[3:7]:
        rest = rf"left: about {time_of}, [\d.]+ (B|KiB), next: "
        assert re.match(rf"\[#+\.+\] \d/6, {time_of}, {rest}", line) and len(line) < 80
    last = re.fullmatch(r"captured 6 graphs in ([\d.]+) (ms|s), 256.0 KiB *\n", lines[7])
    assert last is not None
    assert 0 < float(last[1]) * {"ms": 1e-3, "s": 1.0}[last[2]] < took + 0.01
    # Nothing of a longer line is left of it.
    assert len(lines[7].rstrip("\n")) >= len(lines[6])


@pytest.mark.parametrize("progress", [True, False])
def test_no_capture_bar_is_printed_without_a_terminal(progress, capsys):
    runner = planted_runner()
    runner.recapture(progress)
    assert capsys.readouterr() == ("", "")


def test_a_progress_argument_that_is_no_callable_is_refused():
    with pytest.raises(InvalidOptionError, match="progress"):
        planted_runner().capture(progress=3)  # type: ignore[arg-type]


def test_captures_and_quarantines_are_logged_and_steps_are_not(caplog):
    caplog.set_level(logging.INFO, "graphrt")
    runner = planted_runner()
    names = [record.getMessage() for record in caplog.records]
    assert len(names) == 6
    assert re.fullmatch(r"captured FULL \[16 tokens 16 reqs\] in [\d.]+ s", names[0])
    caplog.clear()
    run_planted(runner)
    (quarantine,) = caplog.records
    assert quarantine.getMessage().startswith("3 graphs are in quarantine: FULL [4 tokens")
    caplog.clear()
    caplog.set_level(logging.DEBUG, "graphrt")
    for _ in range(3):
        step(runner, 4)
        step(runner, 20)
        step(runner, 3, "mixed")
    assert caplog.records == []


CODE = """
import graphrt, torch
inputs = {"x": graphrt.InputSpec(torch.float32, ("tokens", 2))}
runner = graphrt.GraphRunner(lambda x: x + 1, mode="FULL", sizes=[2], inputs=inputs, platform="cpu")
runner.capture()
"""


@pytest.mark.parametrize(("level", "lines"), [("INFO", 1), ("WARNING", 0)])
def test_the_log_level_variable_prints_log_lines_to_stderr(level, lines, monkeypatch):
    monkeypatch.setenv("GRAPHRT_LOG", level)
    monkeypatch.setenv("GRAPHRT_NATIVE", "0")  # A C part of other sources has a line of its own.
    done = starts.run("-c", CODE, check=True)
    said = [line for line in done.stderr.splitlines() if " graphrt " in line]
    assert len(said) == lines and all(" INFO captured " in line for line in said)


def test_the_rest_takes_as_long_as_the_last_graphs_of_its_mode():
    """The first graph of all does not count: it compiles, and its warm-up is watched."""
    captured = [("FULL", 9.0), ("FULL", 2.0), ("FULL", 1.0)]
    assert seconds_left(captured[:1], ["FULL"]) is None
    assert seconds_left(captured[:2], ["FULL"] * 3) == 6.0
    assert seconds_left(captured, ["FULL"] * 3) == 3.0
    # One that was slow by chance is not taken for all.
    assert seconds_left([*captured, ("FULL", 3.0)], ["FULL"]) == 2.0
    # Another mode goes by its own graphs, once it has some.
    assert seconds_left([*captured, ("PIECEWISE", 4.0)], ["PIECEWISE"]) == 4.0
    assert seconds_left(captured, ["PIECEWISE"]) == 1.0


def test_the_seconds_that_are_left_are_those_that_it_takes(monkeypatch):
    """Warm-ups and captures take the same for every size, by a clock that the forward moves."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        now[0] += 0.02
        return x + 1

    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    runner: GraphRunner[torch.Tensor] = GraphRunner(
        forward,
        mode="FULL",
        sizes=range(1, 9),
        inputs=inputs,
        outputs=("tokens", 4),  # else their axes are found by one more run
        platform="cpu",
        options=GraphOptions(check="off"),
    )
    stream, moments = Terminal(), []
    bar = CaptureBar(runner.graphs, stream)

    def progress(*args: Any) -> None:
        bar(*args)
        moments.append(time.perf_counter())

    runner.capture(progress=progress)
    line = stream.getvalue().split("\r")[3]
    told = re.search(r"left: about ([\d.]+) ms", line)
    assert told is not None
    took = moments[-1] - moments[2]
    assert float(told[1]) == pytest.approx(1e3 * took)
