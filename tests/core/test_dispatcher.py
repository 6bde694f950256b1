"""The dispatcher against a brute-force definition of the best graph, and its reasons."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.core.base import InvalidBatchError
from graphrt.core.batch import Batch, BatchDescriptor, GraphMode
from graphrt.core.dispatch import Dispatch, GraphDispatcher, Reason

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
LEVEL = {NONE: 0, PIECEWISE: 1, FULL: 2}


def inf_if_none(value: int | None) -> float:
    return math.inf if value is None else value


@st.composite
def descriptors(draw: st.DrawFn) -> BatchDescriptor:
    variant = draw(st.sampled_from([None, "draft"]))
    bounds = tuple(draw(st.lists(st.sampled_from([8, 64, 512]), max_size=2)))
    loras = draw(st.sampled_from([0, 0, 1, 4]))
    has_lora = bool(loras) or draw(st.booleans())
    if draw(st.booleans()):
        query_len = draw(st.integers(1, 4))
        reqs = draw(st.integers(1, 12))
        num_reqs = draw(st.sampled_from([None, reqs]))
        return BatchDescriptor(
            query_len * reqs, num_reqs, True, has_lora, loras, query_len, bounds, variant
        )
    tokens = draw(st.integers(1, 48))
    reqs = draw(st.none() | st.integers(1, tokens))
    return BatchDescriptor(tokens, reqs, False, has_lora, loras, None, bounds, variant)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    tokens = draw(st.integers(1, 60))
    return Batch(
        tokens,
        draw(st.none() | st.integers(1, tokens)),
        draw(st.none() | st.integers(1, 5)),
        tuple(draw(st.lists(st.integers(0, 600), max_size=3))),
        draw(st.integers(0, 5)),
        draw(st.sampled_from([None, "draft", "other"])),
        draw(st.frozensets(st.sampled_from([FULL, PIECEWISE, NONE]))),
    )


def normalised(batch: Batch) -> tuple[int | None, int | None]:
    """Requests and query length, as far as the batch's numbers agree with each other."""
    reqs, query_len = batch.num_reqs, batch.query_len
    if query_len is not None and reqs is None and batch.num_tokens % query_len == 0:
        return batch.num_tokens // query_len, query_len
    if query_len is not None and reqs is not None and reqs * query_len == batch.num_tokens:
        return reqs, query_len
    return reqs, None


def compatible(graph: BatchDescriptor, batch: Batch, at_least: int) -> bool:
    reqs, query_len = normalised(batch)
    capacity = graph.num_active_loras or (math.inf if graph.has_lora else 0)
    bounds_fit = all(
        place < len(batch.bounds) and batch.bounds[place] <= bound
        for place, bound in enumerate(graph.bounds)
    )
    return (
        graph.num_tokens >= max(batch.num_tokens, at_least)
        and (graph.num_reqs is None or reqs is None or graph.num_reqs >= reqs)
        and (not graph.uniform or graph.query_len == query_len)
        and capacity >= batch.num_active_loras
        and graph.variant == batch.variant
        and bounds_fit
    )


def preference(mode: GraphMode, graph: BatchDescriptor) -> tuple[object, ...]:
    capacity = graph.num_active_loras or (math.inf if graph.has_lora else 0)
    bounds = (*graph.bounds, math.inf, math.inf)[:2]
    return (
        -LEVEL[mode],
        graph.num_tokens,
        capacity,
        not graph.uniform,
        bounds,
        inf_if_none(graph.num_reqs),
    )


def brute_force(
    graphs: set[tuple[GraphMode, BatchDescriptor]],
    batch: Batch,
    exclude: frozenset[GraphMode],
    at_least: int,
    at_most: GraphMode | None,
    max_padding: float | None,
) -> tuple[object, ...] | None:
    live = max(batch.num_tokens, at_least)
    able = [
        preference(mode, graph)
        for mode, graph in graphs
        if compatible(graph, batch, at_least)
        and mode not in exclude | batch.exclude
        and (at_most is None or LEVEL[mode] <= LEVEL[at_most])
        and (max_padding is None or graph.num_tokens <= live * max_padding)
    ]
    return min(able, default=None)


KEYS = st.tuples(st.sampled_from([FULL, PIECEWISE]), descriptors())


