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


def test_a_strict_runner_whose_wrapper_lost_a_graph_raises_until_it_is_captured_again():
    served = runner(strict=True)
    served.capture()
    (own,) = served.graphs.owners()
    own.clear_graphs()
    with pytest.raises(CaptureSealedError, match="was destroyed"):
        served(x=torch.ones(3, 4))
    served.capture()
    assert torch.equal(served(x=torch.ones(3, 4)), torch.full((3, 4), 2.0))


# Graphs that are destroyed ------------------------------------------------------------------------


def counting_runner(pool: GraphPool | None = None, **options: Any) -> tuple[GraphRunner, list[int]]:
    """A FULL runner of sizes 2, 4 and 8, captured, and a counter of its forward's runs."""
    runs = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return x + 1

    served = GraphRunner(
        forward,
        sizes=[2, 4, 8],
        mode="FULL",
        platform=None if pool else "cpu",
        pool=pool,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(**options),
    )
    served.capture()
    return served, runs


def served_by(served: GraphRunner, runs: list[int], tokens: int = 3) -> int:
    """The size of the graph that replays steps of so many tokens; 0 where they run eagerly. HIT has
    to say the same."""
    for _ in range(4):  # trials run the forward too
        served(x=torch.ones(tokens, 4))
    before, hits = runs[0], served.report().reasons[Reason.HIT]
    for _ in range(4):
        assert torch.equal(served(x=torch.ones(tokens, 4)), torch.full((tokens, 4), 2.0))
    replays = 4 - (runs[0] - before)
    assert served.report().reasons[Reason.HIT] - hits == replays in (0, 4)
    assert served.last_dispatch is not None
    return served.last_dispatch.descriptor.num_tokens if replays else 0


def listed(served: GraphRunner) -> list[int]:
    """The sizes of the graphs in a report, and of those that were tried."""
    report = served.report()
    sizes = sorted(graph.descriptor.num_tokens for graph in report.graphs)
    assert sizes == sorted(trial.descriptor.num_tokens for trial in report.trust.trials)
    assert sizes == sorted(each["tokens"] for each in report.to_dict()["graphs"])
    return sizes


@pytest.mark.trust
@pytest.mark.parametrize("by", ["pool", "wrapper"])
def test_batches_of_a_dropped_graph_go_to_the_next_larger_one_until_it_is_captured_again(by):
    served, runs = counting_runner()
    (own,) = served.graphs.owners()
    dropped = served.dispatcher.dispatch(Batch(3)).descriptor
    (served.pool if by == "pool" else own).drop(dropped)
    assert (served_by(served, runs), listed(served)) == (8, [2, 8])
    served.capture()
    assert (served_by(served, runs), listed(served)) == (4, [2, 4, 8])


def test_capture_next_captures_a_dropped_graph_again():
    served, runs = counting_runner()
    served.pool.drop(served.dispatcher.dispatch(Batch(3)).descriptor)
    progress = served.capture_next()
    assert ([each.descriptor.num_tokens for each in progress.captured], progress.left) == ([4], 0)
    assert served_by(served, runs) == 4


@pytest.mark.trust
@pytest.mark.parametrize("by", ["pool", "wrapper"])
def test_after_clear_graphs_steps_are_eager_and_capture_captures_all_again(by):
    served, runs = counting_runner()
    (own,) = served.graphs.owners()
    for _ in range(2):
        (served.pool if by == "pool" else own).clear_graphs()
        assert (served_by(served, runs), listed(served)) == (0, [])
        served.capture()
        assert (served_by(served, runs), listed(served)) == (4, [2, 4, 8])


def test_a_lazy_runner_captures_a_dropped_graph_at_the_next_step_that_asks_for_it():
    served, runs = counting_runner(lazy=True)
    served.pool.drop(served.dispatcher.dispatch(Batch(3)).descriptor)
    assert served_by(served, runs) == 8  # sealed by capture()
    served.release()
    served(x=torch.ones(3, 4))
    served.pool.clear_graphs()
    served(x=torch.ones(3, 4))
    assert (served_by(served, runs), [*map(len, [served.report().graphs])]) == (4, [1])


def test_state_that_moved_while_no_graph_was_left_is_no_stale_input():
    cache = [torch.zeros(4)]
    served = GraphRunner(
        lambda x: x + cache[0],
        sizes=[4],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
    )
    served.capture()
    served(x=torch.ones(4, 4))
    served.pool.clear_graphs()
    cache[0] = torch.full((4,), 5.0)
    served.capture()
    for _ in range(40):
        assert torch.equal(served(x=torch.ones(4, 4)), torch.full((4, 4), 6.0))
    assert served.report().reasons[Reason.HIT] == 41


