"""Constants of the host's that one compiled piece makes, and a later one reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import GraphPool, GraphRunner, InputSpec, Reason
from graphrt.compile import CompileOptions, compile_module, opaque
from graphrt.errors import BakedScalarError, RefusedOpError

DEVICES = {
    "cpu": pytest.param("cpu"),
    "npu": pytest.param("npu", marks=pytest.mark.npu),
    "cuda": pytest.param("cuda", marks=pytest.mark.cuda),
}
PLATFORMS = {"cpu": "cpu", "cuda": "cuda"}
TABLE = torch.ones(8)


@opaque("graphrt_tests::between", mutates=[], fake=torch.empty_like)
def between(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@opaque("graphrt_tests::counting", mutates=["table"])
def counting(table: torch.Tensor) -> None:
    COUNTED.append(1)
    table += len(COUNTED)


COUNTED: list[int] = []


class Net(torch.nn.Module):
    scale = 2.0


class OfData(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, self.scale])
        return between(x + 1) * table.to(x.device)


class InBoth(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.full((8,), self.scale)
        return between(x * table.to(x.device)) * table.to(x.device)


class Places(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(8).flip(0)
        y = between(x + 1)
        return y[:, places] + y[:, [1, 0, 2, 3, 4, 5, 6, 7]]


class Computed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(16).view(8, 2).t()[1] * 0.5
        y = between(between(x + 1) * table.to(x))
        return y * table.to(x.device)


class OfTheHosts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = TABLE * self.scale
        return between(x + 1) * table.to(x.device)


class Written(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.full((8,), self.scale)
        y = x * 1
        counting(table)
        return y * table.to(x.device)


def runner_of(model: torch.nn.Module, device: str) -> GraphRunner:
    pool = GraphPool(PLATFORMS.get(device))
    compile_module(model, {"x": 0}, pool=pool, options=CompileOptions(backend="eager"))
    runner = GraphRunner(
        model,
        mode="PIECEWISE",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        pool=pool,
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("device", DEVICES.values())
@pytest.mark.parametrize("kind", [OfData, InBoth, Places, Computed])
def test_a_host_constant_made_by_an_earlier_piece_reaches_a_later_piece(
    kind: Any, device: str
) -> None:
    runner = runner_of(kind(), device)
    for count in (4, 3, 2, 1, 4):
        x = torch.randn(count, 8).to(device)
        assert torch.equal(runner(x=x).cpu(), kind()(x).cpu())
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("device", [DEVICES["npu"], DEVICES["cuda"]])
def test_a_host_tensor_of_the_caller_is_still_refused(device: str) -> None:
    with pytest.raises(RefusedOpError, match="is a tensor on the host"):
        runner_of(OfTheHosts(), device)


@pytest.mark.parametrize("device", [DEVICES["npu"], DEVICES["cuda"]])
def test_a_host_constant_changed_between_two_pieces_is_named(device: str) -> None:
    COUNTED.clear()
    runner = runner_of(Written(), device)
    with pytest.raises(BakedScalarError, match="earlier piece"):
        runner(x=torch.ones(4, 8).to(device))
