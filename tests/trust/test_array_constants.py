"""NumPy arrays among a forward's constants on a device: lifted, never stale."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import GraphRunner, InputSpec, Plan, Reason
from graphrt.errors import BakedScalarError, GraphQuarantinedWarning

DEVICES = [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.cuda)]
pytestmark = pytest.mark.parametrize("device", DEVICES)

WAYS = {
    "from_numpy": lambda a, x: torch.from_numpy(a).to(x.device),
    "tensor": lambda a, x: torch.tensor(a, device=x.device),
    "as_tensor": lambda a, x: torch.as_tensor(a, device=x.device),
    "asarray": lambda a, x: torch.asarray(a, device=x.device),
    "copy_": lambda a, x: torch.empty_like(x[0]).copy_(torch.from_numpy(a)),
    "computed": lambda a, x: (torch.from_numpy(a) * 2 - 1).to(x),
}


def runner_of(forward: Any, mode: str = "FULL") -> GraphRunner:
    runner = GraphRunner(
        forward,
        Plan(mode=mode, sizes=[2, 4]),
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
    )
    runner.capture()
    return runner


def rows(device: str, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8).to(device)


def same(runner: GraphRunner, forward: Any, x: torch.Tensor) -> bool:
    return torch.equal(runner(x=x).cpu(), forward(x).cpu())


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("way", WAYS)
def test_numpy_array_constants_are_replayed_with_eager_results(
    device: str, way: str, mode: str
) -> None:
    table = np.arange(8, dtype=np.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        fresh = np.arange(8, dtype=np.float32)
        return x * WAYS[way](table, x) + WAYS[way](fresh, x) + x[:, np.array([2])]

    runner = runner_of(forward, mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (4, 3, 2, 1, 4, 3):
            assert same(runner, forward, rows(device, count))
            assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_is_written_is_named_with_its_line(device: str, way: str) -> None:
    table = np.arange(8, dtype=np.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * WAYS[way](table, x)

    runner = runner_of(forward)
    for _ in range(3):
        assert same(runner, forward, rows(device))
    table[3] = 7.0
    for _ in range(2):
        with pytest.raises(BakedScalarError, match=r"test_array_constants\.py"):
            runner(x=rows(device))
    runner.recapture()
    assert same(runner, forward, rows(device))
    assert runner.last_dispatch.reason is Reason.HIT


def test_an_array_written_before_the_trial_is_named_by_the_trial(device: str) -> None:
    table = np.arange(8, dtype=np.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(table).to(x.device)  # the line

    runner = runner_of(forward)
    table[3] = 7.0
    for _ in range(2):
        with pytest.raises(BakedScalarError, match="# the line"):
            runner(x=rows(device))
    runner.recapture()
    assert same(runner, forward, rows(device))
    assert runner.last_dispatch.reason is Reason.HIT


class Fresh(torch.nn.Module):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.full(8, self.scale, np.float32)).to(x.device)  # the line


def test_an_array_with_new_values_at_a_trial_is_named_with_its_line(device: str) -> None:
    model = Fresh()
    runner = runner_of(model)
    x = rows(device)
    assert same(runner, model, x)
    model.scale = 3.0
    with pytest.raises(BakedScalarError, match="# the line"):
        runner.verify(x=x)
    runner.recapture()
    model.scale = 4.0
    with pytest.warns(GraphQuarantinedWarning, match="# the line"):
        assert same(runner, model, x)


def test_an_array_that_stays_on_the_host_may_be_written(device: str) -> None:
    counts = np.zeros(4, dtype=np.int64)

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert torch.from_numpy(counts).numel() == 4
        return x * 2

    runner = runner_of(forward)
    for _ in range(4):
        counts += 1
        assert same(runner, forward, rows(device))
        assert runner.last_dispatch.reason is Reason.HIT
