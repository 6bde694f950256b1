"""Numbers in tensors on the host, which a kernel is launched with: compared, never stale."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from graphrt import GraphRunner, InputSpec, Plan, Reason
from graphrt.errors import BakedScalarError

DEVICES = [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.cuda)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "operand": lambda x, scales: x * scales[1],
    "computed": lambda x, scales: x * (scales[1] * 2 + 1),
    "computed in place": lambda x, scales: x * scales.clone().mul_(2).sum(),
    "read": lambda x, scales: x * scales[1].item(),
    "branch": lambda x, scales: x * 2 if scales[1] == 2 else x,
    "in place": lambda x, scales: x.clone().mul_(scales[1]),
    "scaled": lambda x, scales: torch.add(x, scales[1], alpha=2),
}


class Scaled(torch.nn.Module):
    """A forward with operands on the host, as scales that nobody moved to the device."""

    def __init__(self, way: str = "operand") -> None:
        super().__init__()
        self.scales = torch.tensor([1.0, 2.0])
        self.way = WAYS[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One that it makes itself of Python data is a constant.
        return self.way(x, self.scales) + torch.tensor(0.5)


def captured(forward: Scaled, mode: str) -> GraphRunner:
    runner = GraphRunner(
        forward,
        Plan(mode=mode, sizes=[2, 4]),
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("way", WAYS)
def test_a_scalar_operand_on_the_host_is_replayed(device: str, way: str, mode: str) -> None:
    forward = Scaled(way)
    runner = captured(forward, mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (4, 3, 2, 1, 4):
            x = torch.randn(count, 8).to(device)
            assert torch.equal(runner(x=x).cpu(), forward(x).cpu())
            assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("way", WAYS)
def test_a_host_operand_written_after_capture_is_named_with_its_line(
    device: str, way: str, mode: str
) -> None:
    forward = Scaled(way)
    runner = captured(forward, mode)
    x = torch.randn(4, 8).to(device)
    for _ in range(3):
        runner(x=x)
    forward.scales.data.fill_(3.0)
    with pytest.raises(BakedScalarError, match=r"test_host_scalars\.py"):
        runner(x=x)
    runner.recapture()
    assert torch.equal(runner(x=x).cpu(), forward(x).cpu())
    assert runner.last_dispatch.reason is Reason.HIT


def test_a_replaced_host_operand_gives_the_new_result(device: str) -> None:
    forward = Scaled()
    runner = captured(forward, "FULL")
    x = torch.randn(4, 8).to(device)
    for _ in range(3):
        runner(x=x)
    forward.scales = torch.tensor([5.0, 6.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = [runner(x=x).cpu() for _ in range(30)]
    assert torch.equal(outs[-1], forward(x).cpu())
