"""`GraphRunner.measure`: what a step takes by its graph, and its forward eagerly."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import graphrt
from graphrt import Example, GraphRunner, Host, HostArg, InputSpec, UpdatableTask, eager_break
from graphrt.core.runner.report import gain_of
from graphrt.errors import InvalidOptionError


class Counted(torch.nn.Module):
    """Advances a tensor, and a number in Python, in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows times two."""
        self.calls += 1
        self.runs += 1
        return x * 2


def runner_of(forward: Any, **more: Any) -> Any:
    """A captured runner of rows."""
    spec = InputSpec(torch.float32, ("tokens", 4))
    runner: Any = GraphRunner(
        forward, inputs={"x": spec}, **{"sizes": [1, 2, 4, 8], "platform": "cpu", **more}
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("example", [False, True])
def test_the_smallest_and_the_largest_of_each_mode_are_timed(mode: str, example: bool) -> None:
    """With the host's example, and with padding."""
    host = Host(example=lambda batch, _: Example({"x": torch.ones(batch.num_tokens, 4)}))
    runner = runner_of(lambda x: x * 2, mode=mode, host=host if example else None)
    assert all(each.replay_s is None for each in runner.report().graphs)
    assert str(runner.report()).splitlines()[-1].startswith("Times: none; runner.measure()")
    runner.measure()
    timed = [each for each in runner.report().graphs if each.replay_s]
    modes = {each.mode for each in timed}
    assert {each.descriptor.num_tokens for each in timed} == {1, 8}
    assert len(timed) == 2 * len(modes) and all(each.eager_s > 0 for each in timed)
    text = str(runner.report())
    assert "not timed" in text and "eager" in text and "Times: none" not in text


def test_the_sizes_asked_for_are_timed() -> None:
    """And a size without a graph is named."""
    runner = runner_of(lambda x: x * 2, mode="FULL")
    runner.measure([2, 4])
    timed = {each.descriptor.num_tokens for each in runner.report().graphs if each.replay_s}
    assert timed == {2, 4}
    with pytest.raises(InvalidOptionError, match="3"):
        runner.measure([2, 3])


@pytest.mark.parametrize("level", ["off", "capture"])
def test_state_is_put_back_and_no_step_is_counted(level: str) -> None:
    """What is declared at `off`, and all that a watched run shows else."""
    model = Counted()
    options = graphrt.GraphOptions(check=level)  # type: ignore[arg-type]
    runner = runner_of(model, mode="FULL", options=options, host=Host(state=[model.calls]))
    runs = model.runs
    runner.measure()
    report = runner.report()
    assert model.calls.item() == 0 and not sum(report.reasons.values())
    assert level == "off" or model.runs == runs
    runner(x=torch.ones(3, 4))
    assert model.calls.item() == 1


@pytest.mark.parametrize("in_eager_part", [False, True])
def test_tasks_are_timed_with_their_arguments_at_capture(in_eager_part: bool) -> None:
    """And the steps after it have those of the host."""
    task = UpdatableTask(
        "scale",
        lambda x, out, *, n: torch.mul(x, n[0], out=out),
        {"n": HostArg("tokens")},
        at_capture=lambda descriptor: {"n": [1] * descriptor.num_tokens},
    )

    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        task(x, out)
        return out

    part = eager_break(scaled) if in_eager_part else scaled
    mode = "PIECEWISE" if in_eager_part else "FULL"
    runner = runner_of(lambda x: part(x + 0) + 0, mode=mode)
    runner.measure()
    assert sum(each.replay_s is not None for each in runner.report().graphs) == 2
    got = runner(x=torch.ones(3, 4), updates={"scale": {"n": [2, 2, 2]}})
    assert torch.equal(got, torch.full((3, 4), 2.0))


def test_a_graph_that_is_no_faster_says_so() -> None:
    """With the time that the forward takes eagerly."""
    assert gain_of({"replay_s": 4e-6, "eager_s": 3e-6})[2] == "no gain: eager takes 3 us"
    assert gain_of({"replay_s": 1e-3, "eager_s": 2e-3})[2] == "2.0 times"
    assert gain_of({"replay_s": None, "eager_s": None})[2] == "not timed"


def test_what_graphed_prints_has_the_gain_of_the_smallest_and_the_largest() -> None:
    """The others were not timed."""
    lines = str(graphrt.graphed(lambda x: x * 2, torch.rand(4, 4))).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["4", "2", "1"]
    assert "not timed" in lines[3] and "not timed" not in lines[2] + lines[4]


def test_runs_that_wait_for_other_processes_do_not_count() -> None:
    """Each way is run until its two fastest runs agree. Here the first five eager runs wait."""
    waits: list[float] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        time.sleep(waits.pop(0) if waits else 0.0)
        return x * 2

    options = graphrt.GraphOptions(check="off")
    runner = runner_of(forward, mode="FULL", options=options, sizes=[1])
    waits += [0.16, 0.16, 0.08, 0.04, 0.02]
    runner.measure()
    (graph,) = runner.report().graphs
    assert not waits and graph.eager_s < 0.01


@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_are_put_back(own: bool) -> None:
    """By `measure()`, and by `graphed`; torch's own generator, and one of the forward's."""
    generator = torch.Generator().manual_seed(1) if own else torch.default_generator

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=generator)

    was = generator.get_state()
    fast = graphrt.graphed(forward, torch.rand(8, 4, generator=torch.Generator()))
    assert torch.equal(was, generator.get_state())
    fast.measure()
    assert torch.equal(was, generator.get_state())
