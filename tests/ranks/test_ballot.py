"""The bytes of a vote, and the text of what ranks differ in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode
from graphrt.ranks.agreement import difference_of
from graphrt.ranks.ballot import (
    MISSING,
    MOST_GRAPHS,
    TRIED,
    UNUSABLE,
    USABLE,
    Ballot,
    decoded,
    encoded,
)

VOTES = st.lists(
    st.lists(st.sampled_from([UNUSABLE, MISSING, TRIED, USABLE]), min_size=5, max_size=5),
    min_size=1,
    max_size=6,
)


def least(votes: list[bytearray]) -> list[int]:
    return [min(column) for column in zip(*votes, strict=True)]


@given(VOTES)
def test_the_vote_chooses_the_first_graph_usable_on_all_ranks(
    graphs: list[list[int]],
) -> None:
    tally = decoded(least([encoded(b"12345678", 7, bytes(each)) for each in graphs]))
    shared = [at for at in range(5) if all(each[at] != UNUSABLE for each in graphs)]
    assert tally.same and tally.same_step
    assert tally.graph == (shared[0] if shared else None)
    assert tally.least == (min(each[shared[0]] for each in graphs) if shared else UNUSABLE)


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=4))
def test_votes_count_as_same_only_with_equal_digests(digests: list[bytes]) -> None:
    tally = decoded(least([encoded(digest, 7, b"") for digest in digests]))
    assert tally.same == (len(set(digests)) == 1)
    assert tally.graph is None


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=4))
def test_votes_belong_to_the_same_step_only_with_equal_step_numbers(steps: list[int]) -> None:
    tally = decoded(least([encoded(b"12345678", step, b"") for step in steps]))
    assert tally.same_step == (len({step % 2**32 for step in steps}) == 1)


def test_a_ballot_lists_graphs_by_preference_regardless_of_reservation_order() -> None:
    dispatcher = GraphDispatcher(GraphMode.FULL_AND_PIECEWISE)
    for mode, tokens in (("PIECEWISE", 4), ("FULL", 8), ("FULL", 4)):
        dispatcher.publish(mode, BatchDescriptor(tokens))
    ballot = Ballot(dispatcher, {})
    assert ballot.facts["graphs"] == ["FULL [4 tokens]", "FULL [8 tokens]", "PIECEWISE [4 tokens]"]
    assert ballot.usable(Batch(5)) == bytes([UNUSABLE, USABLE, UNUSABLE])
    assert ballot.usable(None) == bytes([USABLE] * 3)
    dispatcher.withdraw("FULL", BatchDescriptor(4))
    ballot.renew()
    assert ballot.usable(None) == bytes([MISSING, USABLE, USABLE])
    assert ballot.usable(Batch(5)) == bytes([UNUSABLE, USABLE, UNUSABLE])


def test_a_vote_holds_the_stated_maximum_number_of_graphs() -> None:
    vote = encoded(b"12345678", 1, bytes([UNUSABLE] * (MOST_GRAPHS - 1) + [USABLE]))
    assert decoded(vote).graph == MOST_GRAPHS - 1


def test_the_difference_names_the_deviating_rank_and_its_configuration_line() -> None:
    usual = {"torch": ["2.13"], "plan": ["FULL", "sizes 1, 2"]}
    error = difference_of([usual, usual | {"plan": ["FULL", "sizes 1, 4"]}, usual])
    assert error is not None
    assert error.what == "ranks do not agree: plan is another one on rank 1"
    assert error.got == "on rank 1: sizes 1, 4"
    assert error.expected == "as on rank 0: sizes 1, 2"
    assert difference_of([usual, usual]) is None
