"""Forwards that are splitting operators and views alone: nothing of them is in a graph, and their
steps are served all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, Reason, eager_break
from graphrt.compile import compile_module, opaque
from graphrt.errors import RefusedOpError

factor = [3]


@opaque("graphrt_no_pieces::tripled", mutates=[], fake=torch.empty_like)
def tripled(x: Tensor) -> Tensor:
    return x * factor[0]


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


def test_a_splitting_operator_reads_python_state_of_the_current_step():
    pool = GraphPool("cpu")
    compiled = compile_module(Model("returned"), ["x"], pool=pool, in_place=False)
    runner = GraphRunner(
        compiled,
        mode="PIECEWISE",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        pool=pool,
    )
    with runner:
        runner.capture()
        for times in (3, 10):
            factor[0] = times
            output = runner(x=torch.ones(4, 4))
            assert runner.last_dispatch.reason is Reason.HIT
            assert torch.equal(output, torch.full((4, 4), float(times)))
    factor[0] = 3


@eager_break
def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("pool", [True, False])
def test_a_traced_eager_break_is_refused_in_piecewise_and_captured_in_full(pool):
    specs = {"inputs": {"x": InputSpec(torch.float32, ("tokens", 4))}, "outputs": ("tokens", 4)}

    def forward(x: Tensor) -> Tensor:
        return doubled(x + 1) + 1

    for mode in ("PIECEWISE", "FULL"):
        announced_pool = GraphPool("cpu")
        compiled = compile_module(forward, ["x"], pool=announced_pool if pool else None)
        with GraphRunner(compiled, mode=mode, sizes=[4], pool=announced_pool, **specs) as runner:
            if mode == "PIECEWISE":
                with pytest.raises(RefusedOpError, match="opaque"):
                    runner.capture()
                continue
            runner.capture()
            assert torch.equal(runner(x=torch.ones(4, 4)), torch.full((4, 4), 5.0))


@pytest.mark.parametrize("kind", ["returned", "written", "views", "argument"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_steps_of_a_forward_without_compute_pieces_match_eager(mode, kind):
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
            output = runner(Batch(rows, rows), x=x)
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            assert torch.equal(output, reference(x))
            torch.testing.assert_close(model.total, reference.total)
