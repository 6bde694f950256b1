"""Modes of torch that are on around a step: it runs eagerly under them, with a reason."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from graphrt import GraphOptions, GraphRunner
from graphrt.errors import GraphQuarantinedWarning, VerificationError
from tests.trust.scenario import WIDTH, X


class Sees(TorchFunctionMode):
    """Turns products into zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0 if "matmul" in str(func) else result


class Dispatches(TorchDispatchMode):
    """Counts operators, and turns products into zeros."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        result = func(*args, **(kwargs or {}))
        return result * 0 if "mm" in str(func) else result


WEIGHT = torch.eye(WIDTH) * 2


def forward(x):
    return x @ WEIGHT


def runner_of(mode="FULL", **options):
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": X},
        outputs=("tokens", WIDTH),
        options=GraphOptions(**options),
    )
    runner.capture()
    for rows in (4, 3, 2, 1):
        runner(x=torch.ones(rows, WIDTH))
    return runner


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
@pytest.mark.parametrize("graphs", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("made", [Sees, Dispatches])
def test_a_step_under_a_torch_mode_runs_eagerly_and_gives_the_eager_result(made, graphs, outputs):
    runner = runner_of(graphs, outputs=outputs)
    for _ in range(3):
        named = f"modes: {made.__name__}, none at"
        with pytest.warns(GraphQuarantinedWarning, match=named), made():
            assert not runner(x=torch.ones(3, WIDTH)).any()
        assert runner.last_dispatch.reason.name == "SETTINGS_CHANGED"
        assert (runner(x=torch.ones(3, WIDTH)) == 2).all()
        assert runner.last_dispatch.reason.name == "HIT"
        runner = runner_of(graphs, outputs=outputs)


def test_function_and_dispatch_modes_active_together_are_both_named():
    runner = runner_of(strict=True)
    with Sees(), Dispatches(), pytest.raises(VerificationError) as caught:
        runner(x=torch.ones(2, WIDTH))
    assert "torch function modes: Sees" in str(caught.value)
    assert "torch dispatch modes: Dispatches" in str(caught.value)


def test_the_flop_counter_mode_counts_the_flops_of_a_step():
    runner = runner_of()
    with pytest.warns(GraphQuarantinedWarning), FlopCounterMode(display=False) as counter:
        runner(x=torch.ones(4, WIDTH))
    assert counter.get_total_flops() == 2 * 4 * WIDTH * WIDTH


def test_a_mode_sees_the_operators_of_the_forward():
    runner = runner_of()
    with pytest.warns(GraphQuarantinedWarning), Dispatches() as mode:
        runner(x=torch.ones(4, WIDTH))
    assert [each for each in mode.seen if "copy" in each] == []


def test_steps_replay_only_under_the_modes_active_at_capture():
    mode, other = Sees(), Sees()
    with mode:
        runner = runner_of()
        assert runner.last_dispatch.reason.name == "HIT"
        assert not runner(x=torch.ones(4, WIDTH)).any()
    # As many, and others.
    for around in (other, None):
        with ExitStack() as stack:
            stack.enter_context(pytest.warns(GraphQuarantinedWarning))
            if around is not None:
                stack.enter_context(around)
            out = runner(x=torch.ones(4, WIDTH))
        assert runner.last_dispatch.reason.name == "SETTINGS_CHANGED"
        assert out.any() == (around is None)
    with mode:
        runner(x=torch.ones(4, WIDTH))
        assert runner.last_dispatch.reason.name == "HIT"


def test_an_equal_default_device_keeps_graphs_replaying():
    runner = runner_of()
    with torch.device("cpu"):
        runner(x=torch.ones(4, WIDTH))
        assert runner.last_dispatch.reason.name == "HIT"
        with torch.device("cpu"):
            runner(x=torch.ones(4, WIDTH))
        assert runner.last_dispatch.reason.name == "HIT"
    x, named = torch.ones(4, WIDTH), "default device: meta, cpu at capture"
    with pytest.warns(GraphQuarantinedWarning, match=named), torch.device("meta"):
        out = runner(x=x)
    assert (out == 2).all() and runner.last_dispatch.reason.name == "SETTINGS_CHANGED"
    assert runner(x=x) is not None and runner.last_dispatch.reason.name == "HIT"


def test_steps_under_a_profiler_are_replayed():
    runner = runner_of()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        runner(x=torch.ones(4, WIDTH))
    assert runner.last_dispatch.reason.name == "HIT"


@pytest.mark.cuda
@pytest.mark.parametrize("made", [Sees, Dispatches])
def test_a_step_on_a_gpu_under_a_torch_mode_gives_the_eager_result(made):
    weight = WEIGHT.cuda()
    runner = GraphRunner(
        lambda x: x @ weight, mode="FULL", sizes=[4], inputs={"x": X}, platform="cuda"
    )
    runner.capture()
    x = torch.ones(4, WIDTH, device="cuda")
    runner(x=x)
    with pytest.warns(GraphQuarantinedWarning, match=made.__name__), made():
        assert not runner(x=x).any()
    assert (runner(x=x) == 2).all() and runner.last_dispatch.reason.name == "HIT"
