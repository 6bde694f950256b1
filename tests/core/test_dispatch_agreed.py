"""A graph that all ranks have agreed on is dispatched exactly, or the batch runs eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    GraphRunner,
    InputSpec,
    Reason,
)

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


def ladder(*sizes: int, **options: Any) -> GraphDispatcher:
    dispatcher = GraphDispatcher("FULL", **options)
    for size in sizes:
        dispatcher.publish(FULL, BatchDescriptor(size))
    return dispatcher


def test_a_missing_agreed_graph_is_not_replaced_by_a_larger_graph():
    dispatch = ladder(4, 16).dispatch(Batch(3), agreed=BatchDescriptor(8))
    assert (dispatch.mode, dispatch.reason, dispatch.slot) == (NONE, Reason.RANKS_DISAGREE, -1)


def test_a_step_takes_the_agreed_graph_or_runs_eagerly():
    runner = GraphRunner(
        lambda x: x + 1,
        sizes=[4, 16],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
    )
    runner.capture()
    for size, reason in ((16, Reason.HIT), (8, Reason.RANKS_DISAGREE)):
        agreed = next(
            (
                graph.descriptor
                for graph in runner.dispatcher.published
                if graph.descriptor.num_tokens == size
            ),
            BatchDescriptor(size, size, uniform=True, query_len=1),
        )
        out = runner(Batch(3, 3, 1), x=torch.ones(3, 4), agreed=agreed)
        assert torch.equal(out, torch.full((3, 4), 2.0))
        assert runner.last_dispatch.reason is reason


def test_an_agreed_dispatch_is_bound_to_its_mode():
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for mode in (FULL, PIECEWISE):
        dispatcher.publish(mode, BatchDescriptor(8))
    told = dispatcher.peek(Batch(3, exclude=frozenset({FULL})))
    assert told.mode is PIECEWISE
    for _ in range(2):
        assert dispatcher.dispatch(Batch(3), agreed=told) == told
        assert dispatcher.dispatch(Batch(3), agreed=told.descriptor).mode is FULL
        batch = Batch(3, exclude=frozenset({PIECEWISE}))
        dispatch = dispatcher.dispatch(batch, agreed=told)
        assert dispatch.reason is Reason.RANKS_DISAGREE


def test_an_agreed_dispatch_of_mode_none_runs_eagerly():
    dispatcher = ladder(4, 8)
    none = dispatcher.peek(Batch(9))
    assert none.mode is NONE
    assert dispatcher.dispatch(Batch(3), agreed=none).reason is Reason.RANKS_DISAGREE


def test_an_agreed_graph_is_used_beyond_max_padding():
    dispatcher = ladder(4, 64, max_padding=1.5)
    for _ in range(2):
        assert dispatcher.dispatch(Batch(1)).reason is Reason.PADDING
        assert dispatcher.dispatch(Batch(1), agreed=BatchDescriptor(64)).reason is Reason.HIT


@pytest.mark.parametrize(
    "batch",
    [
        Batch(65),
        Batch(3, 9),
        Batch(3, variant="draft"),
        Batch(3, num_active_loras=1),
        Batch(3, bounds=(99,)),
        Batch(3),
        Batch(3, bounds=(9,), exclude=frozenset({FULL})),
    ],
    ids=str,
)
def test_an_agreed_graph_that_cannot_serve_the_batch_is_not_run(batch):
    dispatcher, agreed = ladder(128), BatchDescriptor(64, 8, bounds=(64,))
    dispatcher.publish(FULL, agreed)
    for _ in range(2):
        assert dispatcher.dispatch(batch, agreed=agreed).reason is Reason.RANKS_DISAGREE
    assert dispatcher.dispatch(Batch(3, bounds=(9,)), agreed=agreed).descriptor == agreed


def test_an_agreed_graph_is_dispatched_only_between_its_publish_and_its_withdrawal():
    dispatcher, agreed = ladder(16), BatchDescriptor(8)
    for _ in range(3):
        assert dispatcher.dispatch(Batch(3), agreed=agreed).reason is Reason.RANKS_DISAGREE
        assert dispatcher.dispatch(Batch(3)).descriptor.num_tokens == 16
        dispatcher.publish(FULL, agreed)
        assert dispatcher.dispatch(Batch(3), agreed=agreed).reason is Reason.HIT
        assert dispatcher.dispatch(Batch(3)).descriptor == agreed
        dispatcher.withdraw(FULL, agreed)


def test_peek_changes_no_counts_of_the_dispatcher():
    dispatcher = ladder(4)
    for tokens in (1, 1, 9, 9):
        assert dispatcher.peek(Batch(tokens)) == dispatcher.peek(Batch(tokens))
    dispatcher.peek(Batch(3), agreed=BatchDescriptor(8))
    assert not any(dispatcher.counts().values()) and not any(dispatcher.hits().values())
