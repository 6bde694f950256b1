"""Capture-size lists, ladders and keys (docs/concepts/sizes.md)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphrt import Batch, GraphDispatcher, Plan, Reason
from graphrt.core.base.errors import InvalidModeError, InvalidOptionError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.sizes import (
    CaptureSizes,
    capture_sizes,
    check_sizes,
    descriptors_for,
    eager_range,
)

REQS = st.integers(1, 2048)
TOKENS = st.integers(1, 16384)
QUERY_LENS = st.lists(st.integers(1, 9), min_size=1, max_size=3)
OWN = st.one_of(
    st.none(), st.lists(st.integers(1, 2000), min_size=1, max_size=12, unique=True).map(sorted)
)
BIG = 8192


def plan(reqs: int, tokens: int = BIG, q: int = 1, cap: int = 512) -> CaptureSizes:
    return capture_sizes(max_num_reqs=reqs, max_num_tokens=tokens, query_lens=(q,), cap=cap)


def ref_steps(limit: int) -> list[int]:
    return [n for n in range(1, limit + 1) if n in (1, 2, 4) or _is_step(n)]


def _is_step(n: int) -> bool:
    return n % 8 == 0 if n < 256 else n % 16 == 0


# Defaults against vLLM ---------------------------------------------------------------------------

# vLLM keeps one list. Ours are two, because a decode ladder of query length q > 1 is no use to
# PIECEWISE: its vectors are the union, which is what mode FULL captures (`general`).
VECTORS = [
    # S, q, cap, number of sizes, largest
    (1, 1, 512, 2, 2),
    (5, 1, 512, 5, 8),
    (100, 1, 512, 29, 200),
    (256, 1, 512, 51, 512),
    (1024, 1, 512, 51, 512),
    (1024, 1, 1024, 83, 1024),
    (64, 4, 512, 51, 512),
    (256, 5, 512, 57, 512),
    (8, 3, 512, 12, 48),
]


@pytest.mark.parametrize(("reqs", "q", "cap", "count", "largest"), VECTORS)
def test_default_sizes_have_the_count_and_maximum_of_vllm(
    reqs: int, q: int, cap: int, count: int, largest: int
) -> None:
    sizes = plan(reqs, q=q, cap=cap).general
    assert (len(sizes), sizes[-1]) == (count, largest)


@pytest.mark.parametrize(
    ("reqs", "q", "expected"),
    [
        (1, 1, [1, 2]),
        (5, 1, [1, 2, 4, 5, 8]),
        (8, 3, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48]),
    ],
)
def test_default_sizes_equal_the_lists_of_vllm(reqs: int, q: int, expected: list[int]) -> None:
    assert list(plan(reqs, q=q).general) == expected


def test_mixed_sizes_and_decode_sizes_are_separate_lists() -> None:
    sizes = plan(8, q=3)
    assert sizes.mixed == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert sizes.decode == {3: (3, 6, 9, 18, 24)}


def test_the_maximum_number_of_requests_is_itself_a_size() -> None:
    sizes = plan(100)
    assert 100 in sizes.mixed and sizes.decode[1][-1] == 100


def test_max_num_tokens_is_the_last_of_the_mixed_sizes() -> None:
    assert plan(64, tokens=100).mixed[-2:] == (96, 100)


@given(REQS, TOKENS, st.integers(1, 9), st.sampled_from([512, 1024]))
def test_mixed_sizes_equal_their_brute_force_definition(
    reqs: int, tokens: int, q: int, cap: int
) -> None:
    tokens = max(tokens, q)
    got = plan(reqs, tokens, q, cap)
    assert got.limit == min(reqs * q * 2, cap, tokens)
    extra = {size for size in (reqs * q, tokens) if size <= got.limit}
    assert list(got.mixed) == sorted({*ref_steps(got.limit), *extra})


@given(REQS, TOKENS, st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_decode_sizes_equal_their_brute_force_definition(
    reqs: int, tokens: int, query_lens: list[int]
) -> None:
    tokens = max(tokens, *query_lens)
    sizes = capture_sizes(max_num_reqs=reqs, max_num_tokens=tokens, query_lens=query_lens)
    for q, got in sizes.decode.items():
        rounded = {(size + q - 1) // q * q for size in sizes.mixed} | {reqs * q}
        assert list(got) == sorted(size for size in rounded if size <= min(reqs * q, sizes.limit))


def mean_padding(sizes: CaptureSizes, q: int) -> float:
    """Of decode batches of any number of requests, each as often."""
    ladder = sizes.decode[q]
    live = [n * q for n in range(1, sizes.max_num_reqs + 1)]
    padded = [next(size for size in ladder if size >= tokens) for tokens in live]
    return sum(padded) / sum(live) - 1


def test_decode_sizes_of_long_query_lengths_have_little_padding() -> None:
    assert plan(32, q=8).decode == {8: tuple(range(8, 257, 8))}
    assert mean_padding(plan(32, q=8), 8) == 0.0
    for reqs, q in ((32, 4), (64, 2), (64, 7), (100, 5)):
        assert mean_padding(plan(reqs, q=q), q) < 0.05, (reqs, q)


def possible(
    tokens: int, query_lens: list[int], own: list[int] | None
) -> tuple[int, list[int] | None]:
    """Without what is refused: requests and sizes that are larger than the largest batch."""
    tokens = max(tokens, *query_lens)
    return tokens, own and ([size for size in own if size <= tokens] or [tokens])


def assert_sizes(sizes: tuple[int, ...]) -> None:
    assert list(sizes) == sorted(set(sizes))
    assert all(size >= 1 for size in sizes)


@given(REQS, TOKENS, QUERY_LENS, OWN, st.one_of(st.none(), st.integers(1, 2000)))
def test_capture_sizes_are_sorted_bounded_and_multiples_of_the_query_length(
    reqs: int, tokens: int, query_lens: list[int], own: list[int] | None, max_size: int | None
) -> None:
    tokens, own = possible(tokens, query_lens, own)
    if own is not None and max_size is not None and own[0] > max_size:
        max_size = own[0]
    sizes = capture_sizes(
        max_num_reqs=reqs,
        max_num_tokens=tokens,
        query_lens=query_lens,
        sizes=own,
        max_size=max_size,
    )
    for each in (sizes.mixed, sizes.general, *sizes.decode.values()):
        assert_sizes(each)
        assert max_size is None or all(size <= max_size for size in each)
        assert own is not None or all(size <= sizes.limit for size in each)
    assert sizes.mixed
    assert set(sizes.decode) == set(query_lens)
    for q, ladder in sizes.decode.items():
        full = reqs * q
        assert all(size % q == 0 and size <= min(full, tokens) for size in ladder)
        assert full > sizes.limit or full in ladder
        decode = descriptors_for("FULL_DECODE_ONLY", sizes)
        first, last = eager_range(sizes, decode, q)
        assert first // q - 1 == max(ladder, default=0) // q and last // q == min(reqs, tokens // q)


# A host's own list -------------------------------------------------------------------------------


def own(sizes: list[int], reqs: int, q: int = 1, **kwargs: int) -> CaptureSizes:
    return capture_sizes(
        max_num_reqs=reqs, max_num_tokens=kwargs.pop("tokens", BIG), query_lens=(q,),
        sizes=sizes, **kwargs,
    )  # fmt: skip


def test_a_hosts_size_list_is_used_unchanged_for_piecewise() -> None:
    assert own([3, 7, 1000], reqs=64, q=4).mixed == (3, 7, 1000)


def test_a_hosts_size_list_is_rounded_up_to_whole_decode_requests() -> None:
    assert own([1, 2, 4, 8, 14], reqs=3, q=4).decode[4] == (4, 8, 12)


def test_the_largest_decode_batch_is_added_to_a_hosts_size_list() -> None:
    assert own([96, 104], reqs=100).decode[1] == (96, 100)
    assert own([1, 2], reqs=100).decode[1] == (1, 2, 100)


def test_max_size_excludes_the_largest_decode_batch() -> None:
    assert own([1, 2], reqs=100, max_size=2).decode[1] == (1, 2)


def test_a_hosts_larger_size_covers_the_largest_decode_batch_above_the_limit() -> None:
    sizes = own([4, 1000], reqs=700)
    assert sizes.limit == 512 and sizes.decode[1] == (4, 700)


def test_rounding_a_hosts_size_list_stays_within_max_num_tokens() -> None:
    assert own([1, 8], reqs=4, q=3, tokens=8).decode[3] == (3, 6)


def test_max_size_cuts_a_hosts_size_list() -> None:
    assert own([1, 8, 64], reqs=64, max_size=10).mixed == (1, 8)


def test_a_max_size_below_all_sizes_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="max_size=4"):
        own([8, 16], reqs=64, max_size=4)


def test_max_size_replaces_the_default_limit() -> None:
    sizes = capture_sizes(max_num_reqs=4, max_num_tokens=BIG, max_size=64)
    assert sizes.mixed[-1] == 64 and sizes.decode[1] == (1, 2, 4)


def test_eager_range_gives_the_decode_batches_above_the_limit() -> None:
    large, small = plan(1024), plan(100)
    assert eager_range(large, descriptors_for("FULL_DECODE_ONLY", large), 1) == (513, 1024)
    first, last = eager_range(small, descriptors_for("FULL_DECODE_ONLY", small), 1)
    assert first > last


SCHEDULE = {8: [7], 32: [5], 64: [4]}


def scheduled(schedule: Any = SCHEDULE, **arguments: Any) -> Plan:
    return Plan("FULL_DECODE_ONLY", platform="cpu", query_lens=schedule, **arguments)


@pytest.mark.parametrize("own", [None, [1, 2, 4, 8, 64, 512]])
def test_a_schedule_of_depths_has_only_graphs_that_its_batches_need(own: list[int] | None) -> None:
    """Without it, `query_lens=(7, 5, 4)`, 71 of 115 graphs served no batch."""
    plan = scheduled(max_num_tokens=512, max_num_reqs=64, sizes=own)
    used = {7: range(1, 9), 5: range(9, 33), 4: range(33, 65)}
    assert all(key.num_reqs in used[key.query_len] for _, key in plan.keys)
    widest = {q: ladder[-1] for q, ladder in plan.sizes.decode.items()}
    assert widest == {7: 56, 5: 160, 4: 256}


@st.composite
def schedules(draw: st.DrawFn) -> dict[int, list[int]]:
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=2)
    return draw(st.dictionaries(st.integers(1, 300), lengths, min_size=1, max_size=4))


@given(
    schedules(),
    st.none() | st.integers(9, 2000),
    OWN,
    st.sampled_from(["FULL", "FULL_DECODE_ONLY"]),
    st.none() | st.dictionaries(st.integers(1, 900), st.floats(0.1, 1), min_size=1),
)
def test_every_batch_of_a_schedule_has_a_graph_and_every_decode_graph_a_batch(
    schedule: dict[int, list[int]],
    tokens: int | None,
    own: list[int] | None,
    mode: str,
    traffic: dict[int, float] | None,
) -> None:
    assume(tokens is not None or own is None)
    arguments: Any = {"max_num_tokens": tokens, "sizes": own, "traffic": traffic}
    assume(own is None or tokens is None or own[0] <= tokens)
    plan = Plan(mode, platform="cpu", query_lens=schedule, **arguments)  # type: ignore[arg-type]
    dispatcher = GraphDispatcher(mode)
    for key in plan.keys:
        dispatcher.publish(*key)
    serving, low = set(), 0
    for most in sorted(schedule):
        for reqs in range(low + 1, most + 1):
            for q in schedule[most]:
                if reqs * q <= plan.sizes.max_num_tokens:
                    found = dispatcher.dispatch(Batch(reqs * q, reqs, q))
                    assert found.reason is Reason.HIT
                    serving.add((found.mode, found.descriptor))
        low = most
    if mode == "FULL_DECODE_ONLY":
        assert serving == {*plan.keys}


def test_the_widest_decode_of_a_schedule_has_a_graph_above_the_default_limit() -> None:
    plan = scheduled({256: [5]})
    assert plan.sizes.decode[5][-1] == 1280
    assert "will run eagerly" not in str(plan)
    assert "will run eagerly" in str(scheduled({256: [5]}, max_size=512))


def test_a_schedule_says_how_many_requests_and_tokens_there_are() -> None:
    assert scheduled().sizes.max_num_reqs == 64
    assert scheduled().sizes.max_num_tokens == 256
    smaller = scheduled(max_num_reqs=20).sizes
    assert smaller.decode[5][-1] == 100 and smaller.decode[4] == ()


@pytest.mark.parametrize(("lengths", "reqs", "count"), [((7,), 32, 29), ((7, 5, 4), 64, 115)])
def test_requests_alone_give_the_tokens_of_the_longest_decode_batch(
    lengths: tuple[int, ...], reqs: int, count: int
) -> None:
    """As many graphs as the tokens by hand, and not those of a batch of so many tokens."""
    held = capture_sizes(max_num_reqs=reqs, query_lens=lengths)
    assert held == capture_sizes(
        max_num_reqs=reqs, max_num_tokens=reqs * max(lengths), query_lens=lengths
    )
    plan = Plan("FULL_DECODE_ONLY", query_lens=lengths, max_num_reqs=reqs, platform="cpu")
    assert len(plan.keys) == count


def test_a_schedule_that_ends_before_the_largest_batch_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="ends before the largest batch") as caught:
        scheduled(max_num_reqs=65)
    assert caught.value.advice == "query_lens={..., 65: [4]}"


def test_a_decode_request_larger_than_all_sizes_is_refused_with_the_argument_at_fault() -> None:
    for limits, advice in (
        ({"sizes": [1, 2, 4]}, "sizes=[..., 28]"),
        ({"sizes": [1, 2, 4], "max_num_reqs": 8}, "sizes=[..., 56]"),
        ({"max_num_reqs": 8, "max_num_tokens": 4}, "max_num_tokens=56"),
    ):
        with pytest.raises(InvalidOptionError, match="not one decode request") as caught:
            Plan("FULL", query_lens=[7], platform="cpu", **limits)
        assert caught.value.advice == advice
    assert Plan("FULL_DECODE_ONLY", query_lens=[7], sizes=[1, 2, 4, 28], platform="cpu").keys


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ({8: 7, 32: [5]}, "query_lens[8]=[7]"),
        ({8: [7], 32: []}, "query_lens[32]=[7]"),
        (7, "query_lens=(1,)"),
    ],
)
def test_query_lengths_that_are_no_list_are_refused_by_their_span(
    schedule: Any, advice: str
) -> None:
    with pytest.raises(InvalidOptionError, match="must be a list") as caught:
        scheduled(schedule)
    assert caught.value.advice == advice


def test_one_length_in_two_spans_of_a_schedule_has_no_graph_between_them() -> None:
    ladder = scheduled({8: [4], 32: [5], 64: [4]}).sizes.decode[4]
    assert not [size for size in ladder if 8 * 4 < size <= 32 * 4]
    assert {32, 256} <= {*ladder}


def test_each_of_several_query_lengths_gets_its_own_decode_sizes() -> None:
    sizes = Plan(max_num_reqs=8, max_num_tokens=BIG, query_lens=(4, 3, 4), platform="cpu").sizes
    assert sizes.limit == 64
    assert sizes.decode == {3: (3, 6, 9, 18, 24), 4: (4, 8, 16, 24, 32)}


# Bad sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "sizes must be a list that is not empty"),
        ([4, 2], r"not sorted, or(.|\n)*got: \[4, 2\](.|\n)*sizes=\[2, 4\]"),
        ([1, 2, 2], r"repeated\n.*got: \[1, 2, 2\]"),
        ([-1, 2], r"must be an integer >= 1\n.*got: -1"),
        ([0], "must be an integer >= 1"),
        ([1, 2.0], r"must be an integer >= 1\n.*got: 2.0"),
        ([True, 2], "must be an integer"),
        (["1"], "must be an integer"),
        ("124", "must be a list"),
        (5, "must be a list"),
    ],
)
def test_check_sizes_refuses_invalid_size_lists_with_advice(sizes: object, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message) as caught:
        check_sizes(sizes)  # type: ignore[arg-type]
    assert caught.value.advice


def test_check_sizes_returns_valid_sizes_as_a_tuple() -> None:
    assert check_sizes([1, 2, 5]) == (1, 2, 5)


@pytest.mark.parametrize("bad", [0, -3, True, 2.5])
@pytest.mark.parametrize("name", ["max_num_reqs", "max_num_tokens", "max_size"])
def test_max_size_and_batch_limits_must_be_positive_integers(name: str, bad: object) -> None:
    limits: dict[str, Any] = {"max_num_reqs": 4, "max_num_tokens": 64, name: bad}
    with pytest.raises(InvalidOptionError, match=name):
        Plan(**limits)


@pytest.mark.parametrize("bad", [(), (0,), (1, -2)])
def test_a_plan_refuses_query_lengths_that_are_not_positive(bad: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="query"):
        Plan(max_num_reqs=4, max_num_tokens=64, query_lens=bad)


# Keys --------------------------------------------------------------------------------------------


def keys(
    mode: str, sizes: CaptureSizes, **kwargs: object
) -> list[tuple[GraphMode, BatchDescriptor]]:
    return list(descriptors_for(mode, sizes, **kwargs))  # type: ignore[arg-type]


PIECEWISE, FULL = GraphMode.PIECEWISE, GraphMode.FULL


def uniform(tokens: int, q: int) -> BatchDescriptor:
    return BatchDescriptor(tokens, tokens // q, uniform=True, query_len=q)


def test_mode_none_has_no_graphs_to_capture() -> None:
    assert keys("NONE", plan(4)) == []


def test_piecewise_descriptors_have_tokens_and_no_requests() -> None:
    assert keys("piecewise", own([1, 6], reqs=4)) == [
        (PIECEWISE, BatchDescriptor(6)),
        (PIECEWISE, BatchDescriptor(1)),
    ]


def test_full_mode_descriptors_are_not_uniform() -> None:
    assert keys("FULL", own([1, 6], reqs=4)) == [
        (FULL, BatchDescriptor(6, 4)),
        (FULL, BatchDescriptor(1, 1)),
    ]


def test_decode_only_descriptors_are_uniform_for_each_query_length() -> None:
    sizes = capture_sizes(max_num_reqs=2, max_num_tokens=64, query_lens=(1, 3))
    assert keys("FULL_DECODE_ONLY", sizes) == [
        (FULL, uniform(6, 3)),
        (FULL, uniform(3, 3)),
        (FULL, uniform(2, 1)),
        (FULL, uniform(1, 1)),
    ]


def test_full_and_piecewise_lists_piecewise_descriptors_before_full_descriptors() -> None:
    got = keys("FULL_AND_PIECEWISE", plan(2))
    assert [mode for mode, _ in got] == [PIECEWISE] * 3 + [FULL] * 2
    assert [d.num_tokens for _, d in got] == [4, 2, 1, 2, 1]


def test_loras_bounds_and_variants_multiply_the_number_of_graphs() -> None:
    got = keys(
        "FULL_AND_PIECEWISE",
        own([4], reqs=4),
        loras=(0, 2, None),
        bounds=((128,), (4096,)),
        variants=("a", "b"),
    )
    full = [d for mode, d in got if mode is FULL]
    assert len(full) == 3 * 2 * 2 and len(got) - len(full) == 3 * 2
    assert all(d.bounds == () for mode, d in got if mode is PIECEWISE)
    assert (full[0].has_lora, full[0].num_active_loras, full[0].bounds) == (True, 0, (4096,))
    assert [d.num_active_loras for d in full[4:8]] == [2] * 4


def test_repeated_lora_counts_give_no_repeated_descriptors() -> None:
    assert len(keys("PIECEWISE", own([4], reqs=4), loras=(0, 0))) == 1


def test_descriptors_for_an_unknown_mode_raise() -> None:
    with pytest.raises(InvalidModeError):
        descriptors_for("HALF", plan(2))


@given(REQS, TOKENS, QUERY_LENS, OWN, st.sampled_from(list(GraphMode)))
def test_descriptors_are_unique_with_pieces_before_full_and_large_before_small(
    reqs: int, tokens: int, query_lens: list[int], own: list[int] | None, mode: GraphMode
) -> None:
    tokens, own = possible(tokens, query_lens, own)
    sizes = capture_sizes(
        max_num_reqs=reqs, max_num_tokens=tokens, query_lens=query_lens, sizes=own
    )
    got = descriptors_for(mode, sizes)
    assert len(set(got)) == len(got)
    order = [(m is FULL, -d.num_tokens) for m, d in got]
    assert order == sorted(order)
    assert {m for m, _ in got} <= set(mode.runtime_modes)
    assert all(d.num_reqs is None or d.num_reqs <= reqs for _, d in got)
