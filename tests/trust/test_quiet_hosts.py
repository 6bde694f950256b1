"""Hosts that change Python state which no result depends on: no warning, no quarantine, and trials
end."""

from __future__ import annotations

import functools
import types
import warnings

import pytest
import torch

from graphrt import GraphPool, GraphRunner, InputSpec, KeyedGraphs, WrapperTrials
from graphrt.core.base._native_door import NativeWatch
from graphrt.core.dispatch.reasons import Reason
from tests.draws import rest_long
from tests.trust.quiet_hosts import HOSTS, WIDTH, Host

STEPS = 60
MOST_TRIALS = 16
"""Of one graph: a host may change a few attributes, and three changes of each are tried."""


def test_a_new_attribute_at_every_step_is_tried_at_every_step_and_replayed() -> None:
    """Each may be one that the forward looks up next: as `forward` of a module is."""
    host = Host()
    host.state = types.SimpleNamespace()
    with torch.no_grad():
        runner = GraphRunner(
            host.forward,
            mode="FULL",
            sizes=[2],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            platform="cpu",
        )
        runner.capture()
        for step in range(12):
            setattr(host.state, f"step_{step}", step)
            runner.weights_changed()
            runner(x=torch.randn(2, WIDTH))
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
        assert runner.report().trust.trials[0].steps == 12
        runner.close()


def test_the_table_has_at_least_seventy_quiet_hosts() -> None:
    assert len(HOSTS) >= 70, len(HOSTS)


@pytest.mark.parametrize("name", HOSTS)
def test_runner_trials_end_without_warnings_for_harmless_host_changes(name: str) -> None:
    torch.manual_seed(0)
    host = Host()
    between = HOSTS[name](host)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = GraphRunner(
            host.forward,
            mode="FULL",
            sizes=[2],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            outputs=("tokens", WIDTH),
            platform="cpu",
        )
        runner.capture()
        (record,) = runner.report().trust.trials
        trials = []
        for step in range(STEPS):
            between(step)
            x = torch.randn(2, WIDTH)
            outputs = runner(x=x)
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
            assert torch.allclose(outputs, host.forward(x), atol=1e-5), step
            trials.append(runner.report().trust.trials[0].steps)
        runner.close()
    assert record.failure is None
    assert trials[-1] <= MOST_TRIALS, trials
    if NativeWatch is not None:
        # Elsewhere a change may be found late, and tried then.
        assert trials[-1] - trials[-12] <= 1, trials


# Trials of keyed graphs end by the rule of those above.
@pytest.mark.parametrize("name", rest_long(HOSTS, *[*HOSTS][::4]))
def test_keyed_graph_trials_end_without_warnings_for_harmless_host_changes(name: str) -> None:
    torch.manual_seed(0)
    host, x = Host(), torch.zeros(2, WIDTH)
    between = HOSTS[name](host)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs = KeyedGraphs(GraphPool("cpu"), trials=WrapperTrials)
        graph = graphs.capture("key", functools.partial(host.forward, x))
        trials = []
        for step in range(STEPS):
            between(step)
            x.copy_(torch.randn(2, WIDTH))
            outputs = graph.replay().clone()
            assert torch.allclose(outputs, host.forward(x), atol=1e-5), step
            (record,) = graph.trials.records
            trials.append(record.steps)
        graphs.pool.close()
    assert (record.status, record.failure) == ("tried", None)
    assert trials[-1] <= MOST_TRIALS, trials
