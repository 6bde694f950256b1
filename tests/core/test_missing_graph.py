"""A wrapper that lacks the dispatched graph runs eagerly and counts the step as missing graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    Reason,
    forward_context,
)
from graphrt.core.base.errors import (
    CaptureSealedError,
    InvalidOptionError,
    PoolClosedError,
)
from graphrt.cpu import CPUGraphWrapper

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
D4 = BatchDescriptor(4, 4, uniform=True, query_len=1)


def wrapper(mode: GraphMode = FULL, **options: Any) -> CPUGraphWrapper:
    return CPUGraphWrapper(
        lambda x: x + 1, mode, pool=GraphPool("cpu"), options=GraphOptions(**options)
    )


def published(mode: GraphMode = FULL) -> GraphDispatcher:
    dispatcher = GraphDispatcher(mode)
    dispatcher.publish(mode, D4)
    return dispatcher


def test_a_wrapper_without_lazy_reports_a_missing_graph_to_the_dispatcher():
    dispatcher, wrapped = published(), wrapper()
    x = torch.ones(4)
    for _ in range(3):
        with dispatcher.step(Batch(3, 3, 1)):
            assert torch.equal(wrapped(x), x + 1)
    assert wrapped.eager_calls[Reason.MISSING_GRAPH] == 3
    counts = dispatcher.counts()
    assert (counts[Reason.HIT], counts[Reason.MISSING_GRAPH]) == (0, 3)
    assert dispatcher.hits() == {(FULL, D4): 0}
    assert dispatcher.not_served_by() == {(FULL, D4): {Reason.MISSING_GRAPH: 3}}


def test_a_wrapper_that_replays_its_graph_keeps_the_hit_count():
    dispatcher, wrapped, x = published(), wrapper(lazy=True), torch.ones(4)
    for _ in range(3):
        with dispatcher.step(Batch(3, 3, 1)):
            wrapped(x)
    assert len(wrapped.entries) == 1
    assert wrapped.eager_calls[Reason.MISSING_GRAPH] == 0
    assert dispatcher.counts()[Reason.HIT] == 3
    wrapped.drop(D4)
    wrapped.seal()
    with dispatcher.step(Batch(3, 3, 1)):
        wrapped(torch.ones(4))
    assert dispatcher.counts()[Reason.HIT] == 3
    assert dispatcher.counts()[Reason.MISSING_GRAPH] == 1


def test_closing_a_pool_destroys_the_graphs_of_its_wrappers():
    pool = GraphPool("cpu")
    lazy = GraphOptions(lazy=True)
    wrappers = [CPUGraphWrapper(lambda x: x + 1, FULL, pool=pool, options=lazy) for _ in range(2)]
    for wrapped in wrappers:
        with forward_context("FULL", D4):
            wrapped(torch.ones(4))
        assert len(wrapped.entries) == 1
    pool.close()
    for wrapped in wrappers:
        assert not wrapped.entries
        with forward_context("FULL", D4), pytest.raises(PoolClosedError):
            wrapped(torch.ones(4))


@pytest.mark.parametrize("slot", [-1, 0])
@pytest.mark.parametrize("descriptor", [None, D4])
def test_a_missing_graph_under_a_hosts_own_context_is_counted(slot, descriptor):
    wrapped = wrapper()
    with forward_context("FULL", descriptor, slot=slot):
        wrapped(torch.ones(4))
    assert wrapped.eager_calls[Reason.MISSING_GRAPH] == 1


def test_a_hosts_own_context_can_name_the_dispatcher_that_counts_missing_graphs():
    dispatcher = published()
    dispatch = dispatcher.dispatch(Batch(3, 3, 1))
    context = forward_context(dispatch.mode, D4, slot=dispatch.slot, dispatcher=dispatcher)
    with context:
        wrapper()(torch.ones(4))
    assert dispatcher.counts()[Reason.MISSING_GRAPH] == 1


def test_missing_graphs_of_several_pieces_count_as_a_single_step():
    dispatcher, pieces = published(PIECEWISE), [wrapper(PIECEWISE) for _ in range(3)]
    for step in range(2):
        with dispatcher.step(Batch(3, 3, 1)):
            for piece in pieces:
                piece(torch.ones(4))
        assert dispatcher.counts()[Reason.MISSING_GRAPH] == step + 1
    assert [piece.eager_calls[Reason.MISSING_GRAPH] for piece in pieces] == [2, 2, 2]


def test_a_strict_wrapper_without_the_graph_raises():
    dispatcher, wrapped = published(), wrapper(strict=True)
    with dispatcher.step(Batch(3, 3, 1)), pytest.raises(CaptureSealedError, match="lazy=True"):
        wrapped(torch.ones(4))
    with forward_context("FULL", D4), pytest.raises(CaptureSealedError, match="which has none yet"):
        wrapped(torch.ones(4))
    wrapped.seal()
    with dispatcher.step(Batch(3, 3, 1)), pytest.raises(CaptureSealedError):
        wrapped(torch.ones(4))
    with forward_context("FULL", D4), pytest.raises(CaptureSealedError):
        wrapped(torch.ones(4))
    assert torch.equal(wrapped(torch.ones(4)), torch.full((4,), 2.0))


def runner(**options: Any) -> GraphRunner:
    return GraphRunner(
        lambda x: x + 1,
        sizes=[2, 4],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(**options),
    )


def test_a_runner_whose_wrapper_lost_a_graph_reports_missing_graphs():
    served = runner()
    served.capture()
    x = torch.ones(3, 4)
    served(x=x)
    (own,) = served.graphs.owners()
    own.clear_graphs()
    own.seal()
    for _ in range(2):
        assert torch.equal(served(x=x), x + 1)
    report = served.report()
    assert report.reasons[Reason.HIT] == 1
    assert report.reasons[Reason.MISSING_GRAPH] == 2
    assert sum(report.steps.values()) == 1
    assert (report.live_tokens, report.padded_tokens) == (9, 12)


def test_a_strict_runner_whose_wrapper_lost_a_graph_raises():
    served = runner(strict=True)
    served.capture()
    (own,) = served.graphs.owners()
    own.clear_graphs()
    with pytest.raises(CaptureSealedError):
        served(x=torch.ones(3, 4))


@pytest.mark.parametrize("argument", [{"options": {"lazy": True}}, {"pool": 5}])
def test_a_wrapper_refuses_options_or_a_pool_of_wrong_type(argument):
    with pytest.raises(InvalidOptionError, match=next(iter(argument))):
        CPUGraphWrapper(lambda x: x, FULL, **argument)
