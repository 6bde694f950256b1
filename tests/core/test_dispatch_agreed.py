"""What ranks have agreed on is one graph: that one runs, or none."""

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


@pytest.mark.xfail(strict=True, reason="at_least=8 is answered with 16")
def test_a_graph_that_ranks_agreed_on_and_that_is_missing_is_not_replaced_by_a_larger_one():
    found = ladder(4, 16).dispatch(Batch(3), agreed=BatchDescriptor(8))
    assert (found.mode, found.reason, found.slot) == (NONE, Reason.RANKS_DISAGREE, -1)


@pytest.mark.xfail(strict=True, reason="at_least=8 is answered with 16")
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
                found.descriptor
                for found in runner.dispatcher.published
                if found.descriptor.num_tokens == size
            ),
            BatchDescriptor(size, size, uniform=True, query_len=1),
        )
        out = runner(Batch(3, 3, 1), x=torch.ones(3, 4), agreed=agreed)
        assert torch.equal(out, torch.full((3, 4), 2.0))
        assert runner.last_dispatch.reason is reason
