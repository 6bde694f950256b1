"""Constants of Python data that are others than at capture are named, with their line."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphrt import GraphRunner, InputSpec, Plan, eager_break
from graphrt.errors import BakedScalarError


class Model(torch.nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.scale: Any = 2.0
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(self.scale, device=x.device)  # the line


class Long(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([self.scale] * 100, device=x.device).mean()  # the line


class Index(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[:, [int(self.scale)]]  # the line


class Masked(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1e30, torch.tensor(self.scale, device=x.device), x)  # the line


class Clock(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Below 1, as a float of 32 bits tells no milliseconds of a clock that has run for a day.
        return x * torch.tensor(time.perf_counter() % 1, device=x.device)  # the line


class Mask(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = [place < self.scale for place in range(8)]
        return x + x[:, chosen].sum(-1, keepdim=True)  # the line


class MaskOnTheLeft(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, chosen = x * 1, [place < self.scale for place in range(8)]
        made[:, chosen] = made[:, chosen] * 3  # the line
        return made


class Unused(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.now = torch.tensor(self.scale)
        return x * 2


class OfArray(Model):
    values = array("f", [2.0] * 8)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "scale":
            self.values[:] = array("f", [value] * 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.frombuffer(self.values, dtype=torch.float32)


class InPart(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = eager_break(lambda x: x * torch.tensor(self.scale, device=x.device))
        return part(x + 1) + 1


def runner_of(
    model: Model, mode: str = "FULL", sizes: Sequence[int] = (4,), **options: Any
) -> GraphRunner:
    return GraphRunner(
        model,
        Plan(mode=mode, sizes=sizes),
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        **options,
    )


@pytest.mark.parametrize("kind", [Model, Long, Index, Masked, Mask, MaskOnTheLeft])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_python_data_changed_before_the_trial_is_named_with_its_line(kind: Any, mode: str) -> None:
    model = kind()
    runner = runner_of(model, mode)
    runner.capture()
    model.scale = 3.0
    x = torch.ones(4, 8)
    with pytest.warns(UserWarning, match="Python data") as caught:
        assert torch.equal(runner(x=x), model(x))
    assert "# the line" in str(caught[0].message)
    assert runner.last_dispatch.reason.name == "QUARANTINED"


def test_verify_raises_for_changed_python_data() -> None:
    model = Model()
    runner = runner_of(model)
    runner.capture()
    runner(x=torch.ones(4, 8))
    model.scale = 3.0
    with pytest.raises(BakedScalarError, match="# the line"):
        runner.verify(x=torch.ones(4, 8))
    runner.recapture()
    runner.verify(x=torch.ones(4, 8))


def test_verify_raises_for_python_data_that_is_new_at_every_call() -> None:
    runner = runner_of(Clock())
    runner.capture()
    with pytest.raises(BakedScalarError, match="# the line"):
        runner.verify(x=torch.ones(4, 8))


def test_verify_at_a_smaller_size_raises_for_data_that_is_new_at_every_call() -> None:
    runner = runner_of(Clock(), sizes=[2, 4])
    runner.capture()
    with pytest.raises(BakedScalarError, match="# the line"):
        runner.verify(x=torch.ones(2, 8))


@pytest.mark.filterwarnings("ignore::graphrt.errors.StaleTensorWarning")
@pytest.mark.parametrize(
    ("kind", "mode"), [(Unused, "FULL"), (OfArray, "FULL"), (InPart, "PIECEWISE")]
)
def test_python_data_that_no_graph_uses_may_change(kind: Any, mode: str) -> None:
    model = kind()
    runner = runner_of(model, mode)
    runner.capture()
    model.scale = 3.0
    x = torch.ones(4, 8)
    assert torch.equal(runner(x=x), model(x))
    assert runner.last_dispatch.reason.name == "HIT"
