"""Forwards that are splitting operators and views alone: nothing of them is in a graph, and their
steps are served all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec
from graphrt.compile import compile_module, opaque


@opaque("graphrt_no_pieces::tripled", mutates=[], fake=torch.empty_like)
def tripled(x: Tensor) -> Tensor:
    return x * 3


@opaque("graphrt_no_pieces::added", mutates=["total"])
def added(x: Tensor, total: Tensor) -> None:
    total.add_(x.sum())


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "views":
            return x.view(-1, 2, 2).view(-1, 4)
        if self.kind == "returned":
            return tripled(x.view(-1, 2, 2)).view(-1, 4)
        if self.kind == "written":
            added(x, self.total)
        return x


@pytest.mark.parametrize("kind", ["returned", "written", "views", "argument"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_steps_without_compute_pieces_are_right(mode, kind):
    model, pool = Model(kind), GraphPool("cpu")
    reference = Model(kind)
    compiled = compile_module(model, ["x"], pool=pool, in_place=False)
    runner = GraphRunner(
        compiled,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        pool=pool,
    )
    with runner:
        runner.capture()
        assert (compiled.figures.pieces, len(compiled.wrappers)) == (0, 1)
        assert model.total == 0, "a warm-up is undone"
        for rows in (3, 4, 1, 4, 2):
            x = torch.randn(rows, 4)
            found = runner(Batch(rows, rows), x=x)
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            assert torch.equal(found, reference(x))
            torch.testing.assert_close(model.total, reference.total)
