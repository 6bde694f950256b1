"""Tensors of a step that lie in the runner's buffers: given as its inputs, returned as outputs."""

from __future__ import annotations

from operator import is_
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphMode, GraphRunner, InputSpec
from graphrt.core.inputs.transport import sources_of


def runner(forward: Any) -> GraphRunner:
    inputs = {name: InputSpec(torch.float32, ("tokens", 8)) for name in "xy"}
    return GraphRunner(forward, mode="FULL", sizes=[1, 4, 8], inputs=inputs, platform="cpu")


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y * 3


@pytest.mark.parametrize("rows", [8, 4, 3])
def test_inputs_that_lie_in_one_anothers_buffers_are_read_before_they_are_written(
    rows: int,
) -> None:
    """As of a host with two buffers that it swaps after every step."""
    run = runner(both)
    run.capture()
    for _ in range(3):
        x, y = torch.randn(2, rows, 8)
        slot = run.slot(Batch(rows))
        slot["x"].copy_(x)
        slot["y"].copy_(y)
        assert torch.equal(run(slot), both(x, y))
        assert torch.equal(run(x=slot["y"], y=slot["x"]), both(y, x))


def test_an_input_may_lie_some_rows_further_in_its_own_buffer() -> None:
    run = runner(both)
    run.capture()
    x, y = torch.randn(2, 8, 8)
    run(x=x, y=y)
    for _ in range(2):
        held = run.inputs.buffers
        held["x"].copy_(x)
        held["y"].copy_(y)
        assert torch.equal(run(x=held["x"][1:], y=held["y"][:-1]), both(x[1:], y[:-1]))


@pytest.mark.parametrize("captured", [False, True])
def test_an_eager_step_that_returns_its_inputs_does_not_hand_out_the_buffers(
    captured: bool,
) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x, "y": y, "part": y[:, 2:4]}

    run = runner(forward)
    if captured:
        run.capture()
    kept = []
    for _ in range(3):
        x, y = torch.randn(2, 3, 8)
        batch = Batch(3, exclude=frozenset({GraphMode.FULL}))
        kept.append((run(batch, x=x, y=y), {"x": x, "y": y, "part": y[:, 2:4]}))
        assert run.last_dispatch is not None
        assert run.last_dispatch.slot < 0
    for outputs, expected in kept:
        assert all(torch.equal(outputs[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rows", [8, 4, 3])
def test_inputs_that_lie_where_the_graph_reads_them_are_not_copied(rows: int) -> None:
    captured = runner(both)
    inputs = captured.inputs
    layout = inputs.layout(max(4, rows), max(4, rows))
    values = {name: view[:rows] for name, view in layout.views.items()}
    slab = inputs.transport.slab
    sources = sources_of(values, layout.moves(rows, rows), slab)
    assert sources.kinds == "kk" and all(map(is_, sources.tensors, values.values()))
    # The bits of a lazily negated one are not its values.
    values["x"] = torch._neg_view(values["x"])
    assert sources_of(values, layout.moves(rows, rows), slab).kinds == "hk"
