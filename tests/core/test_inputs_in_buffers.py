"""Inputs of a step that are views of the runner's own input buffers."""

from __future__ import annotations

from operator import is_
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import Batch, GraphMode, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.inputs import transport
from graphrt.core.inputs.layout import InputLayout, StepMoves
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


def test_inputs_in_place_are_recognized_in_one_look_beside_ordinary_inputs(monkeypatch) -> None:
    captured = runner(both)
    layout, slab = captured.inputs.layout(8, 8), captured.inputs.transport.slab
    moves = layout.moves(8, 8)
    ordinary = {name: torch.rand(8, 8) for name in "xy"}
    for values in (ordinary, layout.views):
        sources_of(values, moves, slab)
    # From here on nothing is looked at one by one.
    monkeypatch.setattr(transport, "_one_by_one", None)
    for _ in range(3):
        found = sources_of(layout.views, moves, slab)
        assert found.kinds == "kk" and found.used_as_given
        assert sources_of(ordinary, moves, slab).kinds == "hh"


def test_in_a_slab_inputs_of_other_strides_are_not_taken_for_inputs_in_place(monkeypatch) -> None:
    """Of two blocks: in place they have gaps, so contiguous ones are at other places."""
    specs = {"x": InputSpec(torch.float32, (2, "tokens"))}
    captured = GraphRunner(lambda x: x, mode="FULL", sizes=[4], inputs=specs, platform="cpu")
    layout, slab = captured.inputs.layout(4, 4), captured.inputs.transport.slab
    moves = layout.moves(3, 3)
    in_place = layout.views["x"][:, :3]
    packed = slab.buffer[:24].view(torch.float32).view(2, 3)
    for _ in range(3):
        assert sources_of({"x": in_place}, moves, slab).kinds == "k"
        assert sources_of({"x": packed}, moves, slab).kinds == "h"


SPECS = st.builds(
    InputSpec,
    st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]),
    st.sampled_from([("tokens",), ("tokens", 3), (2, "reqs"), ("reqs+1",), (4,)]),
    pad=st.sampled_from([0, 1, -0.0, "repeat"]),
)


@given(st.lists(SPECS, min_size=1, max_size=6), st.integers(1, 4), st.data())
@settings(max_examples=80, deadline=None)
def test_inputs_on_the_device_are_copied_and_padded_as_on_the_host(specs, rows, data) -> None:
    declared = {f"x{number}": spec for number, spec in enumerate(specs)}
    kinds = "".join(data.draw(st.sampled_from("dk")) for _ in specs)
    slabs, layouts = [], []
    for _ in range(2):
        layout = InputLayout(declared, 4, 4)
        slabs.append(torch.full((layout.nbytes + 16,), 7, dtype=torch.uint8))
        layout.place(slabs[-1])
        layouts.append(layout)
    on_device, on_host = (layout.moves(rows, rows) for layout in layouts)
    values = [torch.rand(move.shape).mul(9).to(move.field.spec.dtype) for move in on_host.fields]
    for moves, fields in ((on_device, kinds), (on_host, "d" * len(specs))):
        for move, value, kind in zip(moves.fields, values, fields, strict=True):
            if kind == "k" or moves is on_host:
                move.live.copy_(value)
    found = on_device.on_device(kinds)
    found.copy(values)
    found.pad()
    on_host.pad_at(slabs[1].data_ptr())
    assert all(torch.equal(*each) for each in zip(*map(_rows, (on_device, on_host)), strict=True))


def _rows(moves: StepMoves) -> list[torch.Tensor]:
    return [move.field.view.view(torch.uint8) for move in moves.fields]


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