@settings(max_examples=400, deadline=None)
@given(
    st.sets(KEYS, max_size=24),
    st.lists(batches(), min_size=1, max_size=8),
    st.frozensets(st.sampled_from([FULL, PIECEWISE, NONE])),
    st.sampled_from([0, 0, 5, 30]),
    st.sampled_from([None, None, NONE, PIECEWISE, FULL]),
    st.sampled_from([None, None, 1.0, 1.5, 3.0]),
)
def test_dispatch_finds_what_brute_force_finds_and_never_raises(
    keys, cases, exclude, at_least, at_most, max_padding
):
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for mode, descriptor in keys:
        dispatcher.publish(mode, descriptor)
    for batch in cases:
        plain = batch._replace(exclude=frozenset())
        for case, limits in (
            (plain, (frozenset(), 0, None, None)),
            (batch, (exclude, at_least, at_most, max_padding)),
        ):
            found = dispatcher.dispatch(
                case,
                exclude=limits[0],
                at_least=limits[1],
                at_most_mode=limits[2],
                max_padding=limits[3],
            )
            best = brute_force(keys, case, *limits)
            if best is None:
                assert found.mode is NONE
                assert found.descriptor.num_tokens == case.num_tokens
                assert found.reason is not Reason.HIT
            else:
                assert found.reason is Reason.HIT
                assert preference(found.mode, found.descriptor) == best


@settings(max_examples=100, deadline=None)
@given(st.sets(KEYS, max_size=12), batches())
def test_tables_above_the_dense_limit_find_the_same_graphs(keys, batch):
    far = BatchDescriptor(1 << 20, 1 << 20)
    small, large = GraphDispatcher("FULL"), GraphDispatcher("FULL")
    for mode, descriptor in keys:
        small.publish(mode, descriptor)
        large.publish(mode, descriptor)
    large.publish(PIECEWISE, far)
    found, sparse = small.dispatch(batch), large.dispatch(batch)
    if found.reason is Reason.HIT and found.mode is FULL:
        assert (sparse.mode, sparse.descriptor) == (found.mode, found.descriptor)


def ladder() -> GraphDispatcher:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for size in (1, 2, 4, 8):
        dispatcher.publish(PIECEWISE, BatchDescriptor(size))
        dispatcher.publish(FULL, BatchDescriptor(size, size, uniform=True, query_len=1))
    return dispatcher


def test_a_mixed_batch_where_only_decode_has_graphs_has_no_graph_whatever_its_size():
    dispatcher = GraphDispatcher("FULL_DECODE_ONLY")
    dispatcher.publish(FULL, BatchDescriptor(8, 8, uniform=True, query_len=1))
    assert dispatcher.dispatch(Batch(64, 3)).reason is Reason.NO_GRAPH
    assert dispatcher.dispatch(Batch(64, 64, 1)).reason is Reason.TOO_LARGE


def test_a_hit_returns_the_same_prebuilt_object():
    dispatcher = ladder()
    batch = Batch(3, 3, 1)
    assert dispatcher.dispatch(batch) is dispatcher.dispatch(batch)


def test_the_callers_sets_are_left_alone():
    exclude = {FULL, PIECEWISE}
    ladder().dispatch(Batch(3, 3, 1), exclude=exclude)
    assert exclude == {FULL, PIECEWISE}


@pytest.mark.parametrize(
    ("batch", "limits", "mode", "reason"),
    [
        (Batch(3, 3, 1), {}, FULL, Reason.HIT),
        (Batch(3, 2), {}, PIECEWISE, Reason.HIT),
        (Batch(9, 9, 1), {}, NONE, Reason.TOO_LARGE),
        (Batch(3, 3, 1, variant="x"), {}, NONE, Reason.NO_GRAPH),
        (Batch(3, 3, 1), {"exclude": {FULL}}, PIECEWISE, Reason.HIT),
        (Batch(3, 3, 1), {"exclude": {FULL, PIECEWISE}}, NONE, Reason.EXCLUDED),
        (Batch(3, 3, 1, exclude=frozenset({FULL, PIECEWISE})), {}, NONE, Reason.EXCLUDED),
        (Batch(5, 5, 1), {"max_padding": 1.5}, NONE, Reason.PADDING),
        (Batch(5, 5, 1), {"max_padding": 1.6}, FULL, Reason.HIT),
        (Batch(3, 3, 1), {"at_most_mode": PIECEWISE}, PIECEWISE, Reason.HIT),
        (Batch(3, 3, 1), {"at_most_mode": NONE}, NONE, Reason.RANKS_DISAGREE),
        (Batch(3, 3, 1), {"at_least": 9}, NONE, Reason.RANKS_DISAGREE),
        (Batch(3, 3, 1), {"at_least": 5}, FULL, Reason.HIT),
    ],
)
def test_every_result_carries_its_reason(batch, limits, mode, reason):
    found = ladder().dispatch(batch, **limits)
    assert (found.mode, found.reason) == (mode, reason)


