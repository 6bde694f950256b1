"""An updates mapping that builds values at access, partly declared outputs, and a doubled mode."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    HostArg,
    InputSpec,
    Plan,
    UpdatableTask,
    forward_context,
)
from graphrt.errors import OutputError


class MadeWhenAsked(Mapping[str, Any]):
    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers

    def __getitem__(self, name: str) -> Any:
        return OrderedDict(n=self.numbers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def test_an_updates_mapping_that_builds_values_at_access_serves_each_layer() -> None:
    spec = UpdatableTask("attn", lambda out, n: out.fill_(n), {"n": HostArg(None)})
    out, x = torch.zeros(4), torch.zeros(4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in range(4):
            spec(out[layer : layer + 1], task=f"attn.{layer}")
        return x + out

    wrapper = GraphWrapper(forward, "FULL", pool=GraphPool("cpu"), options=GraphOptions(lazy=True))

    def step(updates: Mapping[str, Any]) -> list[float]:
        with forward_context("FULL", BatchDescriptor(4), updates=updates):
            result: list[float] = wrapper(x).tolist()
        return result

    step({f"attn.{layer}": {"n": layer} for layer in range(4)})
    numbers = {f"attn.{layer}": 20 + layer for layer in range(4)}
    assert step(MadeWhenAsked(numbers)) == [20, 21, 22, 23]


def test_an_undeclared_trailing_output_axis_is_checked_at_small_batches() -> None:
    def forward(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(len(x), max(2, len(s)))
        y[:, : len(s)] = x[:, :1] * s
        return y

    runner: GraphRunner = GraphRunner(
        forward,
        mode="FULL_DECODE_ONLY",
        sizes=[4, 8],
        max_num_reqs=4,
        query_lens=(2,),
        outputs=("tokens",),
        platform="cpu",
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 2)),
            "s": InputSpec(torch.float32, ("reqs",)),
        },
        options=GraphOptions(check="off"),
    )
    with pytest.raises(OutputError):
        runner.capture()


def test_a_plan_given_two_modes_raises_a_type_error() -> None:
    with pytest.raises(TypeError, match="two values"):
        Plan("FULL", mode="NONE", sizes=[2], platform="cpu")
