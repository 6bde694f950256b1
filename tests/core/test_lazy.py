"""A lazy step captures the planned graph that dispatch would choose, and then replays it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from brute_force import KEYS, Limits, agreeing, batches, brute_force, preference
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Reason,
)
from graphrt.core.base.errors import CaptureSyncError, InvalidInputError
from tests.draws import MORE

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def lazy(max_padding: float | None = None, **arguments: Any) -> GraphRunner:
    return GraphRunner(
        lambda x: x + 1,
        **{"sizes": [1, 8], "mode": "FULL", "platform": "cpu", **arguments},
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(lazy=True, max_padding=max_padding),
    )


def test_a_graph_beyond_max_padding_is_not_captured_lazily():
    runner = lazy(max_padding=1.5)
    for _ in range(2):
        runner(Batch(3, 3, 1), x=torch.ones(3, 4))
        assert runner.last_dispatch.reason is Reason.PADDING
    assert runner.report().graphs == ()
    runner(Batch(6, 6, 1), x=torch.ones(6, 4))
    assert runner.last_dispatch.reason is Reason.HIT
    assert [graph.descriptor.num_tokens for graph in runner.report().graphs] == [8]


def test_a_planned_graph_beyond_max_padding_gives_reason_padding():
    dispatcher = GraphDispatcher("FULL", max_padding=2.0)
    dispatcher.reserve(FULL, BatchDescriptor(8))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.PADDING
    assert dispatcher.dispatch(Batch(4)).reason is Reason.NOT_CAPTURED
    assert dispatcher.planned_for(Batch(3)) is None
    assert dispatcher.planned_for(Batch(3), agreed=BatchDescriptor(8)) is not None
    assert dispatcher.planned_for(Batch(3), agreed=BatchDescriptor(4)) is None


def test_a_lazy_batch_without_loras_captures_the_graph_without_loras():
    runner = lazy(sizes=[8], loras=(0, 4))
    runner(Batch(6, 6, 1, num_active_loras=2), x=torch.ones(6, 4))
    assert runner.last_dispatch.descriptor.num_active_loras == 4
    runner(Batch(6, 6, 1), x=torch.ones(6, 4))
    assert runner.last_dispatch.descriptor.num_active_loras == 0
    assert len(runner.report().graphs) == 2
    runner(Batch(6, 6, 1, num_active_loras=2), x=torch.ones(6, 4))
    assert runner.last_dispatch.descriptor.num_active_loras == 4
    assert len(runner.report().graphs) == 2


def test_a_lazy_batch_of_short_contexts_captures_the_graph_of_smaller_bound():
    runner = lazy(sizes=[8], bounds=[(64,), (4096,)])
    runner(Batch(6, 6, 1, bounds=(100,)), x=torch.ones(6, 4))
    runner(Batch(6, 6, 1, bounds=(10,)), x=torch.ones(6, 4))
    assert runner.last_dispatch.descriptor.bounds == (64,)


def test_a_batch_above_all_planned_sizes_is_too_large_before_the_first_capture_too():
    runner = lazy(max_num_tokens=16)
    for rows in (16, 3, 16):
        runner(x=torch.ones(rows, 4))
    counts = runner.dispatcher.counts()
    assert (counts[Reason.TOO_LARGE], counts[Reason.HIT]) == (2, 1)


def test_a_step_that_captures_its_graph_counts_once():
    runner = lazy()
    for rows in (1, 8, 8):
        runner(x=torch.ones(rows, 4))
    counts = runner.dispatcher.counts()
    assert {reason: count for reason, count in counts.items() if count} == {Reason.HIT: 3}


def test_a_step_whose_lazy_capture_fails_counts_once():
    runner = GraphRunner(
        lambda x: x * x.sum().item(),
        sizes=[8],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(lazy=True),
    )
    with pytest.raises(CaptureSyncError):
        runner(x=torch.ones(8, 4))
    runner(x=torch.ones(8, 4))
    counts = runner.dispatcher.counts()
    assert {reason: count for reason, count in counts.items() if count} == {Reason.NOT_CAPTURED: 2}


@pytest.mark.parametrize(("nbytes", "word"), [(0, "no rows in memory"), (1 << 10, "wrong dtype")])
def test_unusable_inputs_are_refused_before_a_lazy_capture(nbytes, word):
    runner, x = lazy(), torch.ones(8, 4, dtype=torch.float64 if nbytes else torch.float32)
    x.untyped_storage().resize_(nbytes)
    with pytest.raises(InvalidInputError, match=word):
        runner(x=x)
    assert runner.report().graphs == ()
    assert torch.equal(runner(x=torch.ones(8, 4)), torch.full((8, 4), 2.0))
    assert runner.last_dispatch.reason is Reason.HIT


def test_a_lazy_step_captures_only_the_graph_that_ranks_agreed_on():
    runner = lazy(sizes=[4, 8])
    agreed = next(key for key in runner.plan.keys if key[1].num_tokens == 8)[1]
    runner(Batch(3, 3, 1), x=torch.ones(3, 4), agreed=agreed)
    assert runner.last_dispatch.descriptor == agreed
    runner(Batch(3, 3, 1), x=torch.ones(3, 4), agreed=agreed._replace(num_tokens=16))
    assert runner.last_dispatch.reason is Reason.RANKS_DISAGREE
    assert [graph.descriptor for graph in runner.report().graphs] == [agreed]


@pytest.mark.draws
@settings(max_examples=60 * MORE, deadline=None)
@given(
    st.sets(KEYS, max_size=16),
    st.sets(KEYS, max_size=16),
    batches(),
    st.sampled_from([None, 1.0, 1.5, 3.0]),
    st.randoms(use_true_random=False),
)
def test_planned_for_returns_the_graph_that_dispatch_finds_after_its_capture(
    published, planned, batch, max_padding, drawn
):
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", max_padding=max_padding)
    for key in published:
        dispatcher.publish(*key)
    for key in planned - published:
        dispatcher.reserve(*key)
    limits = agreeing(drawn, batch, Limits(max_padding=max_padding), published | planned)
    agreed = limits.agreed
    best = brute_force(planned - published, batch, limits)
    wanted = dispatcher.planned_for(batch, agreed=agreed)
    assert (None if wanted is None else preference(*wanted[:2])) == best
    dispatch = dispatcher.dispatch(batch, agreed=agreed)
    if wanted is None:
        assert dispatch.reason is not Reason.NOT_CAPTURED
        return
    is_hit = dispatch.reason is Reason.HIT
    better = not is_hit or preference(*wanted[:2]) < preference(*dispatch[:2])
    dispatcher.publish(wanted.mode, wanted.descriptor)
    again = dispatcher.dispatch(batch, agreed=agreed)
    assert (again.slot == wanted.slot) is better or preference(*again[:2]) == best


@pytest.mark.parametrize("rows", [(1, 2, 3, 1, 7), (1, 1, 8, 5, 2), (3, 1, 2, 8)])
def test_undeclared_output_axes_are_found_lazily_for_any_order_of_sizes(rows: tuple[int, ...]):
    """Of one row alone it cannot be told what is a batch axis, and no step of it needs to know."""
    runner = GraphRunner(
        lambda x: {"x": x + 1, "turned": (x * 2).t(), "constant": x.new_ones(1, 4)},
        sizes=[1, 2, 4, 8],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        options=GraphOptions(lazy=True),
    )
    for count in (*rows, *rows):
        x = torch.randn(count, 4)
        outputs = runner(x=x)
        assert torch.equal(outputs["x"], x + 1)
        assert torch.equal(outputs["turned"], (x * 2).t())
        assert torch.equal(outputs["constant"], torch.ones(1, 4))
        assert runner.last_dispatch.reason is Reason.HIT
