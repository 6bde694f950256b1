"""The dispatcher finds the graph that a brute-force search finds, and gives the right reason."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from brute_force import (
    KEYS,
    LIMITS,
    Limits,
    agreeing,
    batches,
    brute_force,
    normalised,
    preference,
    reason_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.core.base.errors import InvalidBatchError
from graphrt.core.batch.descriptor import Batch, BatchDescriptor, unpadded
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import REMEMBERED, GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch, Reason
from tests.draws import MORE

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


@pytest.mark.draws
@settings(max_examples=100 * MORE, deadline=None)
@given(
    st.sets(KEYS, max_size=24),
    st.sets(KEYS, max_size=4),
    st.lists(st.tuples(batches(), LIMITS), min_size=1, max_size=8),
    st.sampled_from([None, None, 1.0, 1.5, 2.0]),
    st.none() | st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_dispatch_finds_the_graph_and_reason_that_brute_force_finds(
    keys, reserved, cases, max_padding, max_num_reqs, drawn
):
    options = {"max_padding": max_padding, "max_num_reqs": max_num_reqs}
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", **options)
    for key in keys:
        dispatcher.publish(*key)
    for key in reserved:
        dispatcher.reserve(*key)
    planned, told = reserved - keys, Counter()
    cases = [(batch, agreeing(drawn, batch, limits, keys | reserved)) for batch, limits in cases]
    # Twice, because answers are remembered.
    for batch, limits in 2 * cases:
        for case, given_limits in (
            (batch._replace(exclude=frozenset()), Limits(max_num_reqs=max_num_reqs)),
            (batch, limits),
        ):
            case = case._replace(exclude=case.exclude | given_limits.exclude)
            given_limits = given_limits._replace(exclude=frozenset(), **options)
            dispatch = dispatcher.peek(case, agreed=given_limits.agreed)
            assert dispatcher.dispatch(case, agreed=given_limits.agreed) == dispatch
            assert dispatch.reason is reason_of(keys, planned, case, given_limits)
            told[dispatch.reason] += 1
            best = brute_force(keys, case, given_limits)
            if best is None:
                assert dispatch.mode is NONE and dispatch.slot == -1
                assert dispatch.descriptor == unpadded(case)
            else:
                assert preference(dispatch.mode, dispatch.descriptor) == best
            wanted = dispatcher.planned_for(case, agreed=given_limits.agreed)
            best = brute_force(planned, case, given_limits)
            assert best == (wanted and preference(wanted.mode, wanted.descriptor))
            # A step looks by itself, and knows a batch that it is given again: it finds the same,
            # and counts it once.
            dispatch, steps = dispatcher.dispatch(case), [dispatcher.step(case) for _ in range(3)]
            for step in steps:
                assert (step.mode, step.descriptor, step.slot) == (
                    dispatch[0],
                    dispatch[1],
                    dispatch[3],
                )
            told[dispatch.reason] += 4
    assert +Counter(dispatcher.counts()) == told


@pytest.mark.draws
@settings(max_examples=60 * MORE, deadline=None)
@given(batches(), st.sampled_from([None, 0, -1]), st.sampled_from([0, -2]))
def test_the_descriptor_of_a_batch_without_a_graph_is_the_unpadded_batch(batch, reqs, loras):
    reqs_, query_len = normalised(batch)
    numbers = batch.num_active_loras, batch.bounds, batch.variant
    own = BatchDescriptor(
        batch.num_tokens,
        reqs_,
        uniform=query_len is not None,
        has_lora=batch.num_active_loras > 0,
        num_active_loras=numbers[0],
        query_len=query_len,
        bounds=numbers[1],
        variant=numbers[2],
    )
    assert unpadded(batch) == own
    assert type(own) is type(unpadded(batch))
    odd = Batch(batch.num_tokens, reqs, None, num_active_loras=loras)
    assert unpadded(odd) == BatchDescriptor(batch.num_tokens)


def test_dispatch_by_requests_and_tokens_matches_brute_force():
    drawn = random.Random(5)
    for _ in range(20):
        keys = {
            (drawn.choice([FULL, PIECEWISE]), BatchDescriptor(tokens, drawn.randint(1, tokens)))
            for tokens in (drawn.randint(1, 200) for _ in range(100))
        }
        dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
        for key in keys:
            dispatcher.publish(*key)
        for _ in range(100):
            batch = Batch(drawn.randint(1, 210), drawn.randint(1, 210))
            limits = Limits(drawn.choice([frozenset(), frozenset({FULL})]))
            dispatch = dispatcher.dispatch(batch._replace(exclude=limits.exclude))
            best = brute_force(keys, batch, limits)
            if best is None:
                assert dispatch.reason is reason_of(keys, set(), batch, limits)
            else:
                assert preference(dispatch.mode, dispatch.descriptor) == best


def ladder() -> GraphDispatcher:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for size in (1, 2, 4, 8):
        dispatcher.publish(PIECEWISE, BatchDescriptor(size))
        dispatcher.publish(FULL, BatchDescriptor(size, size, uniform=True, query_len=1))
    return dispatcher


def test_a_mixed_batch_under_decode_only_graphs_gets_reason_no_graph():
    dispatcher = GraphDispatcher("FULL_DECODE_ONLY")
    dispatcher.publish(FULL, BatchDescriptor(8, 8, uniform=True, query_len=1))
    assert dispatcher.dispatch(Batch(64, 3)).reason is Reason.NO_GRAPH
    assert dispatcher.dispatch(Batch(64, 64, 1)).reason is Reason.TOO_LARGE


def test_dispatching_the_same_batch_twice_returns_the_same_object():
    dispatcher = ladder()
    batch = Batch(3, 3, 1)
    assert dispatcher.dispatch(batch) is dispatcher.dispatch(batch)


def test_dispatch_does_not_change_the_batchs_exclude_set():
    exclude = {FULL, PIECEWISE}
    ladder().dispatch(Batch(3, 3, 1, exclude=exclude))
    assert exclude == {FULL, PIECEWISE}


@pytest.mark.parametrize(
    ("batch", "limits", "mode", "reason"),
    [
        (Batch(3, 3, 1), {}, FULL, Reason.HIT),
        (Batch(3, 2), {}, PIECEWISE, Reason.HIT),
        (Batch(9, 9, 1), {}, NONE, Reason.TOO_LARGE),
        (Batch(3, 3, 1, variant="x"), {}, NONE, Reason.NO_GRAPH),
        (Batch(3, 3, 1, exclude=frozenset({FULL})), {}, PIECEWISE, Reason.HIT),
        (Batch(3, 3, 1, exclude=frozenset({FULL, PIECEWISE})), {}, NONE, Reason.EXCLUDED),
        (Batch(3, 3, 1), {"agreed": BatchDescriptor(8)}, PIECEWISE, Reason.HIT),
        (Batch(3, 3, 1), {"agreed": BatchDescriptor(6)}, NONE, Reason.RANKS_DISAGREE),
        (Batch(3, 3, 1), {"agreed": BatchDescriptor(2)}, NONE, Reason.RANKS_DISAGREE),
    ],
)
def test_each_dispatch_has_the_expected_mode_and_reason(batch, limits, mode, reason):
    dispatch = ladder().dispatch(batch, **limits)
    assert (dispatch.mode, dispatch.reason) == (mode, reason)


@pytest.mark.parametrize(("ratio", "reason"), [(1.5, Reason.PADDING), (1.6, Reason.HIT)])
def test_a_graph_that_pads_more_than_max_padding_is_not_dispatched(ratio, reason):
    dispatcher = GraphDispatcher("FULL", max_padding=ratio)
    dispatcher.publish(FULL, BatchDescriptor(8))
    assert dispatcher.dispatch(Batch(5, 5, 1)).reason is reason


def test_a_reserved_graph_gives_reason_not_captured_until_its_publish():
    dispatcher = GraphDispatcher("FULL")
    dispatcher.reserve(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.NOT_CAPTURED
    assert dispatcher.planned_for(Batch(3)).descriptor == BatchDescriptor(4, 4)
    dispatcher.publish(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.HIT
    dispatcher.withdraw(FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.NOT_CAPTURED


def test_planned_for_ignores_published_graphs():
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
def test_a_piecewise_step_has_the_query_length_of_a_uniform_batch(batch, query_len):
    dispatcher = GraphDispatcher("PIECEWISE")
    dispatcher.publish(PIECEWISE, BatchDescriptor(8))
    for _ in range(2):
        with dispatcher.step(batch) as context:
            assert (context.mode, context.query_len) == (PIECEWISE, query_len)
            # Of a step inside of another one too.
            with dispatcher.step(batch) as inner:
                assert (inner.mode, inner.query_len) == (PIECEWISE, query_len)


def test_a_batch_with_inconsistent_query_length_is_dispatched_as_mixed():
    dispatcher = ladder()
    assert dispatcher.step(Batch(3, 3, 1)).mode is FULL
    assert dispatcher.step(Batch(3, 2, 1)).mode is PIECEWISE


def test_step_uses_the_dispatch_method_of_a_subclass():
    class Smallest(GraphDispatcher):
        def dispatch(self, batch, **agreed):
            return super().dispatch(batch._replace(exclude=frozenset({FULL})), **agreed)

    dispatcher = Smallest("FULL_AND_PIECEWISE")
    for mode in (FULL, PIECEWISE):
        dispatcher.publish(mode, BatchDescriptor(4))
    for _ in range(2):
        assert dispatcher.step(Batch(4)).mode is PIECEWISE


def test_dispatches_beyond_the_limit_of_remembered_answers_are_right():
    dispatcher = ladder()
    for _ in range(2):
        for tokens in range(1, 3 * REMEMBERED):
            dispatch = dispatcher.dispatch(Batch(tokens, tokens, 1))
            assert (dispatch.mode is FULL) is (tokens <= 8)
            assert dispatch.mode is FULL or dispatch.descriptor.num_tokens == tokens
            assert len(dispatcher.version.answers) <= REMEMBERED
    assert dispatcher.counts()[Reason.TOO_LARGE] == 2 * (3 * REMEMBERED - 9)


@pytest.mark.parametrize("ratio", [None, 1.0, 1.2, 2.0])
def test_a_repeated_batch_is_dispatched_anew_after_publish_or_withdraw(ratio):
    drawn, batch, told = random.Random(3), Batch(5, 5, 1), set()
    keys = [(FULL, BatchDescriptor(tokens)) for tokens in (5, 6, 8, 16)]
    dispatcher = GraphDispatcher("FULL", max_padding=ratio)
    for _ in range(400):
        change = drawn.choice([dispatcher.publish, dispatcher.withdraw, None, None])
        if change is not None:
            change(*drawn.choice(keys))
        published = {(graph.mode, graph.descriptor) for graph in dispatcher.published}
        best = brute_force(published, batch, Limits(max_padding=ratio))
        for _ in range(3):
            step = dispatcher.step(batch)
            told.add(step.descriptor)
            assert best == (preference(FULL, step.descriptor) if step.slot >= 0 else None)
    assert len(told) == {None: 5, 1.0: 2, 1.2: 3, 2.0: 4}[ratio]


def test_editing_a_batchs_exclude_set_changes_its_next_dispatch():
    dispatcher, exclude = ladder(), set()
    batch = Batch(3, 3, 1, exclude=exclude)
    for _ in range(3):
        assert dispatcher.step(batch).mode is FULL
    exclude.add(FULL)
    assert dispatcher.step(batch).mode is dispatcher.dispatch(batch).mode is PIECEWISE


def test_a_batch_with_query_length_zero_is_dispatched_as_mixed():
    dispatcher = ladder()
    assert dispatcher.dispatch(Batch(4, None, 0)) == dispatcher.dispatch(Batch(4))


def test_a_dispatcher_in_mode_none_gives_reason_mode_none():
    assert GraphDispatcher("none").dispatch(Batch(3)).reason is Reason.MODE_NONE


@pytest.mark.parametrize("tokens", [0, -1])
def test_dispatching_a_batch_without_tokens_raises(tokens):
    dispatcher = ladder()
    dispatcher.dispatch(Batch(1))
    for ask in (dispatcher.dispatch, dispatcher.step):
        with pytest.raises(InvalidBatchError, match=r"at least one token"):
            ask(Batch(tokens))


def test_the_dispatcher_counts_steps_by_reason_and_hits_by_graph():
    dispatcher = ladder()
    for batch in (Batch(3, 3, 1), Batch(4, 4, 1), Batch(99)):
        dispatcher.dispatch(batch)
    counts = dispatcher.counts()
    assert counts[Reason.HIT] == 2
    assert counts[Reason.TOO_LARGE] == 1
    assert dispatcher.hits()[FULL, BatchDescriptor(4, 4, uniform=True, query_len=1)] == 2


def test_a_decode_batch_between_larger_query_lengths_gets_the_smallest_fitting_graph():
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for size in (1, 2, 4, 8, 16, 24):
        dispatcher.publish(PIECEWISE, BatchDescriptor(size))
    for reqs, query_len in ((4, 4), (6, 3), (8, 3), (6, 4)):
        dispatcher.publish(
            FULL, BatchDescriptor(reqs * query_len, reqs, uniform=True, query_len=query_len)
        )
    dispatch = dispatcher.dispatch(Batch(12, 4, 3))
    assert (dispatch.mode, dispatch.descriptor.num_tokens) == (FULL, 18)


def test_a_dispatch_unpacks_into_mode_descriptor_reason_and_slot():
    mode, descriptor, reason, slot = ladder().dispatch(Batch(3, 3, 1))
    assert Dispatch(mode, descriptor, reason, slot).slot == slot
