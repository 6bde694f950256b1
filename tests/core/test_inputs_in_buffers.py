"""Inputs of a step that are views of the runner's own input buffers."""

from __future__ import annotations

from operator import is_
from types import MappingProxyType
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphMode, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.inputs.transport import sources_of


def runner(forward: Any) -> GraphRunner:
    inputs = {name: InputSpec(torch.float32, ("tokens", 8)) for name in "xy"}
    return GraphRunner(forward, mode="FULL", sizes=[1, 4, 8], inputs=inputs, platform="cpu")


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y * 3


@pytest.mark.parametrize("rows", [8, 4, 3])
def test_inputs_swapped_between_their_buffers_are_read_before_being_overwritten(
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


def test_an_input_may_be_a_shifted_view_of_its_own_buffer() -> None:
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
def test_an_eager_step_that_returns_its_inputs_returns_copies_of_the_buffers(
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
def test_inputs_that_already_are_the_graphs_buffers_are_not_copied(rows: int) -> None:
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


CHANGES = {
    "none": lambda x, view: x,
    "in the slab": lambda x, view: view[:4].copy_(x),
    "further in the slab": lambda x, view: view[1:5].copy_(x),
    "negated": lambda x, view: torch._neg_view(-x),
    "other strides": lambda x, view: x.t().contiguous().t(),
    "a parameter": lambda x, view: torch.nn.Parameter(x),
    "requires a gradient": lambda x, view: x.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_inputs_are_classified_the_same_after_ordinary_inputs_as_alone(change: str) -> None:
    captured = runner(both)
    moves = captured.inputs.layout(8, 8).moves(4, 4)
    slab, view = captured.inputs.transport.slab, captured.inputs.buffers["y"]
    alone = runner(both).inputs.layout(8, 8).moves(4, 4)
    for _ in range(2):
        sources_of({name: torch.rand(4, 8) for name in "xy"}, moves, slab)
    assert moves.like
    x, y = torch.rand(2, 4, 8)
    values = {"x": x, "y": CHANGES[change](y.clone(), view)}
    after, single = (sources_of(values, each, slab) for each in (moves, alone))
    assert (after.kinds, after.used_as_given) == (single.kinds, single.used_as_given)
    assert all(map(torch.equal, after.tensors, single.tensors))
    assert torch.equal(after.tensors[1], y)
    if after.used_as_given:
        assert after.addresses == single.addresses


def test_two_alternating_kinds_of_inputs_are_both_remembered() -> None:
    captured = runner(both)
    moves, slab = captured.inputs.layout(8, 8).moves(4, 4), captured.inputs.transport.slab
    x = torch.rand(4, 8)
    for step in range(100):
        y = torch.rand(4, 8, requires_grad=step % 2 == 0)
        seen = sources_of({"x": x, "y": y}, moves, slab)
        assert seen.used_as_given and seen.kinds == "hh" and seen.tensors[1] is y
    assert moves._made == len(moves.like) == 2


@pytest.mark.parametrize(
    "options", [GraphOptions(lazy=True), GraphOptions(check="always")], ids=["lazy", "tried"]
)
def test_a_nested_input_given_as_its_own_buffer_survives_captures_and_trials(
    options: GraphOptions,
) -> None:
    """A capture, and the runs of a trial, write the buffers: what a step brought there is kept
    before."""
    spec = InputSpec(torch.float32, ("tokens", 8))
    run = GraphRunner(
        lambda x, more: x + more["y"],
        mode="FULL",
        sizes=[4],
        inputs={"x": spec, "more": {"y": spec}},
        platform="cpu",
        options=options,
    )
    if not options.lazy:
        run.capture()
    place, x = run.inputs.buffers["more.y"], torch.randn(4, 8)
    for value in (7.0, 8.0):
        place.fill_(value)
        assert torch.equal(run(x=x, more=MappingProxyType({"y": place})), x + value)
        assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT
