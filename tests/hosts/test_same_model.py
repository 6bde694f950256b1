"""A `SameModel` tells an adapter whether its model is still the one of the capture."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphrt.hosts.same_model import SameModel


class Fields:
    """A config whose attributes are in `__slots__`."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.names = nn.Linear(2, 2), ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.names else x


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scales, self.kinds, self.by_name = [1.0, [2.0]], {"a"}, {"a": (1, 2)}
        self.config = SimpleNamespace(factor=2.0, inner=SimpleNamespace(eps=1.0))
        self.fields = Fields(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.config.factor * self.fields.factor * self.scales[0] * len(self.kinds)


@pytest.mark.parametrize("name", ["config", "fields", "scales", "kinds", "by_name"])
def test_an_object_or_container_with_equal_values_in_place_of_one_is_no_change(name: str) -> None:
    model = Model()
    same = SameModel(model.forward)
    for _ in range(3):
        setattr(model, name, copy.deepcopy(getattr(model, name)))
        assert same.look() == ()


@pytest.mark.parametrize("looked", [True, False], ids=["looked between", "at once"])
def test_values_in_an_object_that_has_replaced_another_are_compared_by_name(looked: bool) -> None:
    model = Model()
    same = SameModel(model.forward)
    model.config, model.scales = copy.deepcopy(model.config), copy.deepcopy(model.scales)
    model.fields = copy.deepcopy(model.fields)
    if looked:
        assert same.look() == ()
    model.config.inner.eps, model.scales[1][0], model.fields.factor = 5.0, 6.0, 7.0
    names = ["model.config.inner.eps", "model.fields.factor", "model.scales[1][0]"]
    assert sorted(same.look().names) == names
    model.config.inner.eps, model.scales[1][0], model.fields.factor = 1.0, 2.0, 3.0
    assert same.look() == ()


def test_another_class_module_or_function_in_place_of_one_is_a_change() -> None:
    model = Model()
    same = SameModel(model.forward)
    model.config = Fields(2.0)
    model.blocks[1] = copy.deepcopy(model.blocks[1])
    assert sorted(same.look().names) == ["model.blocks[1]", "model.config"]


def test_values_that_no_step_reads_are_left_out_also_of_replaced_objects() -> None:
    model = Model()
    same = SameModel(model.forward, lambda place, was, now: place.label == ".eps")
    model.config.inner.eps = 3.0
    assert same.look() == ()
    model.config = copy.deepcopy(model.config)
    model.config.inner.eps = 4.0
    assert same.look() == ()
    model.config.factor = 4.0
    assert same.look().names == ("model.config.factor",)


def append(block: Block) -> None:
    block.names.append("b")


def widen(block: Block) -> None:
    block.linear.out_features = 3


def move(block: Block) -> None:
    block.linear.weight.data = torch.ones(2, 2)


def test_a_look_at_a_share_finds_configs_at_once_and_the_rest_in_as_many_calls() -> None:
    shares, waits = 4, []
    for change in (append, widen, move):
        model = Model(8)
        same = SameModel(model.forward)
        assert same.look_at_share(shares) == ()
        for _ in range(shares):
            model.config.factor = 3.0
            assert same.look_at_share(shares).names == ("model.config.factor",)
            model.config.factor = 2.0
        assert not any(same.look_at_share(shares) for _ in range(shares))
        change(model.blocks[5])
        waits.append(next(at for at in range(shares) if same.look_at_share(shares)))
    # Each call looks at a part alone.
    assert len({*waits}) > 1


def test_a_change_between_the_capture_and_the_first_look_at_a_share_is_found() -> None:
    model = Model()
    same = SameModel(model.forward)
    model.blocks[1].names.append("b")
    assert same.look_at_share(4)
