"""A runner or wrapper called inside a capture becomes part of the outer graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runner import rows, runner

from graphrt import (
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    Host,
    InputSpec,
    Reason,
    current_context,
    eager_break,
    forward_context,
)
from graphrt.core.base.errors import InvalidInputError, NestedCaptureError, PoolBusyError
from graphrt.cpu import CPUGraphWrapper

LAZY = GraphOptions(lazy=True)
MODES = ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"]


def served(captured: Any, count: int, value: float = 1.0, **more: Any) -> torch.Tensor:
    """The outputs of one step that a graph must have served."""
    out = captured(x=rows(count, value), **more).clone()
    assert captured.last_dispatch.reason is Reason.HIT
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [False, True], ids=["own-pool", "one-pool"])
@pytest.mark.parametrize("lazy", [False, True], ids=["captured", "lazy"])
@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_replays_of_an_outer_graph_recompute_its_inner_runner(mode, shared, lazy, outputs):
    pool = GraphPool("cpu")
    options = GraphOptions(lazy=lazy, outputs=outputs)
    inner = runner(lambda x: x * 10, pool=pool if shared else None, options=options)
    if not lazy:
        inner.capture()
    outer = runner(lambda x: inner(x=x + 1) + x, mode=mode, pool=pool)
    outer.capture()
    for count, value in [(2, 1.0), (3, 2.0), (4, 5.0), (1, -1.0)]:
        assert torch.equal(served(outer, count, value), rows(count, 11 * value + 10))
    # The inner one is left as it was, and goes on by itself.
    assert inner.last_dispatch is None
    assert torch.equal(inner(x=rows(3, 2.0)), rows(3, 20.0))
    assert inner.last_dispatch.reason is Reason.HIT


def test_a_lazy_inner_runner_captures_no_graph_inside_an_outer_capture():
    inner = runner(lambda x: x * 10, options=LAZY)
    outer = runner(lambda x: inner(x=x) + x)
    outer.capture()
    assert torch.equal(served(outer, 2, 3.0), rows(2, 33.0))
    assert not inner.dispatcher.published


def test_a_runner_called_in_an_eager_part_replays_its_own_graph():
    seen = []

    def note(x):
        seen.append(current_context().mode.name)
        return x * 10

    unchecked = GraphOptions(check="off")
    inner = runner(note, options=unchecked)
    inner.capture()
    captured = len(seen)

    @eager_break
    def middle(hidden):
        return inner(x=hidden) + 0

    outer = runner(lambda x: middle(x + 1) + x, mode="PIECEWISE", sizes=[2, 4], options=unchecked)
    outer.capture()
    warm_ups = len(seen) - captured
    assert warm_ups == 2, seen
    for value in (1.0, 4.0):
        assert torch.equal(served(outer, 2, value), rows(2, 11 * value + 10))
    assert len(seen) == captured + warm_ups
    assert inner.last_dispatch.reason is Reason.HIT


def test_a_lazy_runner_in_an_eager_part_captures_during_the_outer_capture():
    inner = runner(lambda x: x * 10, options=LAZY)

    @eager_break
    def middle(hidden):
        return inner(x=hidden) + 0

    outer = runner(lambda x: middle(x + 1) + x, mode="PIECEWISE", sizes=[2])
    outer.capture()
    assert len(inner.dispatcher.published) == 1
    assert torch.equal(served(outer, 2, 3.0), rows(2, 43.0))
    assert torch.equal(served(outer, 1, 5.0), rows(1, 65.0))


def test_an_eager_part_that_runs_a_runner_of_the_same_pool_is_refused():
    pool = GraphPool("cpu")
    inner = runner(lambda x: x * 10, pool=pool)
    inner.capture()

    @eager_break
    def middle(hidden):
        return inner(x=hidden) + 0

    outer = runner(lambda x: middle(x + 1) + x, mode="PIECEWISE", pool=pool)
    with pytest.raises(PoolBusyError, match="GraphPool of its own"):
        outer.capture()
    assert torch.equal(served(inner, 2), rows(2, 10.0))


def test_an_eager_break_of_the_inner_forward_breaks_the_outer_graph():
    @eager_break
    def scaled(hidden):
        return hidden * (current_context().metadata or 1)

    inner = runner(lambda x: scaled(x + 1) + x, mode="PIECEWISE")
    outer = runner(lambda x: inner(x=x) * 2, mode="PIECEWISE", sizes=[2])
    outer.capture()
    assert torch.equal(served(outer, 2, 1.0, metadata=3), rows(2, 14.0))
    assert torch.equal(served(outer, 2, 1.0, metadata=5), rows(2, 22.0))


def test_an_inner_runner_checks_its_inputs_by_its_own_declarations():
    inner = runner(
        lambda x, scale: x * scale,
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 4)),
            "scale": InputSpec(torch.float32, ("tokens", 1), pad=7),
        },
    )
    inner.capture()

    def forward(x):
        # Fewer rows than the outer graph has.
        return x + inner(x=x[:1], scale=x[:1, :1])

    outer = runner(forward, sizes=[2])
    outer.capture()
    assert torch.equal(served(outer, 2, 3.0), rows(2, 12.0))
    with pytest.raises(InvalidInputError, match="wrong dtype"):
        runner(lambda x: inner(x=x.double(), scale=x[:, :1])).capture()


def test_in_place_input_writes_of_an_inner_forward_leave_the_outer_tensors():
    inner = runner(lambda x: x.mul_(10))
    outer = runner(lambda x: inner(x=x) + x)
    outer.capture()
    assert torch.equal(served(outer, 2, 3.0), rows(2, 33.0))


def test_an_inner_runner_with_a_bind_hook_is_refused_at_capture():
    scale = torch.ones(1)
    inner = runner(
        lambda x: x * scale, host=Host(bind=lambda views, descriptor, phase: scale.fill_(5))
    )
    with pytest.raises(NestedCaptureError, match="bind of its own"):
        runner(lambda x: inner(x=x)).capture()
    assert torch.equal(inner(x=rows(2)), rows(2, 5.0))


@pytest.mark.parametrize("given", ["updates", "metadata"])
def test_an_inner_runner_given_its_own_updates_or_metadata_is_refused(given):
    inner = runner(lambda x: x * 10)
    outer = runner(lambda x: inner(x=x, **{given: {"a": 1}}))
    with pytest.raises(NestedCaptureError, match=f"{given} of its own"):
        outer.capture()
    passed_on = runner(
        lambda x: inner(x=x, metadata=current_context().metadata),
        host=Host(metadata=lambda descriptor: {"longest": 4}),
    )
    passed_on.capture()
    assert torch.equal(served(passed_on, 2), rows(2, 10.0))


@pytest.mark.parametrize("call", ["verify", "capture"])
def test_verify_or_capture_of_an_inner_runner_during_a_capture_is_refused(call):
    inner = runner(lambda x: x * 10, sizes=[2])

    def forward(x):
        if call == "verify":
            return inner.verify(x=x)
        if current_context().capture is not None:
            inner.capture()
        return x

    with pytest.raises(NestedCaptureError):
        runner(forward, sizes=[2]).capture()
    inner.capture()
    assert torch.equal(served(inner, 2), rows(2, 10.0))


def test_a_refused_recapture_inside_a_capture_keeps_the_inner_graphs():
    inner = runner(lambda x: x + 5)
    inner.capture()

    def forward(x):
        inner.recapture()
        return x + 1

    with pytest.raises((NestedCaptureError, PoolBusyError)):
        runner(forward, sizes=[2]).capture()
    assert inner.report().graphs
    assert torch.equal(served(inner, 2), rows(2, 6.0))


@pytest.mark.parametrize("how", ["captured", "lazy"])
@pytest.mark.parametrize("same", [False, True], ids=["own-context", "outer-context"])
def test_a_foreign_wrapper_inside_a_capture_becomes_part_of_the_outer_graph(how, same):
    pool = GraphPool("cpu")
    wrapped = CPUGraphWrapper(lambda x: x * 10, "FULL", pool=pool, options=LAZY)

    def inner(x):
        if same:
            return wrapped(x)
        with forward_context("FULL", BatchDescriptor(len(x))):
            return wrapped(x)

    if how == "captured":
        for size in (2, 4, 8, 16):
            with forward_context("FULL", BatchDescriptor(size)):
                wrapped(rows(size))
    before = len(wrapped.entries)
    outer = runner(lambda x: inner(x + 1) + x)
    outer.capture()
    assert len(wrapped.entries) == before
    for value in (1.0, 4.0):
        assert torch.equal(served(outer, 2, value), rows(2, 11 * value + 10))


def test_a_runner_called_by_a_lazy_wrapper_becomes_part_of_its_graph():
    inner = runner(lambda x: x * 10)
    inner.capture()
    wrapped = CPUGraphWrapper(lambda x: inner(x=x) + x, "FULL", options=LAZY)
    x = rows(2)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with forward_context("FULL", BatchDescriptor(2)):
            assert torch.equal(wrapped(x), rows(2, 11 * value))


def test_three_levels_of_nested_runners_replay_the_eager_values():
    first = runner(lambda x: x + 1, options=LAZY)
    second = runner(lambda x: first(x=x) * 2)
    second.capture()
    third = runner(lambda x: second(x=x) + first(x=x))
    third.capture()
    assert torch.equal(served(third, 3, 4.0), rows(3, 15.0))
    assert torch.equal(served(second, 3, 4.0), rows(3, 10.0))


def test_a_graph_replayed_between_pieces_of_a_step_needs_its_own_pool():
    pool, x = GraphPool("cpu"), torch.ones(4)
    piece, whole = (
        CPUGraphWrapper(lambda x: x + 1, mode, pool=pool, options=LAZY)
        for mode in ("PIECEWISE", "FULL")
    )
    for mode, wrapped in (("PIECEWISE", piece), ("FULL", whole)):
        with forward_context(mode, BatchDescriptor(4)):
            wrapped(x)
    with forward_context("PIECEWISE", BatchDescriptor(4)):
        first = piece(x)
        with forward_context("FULL", BatchDescriptor(4)), pytest.raises(PoolBusyError):
            whole(x)
        assert torch.equal(first, x + 1)
        assert torch.equal(piece(x), x + 1)
    with forward_context("FULL", BatchDescriptor(4)):
        assert torch.equal(whole(x), x + 1)
