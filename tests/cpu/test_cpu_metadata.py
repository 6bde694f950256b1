"""Tensors whose shape, strides or rank a forward changes in place, with and without elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason

FORWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda x: x.clone().t_().t(),
    "t_ of a sum": lambda x: (x + 1).t_().t() * 2,
    "t_ and written": lambda x: x.clone().t_().add_(1).t(),
    "swapaxes_": lambda x: (x + 1).swapaxes_(0, 1).t() * 2,
    "unsqueeze_": lambda x: torch.max(x + 1, 1)[0].unsqueeze_(1),
    "squeeze_": lambda x: x[:, :1].clone().squeeze_(1),
    "resize_": lambda x: (x + 1).resize_(x.shape[0], 2) * 1,
    "as_strided_": lambda x: (x + 1).as_strided_((x.shape[0], 2), (4, 2)) * 1,
    "of a part": lambda x: x.clone().split(2, 1)[0].t_().t(),
    "empty t_": lambda x: x[:, :0].clone().t_(),
    "empty t_, read": lambda x: x + x[:, :0].clone().t_().sum(),
    "empty t_, written": lambda x: x[:, :0].clone().t_().add_(1).t(),
    "empty t_, concatenated": lambda x: torch.cat([x, x[:, :0].clone().t_().contiguous().t()], 1),
    "empty unsqueeze_": lambda x: x[:, :0].clone().unsqueeze_(1),
    "empty squeeze_": lambda x: x[:, None, :0].clone().squeeze_(1),
    "empty transpose_": lambda x: x[:, :0].clone().transpose_(0, 1).transpose(0, 1).clone(),
    "empty resize_": lambda x: x[:, :0].clone().resize_(0, 3),
    "empty as_strided_": lambda x: x[:, :0].clone().as_strided_((0, 3), (3, 1)),
    "empty of a factory": lambda x: torch.zeros(x.shape[0], 0).t_(),
    "empty of data": lambda x: torch.tensor([[]]).t_() + x.sum(),
    "empty of a product": lambda x: (x @ x.new_ones(4, 0)).t_(),
    "empty of several": lambda x: torch.sort(x[:, :0])[0].t_(),
    "empty data": lambda x: _data(x[:, :0].clone()),
    "no rows": lambda x: x[:0].clone(),
    "no rows, transposed": lambda x: x[:0].clone().t_(),
    "no rows, picked": lambda x: x[torch.zeros(0, dtype=torch.int64)].t_(),
    "a number": lambda x: x[0].sum(),
    "a number, unsqueezed": lambda x: x[0].sum().unsqueeze_(0),
    "a part of a view": lambda x: _and_views(x + 1),
}


def _data(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.t()
    return x


def _and_views(x: torch.Tensor) -> torch.Tensor:
    x.view(-1, 2, 2)[:, 0].t_()
    return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("check", ["capture", "off"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_shape_that_is_changed_in_place_is_the_same_at_every_step(name, mode, check, inference):
    forward = FORWARDS[name]
    run = GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        mode=mode,
        sizes=[1, 2, 4],
        platform="cpu",
        options=GraphOptions(check=check),
    )
    with torch.inference_mode(inference):
        run.capture()
        for count in (1, 2, 3, 4, 3, 2, 1):
            x = torch.randn(count, 4)
            out = run(x=x)
            expected = forward(x.clone())
            assert out.shape == expected.shape and torch.equal(out, expected)
            assert run.last_dispatch.reason is Reason.HIT
