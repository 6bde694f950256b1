"""Forwards that branch on whether gradients, or inference mode, are on."""

from __future__ import annotations

import itertools
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch

from graphrt import GraphOptions, GraphRunner
from graphrt.errors import GraphQuarantinedWarning, VerificationError
from tests.trust.scenario import WIDTH, X

AROUND = {"nothing": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def asks_for_gradients(x):
    return x * 2 if torch.is_grad_enabled() else x * 3


def asks_for_inference_mode(x):
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


def runner_of(forward, mode="FULL", **options):
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": X},
        outputs=("tokens", WIDTH),
        options=GraphOptions(**options),
    )
    runner.capture()
    return runner


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("order", [["no_grad", "nothing"], ["nothing", "inference", "no_grad"]])
@pytest.mark.parametrize("forward", [asks_for_gradients, asks_for_inference_mode])
def test_a_forward_that_asks_for_grad_mode_gives_eager_results_in_every_mode(forward, order, mode):
    runner = runner_of(forward, mode)
    for name in order * 3:
        for rows in (4, 3, 1):
            with AROUND[name]():
                x = torch.ones(rows, WIDTH)
                assert torch.equal(runner(x=x), forward(x)), (name, rows)
                assert not runner(x=x).requires_grad


def test_a_step_in_another_grad_mode_runs_eagerly_with_a_reason():
    runner = runner_of(asks_for_gradients)
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        runner(x=x)
        assert (runner(x=x) == 3).all() and runner.last_dispatch.reason.name == "HIT"
    with pytest.warns(GraphQuarantinedWarning, match="gradients: True, False at capture"):
        assert (runner(x=x) == 2).all()
    assert runner.last_dispatch.reason.name == "SETTINGS_CHANGED"
    with torch.no_grad():
        assert (runner(x=x) == 3).all() and runner.last_dispatch.reason.name == "HIT"


def test_with_strict_a_step_in_another_grad_mode_raises_and_its_advice_works():
    runner = runner_of(asks_for_gradients, strict=True)
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        runner(x=x)
    with pytest.raises(VerificationError, match=r"gradients: step under torch.no_grad\(\)"):
        runner(x=x)
    with torch.no_grad():
        assert (runner(x=x) == 3).all()


class Keeps(torch.nn.Module):
    """Asks, and does the same; keeps a table and its last result; writes state in place."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.encoder = torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.register_buffer("state", torch.zeros(8, WIDTH))

    def forward(self, x):
        self.state[: len(x)].copy_(x)
        if torch.is_grad_enabled():
            x = x + 0
        return self.encoder(self.layer(x)[:, None])[:, 0] + self.state[: len(x)]


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_forward_that_differs_by_rounding_replays_in_every_grad_mode(mode, name):
    torch.manual_seed(0)
    model = Keeps().eval()
    with warnings.catch_warnings(), AROUND[name]():
        warnings.simplefilter("error")
        runner = runner_of(model, mode)
        for around in (*AROUND, *AROUND):
            for rows in (4, 3, 2, 1):
                with AROUND[around]():
                    x = torch.randn(rows, WIDTH)
                    out = runner(x=x)
                    assert runner.last_dispatch.reason.name == "HIT"
                    torch.testing.assert_close(out, model(x).detach())
    assert not model.state.requires_grad and not model.state.is_inference()
    assert model.layer.weight.grad is None


def runs_of_first_step(profile=None):
    """How many times a trial runs a forward that asks for nothing."""
    # A trial puts lists back, and no iterators.
    runs = itertools.count()

    def forward(x):
        next(runs)
        return x * 2

    runner = runner_of(forward)
    before = next(runs)
    with torch.no_grad():
        sys.setprofile(profile)
        try:
            runner(x=torch.ones(4, WIDTH))
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)
    return next(runs) - before - 1


def test_a_profiler_in_python_sees_the_forward_and_changes_no_trial():
    seen = []
    runs = runs_of_first_step(lambda frame, event, _: seen.append((frame.f_code.co_name, event)))
    assert runs == runs_of_first_step()
    assert seen.count(("forward", "call")) == runs


def test_under_a_profiler_in_c_a_forward_counts_as_asking_for_grad_mode():
    assert runs_of_first_step(Opaque()) == runs_of_first_step() + 1


class Opaque:
    """In the place of a profiler that nobody can call along."""

    def __call__(self, frame, event, _):
        pass