def test_a_pool_that_two_runners_share_withdraws_the_graphs_of_both():
    pool = GraphPool("cpu")
    pairs = [counting_runner(pool) for _ in range(2)]
    pool.drop(pairs[0][0].dispatcher.dispatch(Batch(3)).descriptor)
    assert [served_by(*pair) for pair in pairs] == [8, 8]
    pairs[0][0].capture()
    assert [served_by(*pair) for pair in pairs] == [4, 8]
    pairs[0][0].release()
    assert [served_by(*pair) for pair in pairs] == [0, 8]


def pieces_runner(pool: GraphPool) -> tuple[GraphRunner, list[CPUGraphWrapper]]:
    """A runner over two pieces that its forward has wrapped itself."""
    pieces = [CPUGraphWrapper(lambda x: x + 0.5, PIECEWISE, pool=pool) for _ in range(2)]
    served = GraphRunner(
        lambda x: pieces[1](pieces[0](x)),
        sizes=[2, 4, 8],
        mode="PIECEWISE",
        pieces="fx",
        pool=pool,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
    )
    served.capture()
    return served, pieces


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_a_graph_that_one_of_its_pieces_has_lost_is_withdrawn_and_captured_whole_again(lost):
    served, pieces = pieces_runner(GraphPool("cpu"))
    descriptor = served.dispatcher.dispatch(Batch(3)).descriptor
    for piece in lost:
        pieces[piece].drop(descriptor)
    x = torch.ones(3, 4)
    assert torch.equal(served(x=x), x + 1)
    assert served.last_dispatch is not None
    assert served.last_dispatch.descriptor.num_tokens == 8
    served.capture()
    assert torch.equal(served(x=x), x + 1)
    assert served.last_dispatch.descriptor.num_tokens == 4
    assert [len(piece.entries) for piece in pieces] == [3, 3]
    assert served.report().reasons[Reason.MISSING_GRAPH] == 0


def test_a_step_whose_forward_no_longer_calls_its_wrappers_is_no_hit():
    served, pieces = pieces_runner(GraphPool("cpu"))
    x = torch.ones(3, 4)
    served(x=x)
    hits = served.report().reasons[Reason.HIT]
    pieces[:] = [piece.runnable for piece in pieces]
    assert torch.equal(served(x=x), x + 1)
    reasons = served.report().reasons
    assert (reasons[Reason.HIT], reasons[Reason.MISSING_GRAPH]) == (hits, 1)


def test_a_piece_that_was_moved_to_another_pool_takes_its_graphs_along_when_that_is_cleared():
    served, pieces = pieces_runner(GraphPool("cpu"))
    other, x = GraphPool("cpu"), torch.ones(3, 4)
    pieces[0].clear_graphs()
    pieces[0].move_to(other)
    served.capture()
    assert torch.equal(served(x=x), x + 1)
    assert served.last_dispatch is not None and served.last_dispatch.reason is Reason.HIT
    other.clear_graphs()
    assert torch.equal(served(x=x), x + 1)
    assert served.last_dispatch.reason is Reason.NOT_CAPTURED


def test_a_hosts_dispatcher_no_longer_serves_a_graph_that_its_sealed_wrapper_has_dropped():
    dispatcher, wrapped, x = GraphDispatcher(FULL), wrapper(lazy=True), torch.ones(4)
    for tokens in (4, 8):
        with dispatcher.step(Batch(tokens)) as context:
            assert context.mode is GraphMode.NONE
        descriptor = BatchDescriptor(tokens)
        with forward_context(FULL, descriptor):
            wrapped(x)
        dispatcher.publish(FULL, descriptor)
        with dispatcher.step(Batch(tokens)):
            wrapped(x)
    wrapped.seal()
    wrapped.drop(BatchDescriptor(4))
    for _ in range(2):
        with dispatcher.step(Batch(3)) as context:
            assert context.descriptor == BatchDescriptor(8)
            wrapped(x)
    wrapped.clear_graphs()
    with dispatcher.step(Batch(3)) as context:
        assert context.descriptor == BatchDescriptor(8)  # lazy: it captures again here
        wrapped(x)
    assert [*wrapped.entries] == [BatchDescriptor(8)]
    assert dispatcher.counts()[Reason.MISSING_GRAPH] == 0


@pytest.mark.parametrize("argument", [{"options": {"lazy": True}}, {"pool": 5}])
def test_a_wrapper_refuses_options_or_a_pool_of_wrong_type(argument):
    with pytest.raises(InvalidOptionError, match=next(iter(argument))):
        CPUGraphWrapper(lambda x: x, FULL, **argument)