def test_a_reserved_graph_is_not_captured_until_it_is_published():
    dispatcher = GraphDispatcher("FULL")
    dispatcher.reserve(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.NOT_CAPTURED
    assert dispatcher.planned_for(Batch(3)).descriptor == BatchDescriptor(4, 4)
    dispatcher.publish(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.HIT
    dispatcher.withdraw(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.NOT_CAPTURED


def test_a_graph_that_is_captured_is_planned_for_no_batch_any_more():
    dispatcher = GraphDispatcher("FULL")
    dispatcher.publish(FULL, BatchDescriptor(4))
    assert dispatcher.planned_for(Batch(3)) is None
    dispatcher.reserve(FULL, BatchDescriptor(8))
    assert dispatcher.planned_for(Batch(3)).descriptor == BatchDescriptor(8)


@pytest.mark.parametrize(
    ("batch", "query_len"),
    [
        (Batch(6, 2, 3), 3),
        (Batch(6, None, 3), 3),
        (Batch(6, 2), None),
        (Batch(7, 2, 3), None),
        (Batch(7, None, 3), None),
        (Batch(6, None, 0), None),
        (Batch(6, None, -3), None),
    ],
    ids=str,
)
def test_a_step_of_pieces_knows_the_query_length_of_its_requests_if_they_have_one(batch, query_len):
    dispatcher = GraphDispatcher("PIECEWISE")
    dispatcher.publish(PIECEWISE, BatchDescriptor(8))
    for _ in range(2):
        with dispatcher.step(batch) as context:
            assert (context.mode, context.query_len) == (PIECEWISE, query_len)
            # Of a step inside of another one too.
            with dispatcher.step(batch) as inner:
                assert (inner.mode, inner.query_len) == (PIECEWISE, query_len)


def test_requests_without_tokens_are_a_mixed_batch():
    dispatcher = ladder()
    assert dispatcher.dispatch(Batch(4, None, 0)) == dispatcher.dispatch(Batch(4))


def test_mode_none_says_so():
    assert GraphDispatcher("none").dispatch(Batch(3)).reason is Reason.MODE_NONE


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_empty_batch_is_a_named_error(tokens):
    with pytest.raises(InvalidBatchError, match=r"at least one token"):
        ladder().dispatch(Batch(tokens))


def test_counters_are_kept_for_every_reason_and_graph():
    dispatcher = ladder()
    for batch in (Batch(3, 3, 1), Batch(4, 4, 1), Batch(99)):
        dispatcher.dispatch(batch)
    counts = dispatcher.counts()
    assert counts[Reason.HIT] == 2
    assert counts[Reason.TOO_LARGE] == 1
    assert dispatcher.hits()[FULL, BatchDescriptor(4, 4, uniform=True, query_len=1)] == 2


def test_the_largest_of_several_decode_query_lengths_is_not_missed():
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for size in (1, 2, 4, 8, 16, 24):
        dispatcher.publish(PIECEWISE, BatchDescriptor(size))
    for reqs, query_len in ((4, 4), (6, 3), (8, 3), (6, 4)):
        dispatcher.publish(
            FULL, BatchDescriptor(reqs * query_len, reqs, uniform=True, query_len=query_len)
        )
    found = dispatcher.dispatch(Batch(12, 4, 3))
    assert (found.mode, found.descriptor.num_tokens) == (FULL, 18)


def test_dispatch_unpacks_as_documented():
    mode, descriptor, reason, slot = ladder().dispatch(Batch(3, 3, 1))
    assert Dispatch(mode, descriptor, reason, slot).slot == slot
