"""Forwards that take another way at another batch size: planned sizes of both ways are refused at
capture, and a batch that no graph serves runs whatever its size is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphrt import (
    Batch,
    CompileOptions,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    Reason,
)
from graphrt.compile import RetraceError, compile_module


class Branching(nn.Module):
    """Doubles up to four rows, and triples more."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return x.sin() * 3
        return x.sin() * 2


class Flagged(nn.Module):
    """Calls a compiled function with a flag that its code has baked in."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.flag = inner, True

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.flag)


class Rest(nn.Module):
    """Calls a compiled module with all rows but the first `kept`, of which there may be none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[: self.kept], self.inner(x[self.kept :])])


def runner_of(forward: nn.Module, pool: GraphPool, sizes: list[int], **more: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        sizes=sizes,
        max_num_tokens=64,
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
        pool=pool,
        **more,
    )


def compiled_runner(sizes: list[int], mode: str, backend: str = "eager") -> GraphRunner:
    model, pool = Branching(), GraphPool("cpu")
    compile_module(model, ["x"], pool=pool, options=CompileOptions(backend=backend))
    return runner_of(model, pool, sizes, mode=mode, max_num_reqs=sizes[-1])


def check_served(runner: GraphRunner, size: int, expected: Reason) -> None:
    x = torch.randn(size, 3)
    result = runner(Batch(size), x=x)
    assert torch.allclose(result, Branching()(x), atol=1e-6)
    assert runner.last_dispatch is not None and runner.last_dispatch.reason is expected


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_batch_without_graph_behind_a_branch_on_its_size_runs_uncompiled(mode, backend, caplog):
    runner = compiled_runner([2, 4], mode, backend)
    runner.capture()
    assert "Uncompiled" not in str(runner.report())
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="graphrt"):
        for size in (5, 9, 64):
            check_served(runner, size, Reason.TOO_LARGE)
    check_served(runner, 3, Reason.HIT)
    (line,) = caplog.messages
    assert "Branching runs uncompiled" in line and "tokens=5" in line
    assert "if x.shape[0] > 4" in line and "test_sizes_of_branches.py" in line
    (told,) = runner.report().to_dict()["uncompiled"]
    assert "tokens=5" in told and f"Uncompiled: {told}" in str(runner.report())


def test_steps_between_captures_run_uncompiled_behind_a_branch():
    runner = compiled_runner([2, 4], "FULL")
    assert runner.capture_next().left
    check_served(runner, 9, Reason.TOO_LARGE)
    while runner.capture_next().left:
        check_served(runner, 9, Reason.TOO_LARGE)
    check_served(runner, 9, Reason.TOO_LARGE)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_planned_sizes_on_both_sides_of_a_branch_are_refused_with_its_line(mode):
    runner = compiled_runner([4, 8], mode)
    with pytest.raises(RetraceError, match="number of tokens") as caught:
        runner.capture()
    text = str(caught.value)
    assert "if x.shape[0] > 4" in text and "test_sizes_of_branches.py" in text
    assert "tokens=4" in text and "tokens > 4" in text and "sizes=" in text
    # What it advises: sizes of one side alone.
    other = compiled_runner([8], mode)
    other.capture()


def test_a_size_of_0_that_only_a_batch_without_graph_has_runs_uncompiled(caplog):
    inner, pool = Branching(), GraphPool("cpu")
    compiled = compile_module(inner, ["x"], pool=pool)
    model = Rest(inner)
    options = GraphOptions(check="off")
    runner = runner_of(model, pool, [16], mode="FULL", max_num_reqs=16, options=options)
    runner.capture()
    x, model.kept = torch.randn(8, 3), 8
    with caplog.at_level(logging.WARNING, logger="graphrt"):
        assert torch.equal(runner(Batch(8, exclude=frozenset({GraphMode.FULL})), x=x), x)
    (line,) = compiled.uncompiled
    assert "size 0 of tokens" in line and "runs uncompiled" in caplog.text


def test_an_argument_that_only_a_step_without_graph_changes_runs_uncompiled():
    def flagged(x: Tensor, flag: bool) -> Tensor:
        return x.sin() if flag else x.cos()

    pool = GraphPool("cpu")
    compiled = compile_module(flagged, ["x"], pool=pool)
    model = Flagged(compiled)
    runner = runner_of(model, pool, [4], mode="FULL", max_num_reqs=4, compiled=[compiled])
    runner.capture()
    x, model.flag = torch.randn(8, 3), False
    assert torch.equal(runner(Batch(8), x=x), x.cos())
    (line,) = compiled.uncompiled
    assert "argument flag" in line
    with pytest.raises(RetraceError, match="flag"):
        compiled(x, False)
