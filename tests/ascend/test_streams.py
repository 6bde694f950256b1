"""How many streams graphs hold, by structure and by the formula of each version; needs no NPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt.ascend import AscendOptions, update_aclgraph_sizes
from graphrt.ascend.budget.profiles import (
    DOMAINS,
    PROFILES,
    Deployment,
    profile_named,
)
from graphrt.ascend.budget.streams import (
    DEVICES,
    STRUCTURAL,
    device_named,
    device_of,
    graph_streams,
    stream_figures,
    stream_room,
    streams_needed,
    structural_figures,
)
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.modes import GraphMode
from graphrt.core.device.contract import GraphWork
from graphrt.core.plan.budget import Budget, Captured, LeftOut, fit, total_of
from graphrt.core.plan.resolution import ModeResolution
from graphrt.core.plan.sizes import capture_sizes, descriptors_for
from graphrt.core.plan.traffic import by_worth

A2, A5 = DEVICES["A2"], DEVICES["950"]
SIZES = capture_sizes(max_num_reqs=256, max_num_tokens=8192).mixed


def model(layers: int, *domains: str, **others: Any) -> Deployment:
    return Deployment(layers, frozenset(domains), **others)


# The formula of the ACL-graph design -------------------------------------------------------------

FFTS_36 = [1, 16, 40, 72, 96, 128, 152, 184, 216, 240, 288, 336, 400, 448, 512]
TWELVE = [1, 24, 56, 96, 128, 168, 200, 240, 288, 368, 432, 512]
FIVE = [1, 80, 184, 320, 512]

FORMULA = [
    # deployment, how many fit, which are kept (None: not listed)
    (model(28), 62, list(SIZES)),
    (model(28, aiv=True), 61, list(SIZES)),
    (model(36), 48, None),
    (model(36, "tp"), 15, FFTS_36),
    (model(36, "tp", aiv=True), 23, None),
    (model(64, "tp"), 9, [1, 32, 80, 136, 184, 232, 320, 416, 512]),
    (model(64, "tp", aiv=True), 12, TWELVE),
    (model(64, "tp", "dp"), 5, FIVE),
    (model(64, "tp", "dp", aiv=True), 8, [1, 40, 96, 152, 216, 288, 400, 512]),
    (model(80, "tp"), 7, [1, 48, 120, 184, 248, 384, 512]),
    (model(80, "tp", aiv=True), 10, [1, 32, 72, 120, 160, 208, 248, 336, 416, 512]),
    (model(48, "tp", "ep", aiv=True, moe=True), 12, TWELVE),
    (model(48, "tp", moe=True), 11, [1, 24, 64, 104, 144, 184, 224, 272, 352, 432, 512]),
    (model(94, "tp", "dp", "ep", aiv=True, moe=True), 3, [1, 184, 512]),
    (model(94, "tp", "dp", "ep"), 3, [1, 184, 512]),
    (model(94, "tp"), 6, [1, 64, 144, 224, 352, 512]),
    (
        model(61, "tp", "dp", "ep", aiv=True, moe=True, multi_stream=1),
        4,
        [1, 120, 248, 512],
    ),
    (
        model(61, "tp", "dp", "ep", aiv=True, moe=True, multi_stream=1, draft_layers=1),
        4,
        [1, 120, 248, 512],
    ),
    (model(61, "tp", "dp", moe=True, draft_layers=1), 5, FIVE),
    (model(32, draft_layers=1), 51, list(SIZES)),
    (
        model(36, "tp", "pcp", "dcp"),
        14,
        [1, 16, 48, 80, 104, 136, 168, 200, 232, 272, 320, 384, 448, 512],
    ),
    (model(36, "tp", "pcp", "dcp", aiv=True), 23, None),
    (model(400, "dp", "tp"), 0, [512]),
]


def test_the_domains_of_a_deployment_may_be_a_list_but_no_text() -> None:
    listed = Deployment(64, domains=["tp"])  # type: ignore[arg-type]
    assert listed == Deployment(64, domains=frozenset({"tp"}))
    assert update_aclgraph_sizes([1, 2, 4, 8], listed) == (1, 2, 4, 8)
    wrong: Any
    for wrong in ("tp", 3, [["tp"]], [3, "zz"]):
        with pytest.raises(InvalidOptionError, match=r"domains?[\s\S]*domains={"):
            Deployment(64, domains=wrong)


def test_update_aclgraph_sizes_refuses_what_is_no_deployment_or_profile() -> None:
    wrong: Any = 3
    with pytest.raises(InvalidOptionError, match="model=Deployment"):
        update_aclgraph_sizes([1, 2], wrong)
    with pytest.raises(InvalidOptionError, match="profile="):
        update_aclgraph_sizes([1, 2], model(64), profile=wrong)


@pytest.mark.parametrize("profile", ["0.13", "0.18", "0.20", "last"])
@pytest.mark.parametrize(("deployment", "count", "kept"), FORMULA)
def test_the_stream_formula_of_each_version_gives_the_published_sizes(
    deployment: Deployment, count: int, kept: list[int] | None, profile: str
) -> None:
    assert profile_named(profile).capacity(deployment) == count
    got = update_aclgraph_sizes(SIZES, deployment, profile=profile)
    assert len(got) == min(max(count, 1), len(SIZES))
    assert (got[0], got[-1]) == (1 if count > 1 else 512, 512)
    assert kept is None or list(got) == kept


def test_size_sampling_keeps_both_ends_of_a_long_list() -> None:
    got = update_aclgraph_sizes(SIZES, model(36, "tp", aiv=True))
    assert got[:6] == (1, 4, 24, 40, 56, 72)
    assert got[-4:] == (400, 432, 480, 512)


def test_the_last_formula_revision_subtracts_full_graphs_before_pieces() -> None:
    both = {"mode": "FULL_AND_PIECEWISE"}
    assert PROFILES["last"].capacity(model(36, "tp"), full_graphs=51) == 15
    assert list(update_aclgraph_sizes(SIZES, model(36, "tp"), profile="last", **both)) == FFTS_36
    full = update_aclgraph_sizes(SIZES, model(36), profile="last", **both)
    assert len(full) == (1800 - 51) // 37 == 47 < PROFILES["last"].capacity(model(36)) == 48


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_graph_modes_without_pieces_keep_every_capture_size(mode: str) -> None:
    assert update_aclgraph_sizes(SIZES, model(400, "dp", "tp"), mode=mode) == SIZES


@pytest.mark.parametrize("name", ["0.9.1", "0.9.2"])
def test_the_oldest_formulas_ignore_the_draft_model_and_divide_1920_streams(name: str) -> None:
    old = profile_named(name)
    assert old.capacity(model(36, draft_layers=4)) == 1920 // 37
    assert old.figures(model(36, draft_layers=4)).pieces == 37
    assert old.capacity(model(36)) == 1920 // 37
    assert old.capacity(model(36, "dp", "tp", "ep", "etp", aiv=True)) == 1920 // 37 // 5


@pytest.mark.parametrize("name", ["0.21", "v0.21.0rc1", "0.23.0.post1", "1.0"])
def test_asking_a_version_without_a_stream_formula_raises_with_advice(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"removed its stream formula in 0\.21") as caught:
        update_aclgraph_sizes(SIZES, model(4), profile=name)
    assert "structural" in str(caught.value)


@pytest.mark.parametrize("name", ["0.10", "0.12", "newest"])
def test_an_unknown_stream_profile_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="unknown stream profile"):
        profile_named(name)


def test_the_formula_of_version_0_11_ignores_context_parallelism() -> None:
    both = model(36, "tp", "pcp", "dcp")
    assert (PROFILES["0.11"].capacity(both), PROFILES["0.20"].capacity(both)) == (15, 14)


@pytest.mark.parametrize(
    ("changes", "deployment", "count"),
    [
        ({"streams": 1920, "spare_set": False}, model(48, "tp", aiv=True), 19),
        ({"streams": 1920}, model(48, "tp"), 12),
        ({"streams": 1920}, model(12), 147),
        ({}, model(12), 138),
        ({}, model(12, aiv=True), 137),
        ({"streams": 1920}, model(12, draft_layers=2), 120),
        ({}, model(12, draft_layers=2), 112),
        ({}, model(12, draft_layers=2, aiv=True), 111),
    ],
)
def test_profiles_of_intermediate_versions_give_the_published_counts(
    changes: dict[str, Any], deployment: Deployment, count: int
) -> None:
    profile = replace(PROFILES["0.20"], **changes)
    assert profile.capacity(deployment) == count
    assert len(update_aclgraph_sizes(range(1, 151), deployment, profile=profile)) == count
    assert update_aclgraph_sizes([1, 2, 3], deployment, profile=profile) == (1, 2, 3)


# The structure of graphs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "streams"),
    [(0, 1), (1, 1), (2015, 1), (2016, 1), (2017, 2), (4032, 2), (4033, 3)],
)
def test_a_graph_with_more_entries_than_a_queue_takes_more_streams(
    entries: int, streams: int
) -> None:
    assert graph_streams([entries], A2) == streams


def test_a_queue_of_the_950_holds_2009_entries() -> None:
    assert [graph_streams([n], A5) for n in (2009, 2010)] == [1, 2]


@pytest.mark.parametrize("sides", [1, 2, 3])
def test_each_joined_side_stream_adds_a_stream_to_the_graph(sides: int) -> None:
    assert graph_streams([3, *[1] * sides], A2) == 1 + sides


@pytest.mark.parametrize(("name", "entries"), [("A2", 13), ("A3", 13), ("950", 12), ("310P", 15)])
def test_each_device_has_its_number_of_entries_per_task(name: str, entries: int) -> None:
    assert DEVICES[name].task_entries == entries


@pytest.mark.parametrize(
    ("layers", "sides", "per_size", "sizes"),
    [(36, 0, 37, 52), (64, 0, 65, 30), (64, 1, 130, 15), (64, 2, 195, 10), (94, 2, 285, 6)],
)
def test_a_piecewise_size_takes_a_stream_per_piece_and_side_stream(
    layers: int, sides: int, per_size: int, sizes: int
) -> None:
    figures = structural_figures(model(layers, multi_stream=sides), A2, reserve=0)
    assert (figures.usable, figures.piecewise) == (1950, per_size)
    assert figures.usable // figures.piecewise == sizes
    assert figures.piecewise == figures.pieces * (1 + sides)


@pytest.mark.parametrize(("layers", "kernels", "streams"), [(36, 12, 1), (80, 14, 2), (94, 30, 3)])
def test_a_full_graph_takes_few_streams_and_650_sizes_fit(
    layers: int, kernels: int, streams: int
) -> None:
    figures = structural_figures(model(layers, kernels_per_layer=kernels), A2, reserve=0)
    assert figures.full == streams
    assert figures.usable // figures.full >= 650


def test_a_communication_domain_adds_two_side_streams_except_on_vector_cores() -> None:
    assert structural_figures(model(64, "tp"), A2).piecewise == 195
    assert structural_figures(model(64, "tp", aiv=True), A2).piecewise == 65


def test_a_draft_model_adds_its_own_pieces_and_full_graph() -> None:
    figures = structural_figures(model(36, draft_layers=1), A2)
    assert (figures.pieces, figures.full) == (39, 2)


@pytest.mark.parametrize(
    ("work", "streams"),
    [
        (GraphWork({0: 100}), 1),
        (GraphWork({0: 1007}), 1),
        (GraphWork({0: 1008}), 2),
        (GraphWork({0: 1000}, tasks=2), 2),
        (GraphWork({0: 100, 7: 3, 8: 1}), 3),
        (GraphWork({}), 1),
        (GraphWork({0: 100}, breaks=8), 1),
        (GraphWork({0: 100}, breaks=8, in_pieces=True), 9),
        (GraphWork({0: 100, 7: 3}, breaks=8, in_pieces=True), 18),
    ],
)
def test_work_counted_in_a_warm_up_bounds_the_streams_of_a_graph(
    work: GraphWork, streams: int
) -> None:
    assert streams_needed(work, A2) == streams


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.integers(0, 200))
def test_the_stream_bound_holds_if_any_one_stream_has_all_tasks(
    operators: list[int], tasks: int
) -> None:
    work = GraphWork(dict(enumerate(operators)), tasks)
    for one in range(len(operators)):
        entries = [2 * each for each in operators]
        entries[one] += tasks * A2.task_entries
        assert graph_streams(entries, A2) <= streams_needed(work, A2)


@pytest.mark.parametrize(
    ("free", "given", "reserve", "usable"),
    [(2, None, 0, 2), (22, None, 2, 20), (1950, None, 48, 1902), (22, 0, 0, 22), (22, 30, 30, 0)],
)
def test_the_reserve_is_subtracted_from_the_free_streams(
    free: int, given: int | None, reserve: int, usable: int
) -> None:
    room = stream_room(free, given)
    assert (room.free, room.reserve, room.usable) == (free, reserve, usable)


def test_the_stream_reserve_is_read_from_option_and_environment_and_checked() -> None:
    assert AscendOptions.from_environment({"GRAPHRT_ASCEND_RESERVE_STREAMS": "7"}) == AscendOptions(
        reserve_streams=7
    )
    with pytest.raises(InvalidOptionError, match="RESERVE_STREAMS is no number"):
        AscendOptions.from_environment({"GRAPHRT_ASCEND_RESERVE_STREAMS": "few"})
    with pytest.raises(InvalidOptionError, match="reserve_streams"):
        AscendOptions(reserve_streams=-1)


def test_usable_streams_are_the_sum_of_the_printed_terms() -> None:
    figures = structural_figures(model(36), A2)
    assert [streams for _, streams in figures.terms] == [1984, -34, -48]
    assert figures.usable == 1902
    assert structural_figures(model(36), A2, available=500).usable == 452
    assert structural_figures(model(36), A2, available=20).usable == 0


@pytest.mark.parametrize(
    ("reported", "name", "streams"),
    [
        ("Ascend910B3", "A2", 1984),
        ("Ascend910_9391", "A3", 1984),
        ("Ascend950PR", "950", 1984),
        ("Ascend310P3", "310P", 1024),
        ("Ascend310B4", "310B", 512),
        ("Ascend910A", "910A", 2048),
        ("AscendNext", "A2", 1984),
    ],
)
def test_a_reported_device_name_gives_the_device_and_its_streams(
    reported: str, name: str, streams: int
) -> None:
    assert (device_of(reported).name, device_of(reported).streams) == (name, streams)


def test_the_names_a5_and_950_mean_the_same_device() -> None:
    assert device_named("a5") is device_named("950") is A5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Deployment(0),
        lambda: Deployment(4, frozenset({"pp"})),
        lambda: Deployment(4, draft_layers=-1),
        lambda: update_aclgraph_sizes(SIZES, model(4), profile="1.0"),
        lambda: stream_figures("1.0", model(4), A2),
        lambda: device_named("A9"),
    ],
)
def test_invalid_deployment_figures_are_refused_with_the_expected_value(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="expected"):
        wrong()


# Plans -------------------------------------------------------------------------------------------

DEPLOYMENTS = st.builds(
    Deployment,
    layers=st.integers(1, 130),
    domains=st.frozensets(st.sampled_from(DOMAINS)),
    aiv=st.booleans(),
    moe=st.booleans(),
    multi_stream=st.integers(0, 3),
    draft_layers=st.integers(0, 4),
    kernels_per_layer=st.integers(1, 60),
)
ANY_PROFILE = st.sampled_from([STRUCTURAL, *PROFILES])
ANY_DEVICE = st.sampled_from([DEVICES[name] for name in ("A2", "A3", "950", "310P")])
MODES = st.sampled_from([mode for mode in GraphMode if mode is not GraphMode.NONE])
REQS = st.integers(1, 600)


def planned(
    deployment: Deployment,
    profile: str,
    reqs: int,
    mode: GraphMode,
    *,
    device: Any = A2,
    budget: int | None = None,
    query_len: int = 1,
) -> tuple[int | None, Any, Captured, tuple[LeftOut, ...]]:
    """The budget of streams, and what `fit` makes of it."""
    figures = stream_figures(profile, deployment, device)
    sizes = capture_sizes(max_num_reqs=reqs, max_num_tokens=8192, query_lens=(query_len,))
    streams = figures.usable if budget is None else budget
    return streams, *fit(
        descriptors_for(mode, sizes),
        Budget(streams=streams, cost=figures.cost),
        ModeResolution(mode, mode),
        partial(by_worth, landmarks=[reqs * query_len]),
    )


@given(DEPLOYMENTS, ANY_PROFILE, REQS, MODES, ANY_DEVICE, st.none() | st.integers(0, 2500))
def test_a_plan_never_exceeds_its_budget(
    deployment: Deployment,
    profile: str,
    reqs: int,
    mode: GraphMode,
    device: Any,
    budget: int | None,
) -> None:
    streams, _, captured, left_out = planned(
        deployment, profile, reqs, mode, device=device, budget=budget
    )
    assert total_of(each.cost for each in captured).streams <= (streams or 0)
    assert all(each.why for each in left_out)
    assert not {each[:2] for each in left_out} & {each[:2] for each in captured}


@given(DEPLOYMENTS, ANY_PROFILE, REQS, MODES, st.integers(0, 2500), st.integers(1, 4))
def test_the_smallest_and_largest_sizes_are_kept_while_two_fit(
    deployment: Deployment,
    profile: str,
    reqs: int,
    mode: GraphMode,
    budget: int,
    query_len: int,
) -> None:
    _, resolution, captured, left_out = planned(
        deployment, profile, reqs, mode, budget=budget, query_len=query_len
    )
    everything = [*captured, *left_out]
    for runtime_mode in resolution.mode.runtime_modes:
        asked = [each.descriptor.num_tokens for each in everything if each.mode is runtime_mode]
        kept = [each.descriptor.num_tokens for each in captured if each.mode is runtime_mode]
        if len(kept) >= 2:
            assert {min(asked), max(asked)} <= set(kept)
        elif kept:
            assert kept == [max(asked)]


@given(DEPLOYMENTS, st.sampled_from(DOMAINS), ANY_PROFILE, REQS, MODES, ANY_DEVICE)
def test_adding_a_communication_domain_never_adds_a_capture_size(
    deployment: Deployment, domain: str, profile: str, reqs: int, mode: GraphMode, device: Any
) -> None:
    more = replace(deployment, domains=deployment.domains | {domain})
    _, before, kept, _ = planned(deployment, profile, reqs, mode, device=device)
    _, after, left, _ = planned(more, profile, reqs, mode, device=device)
    assert {each[:2] for each in left} <= {each[:2] for each in kept}
    assert set(after.mode.runtime_modes) <= set(before.mode.runtime_modes)
    if profile != STRUCTURAL:
        few = update_aclgraph_sizes(SIZES, more, profile=profile)
        assert len(few) <= len(update_aclgraph_sizes(SIZES, deployment, profile=profile))


@given(DEPLOYMENTS, st.sampled_from([*PROFILES]), st.integers(0, 80))
def test_integer_and_float_division_give_the_same_capacity(
    deployment: Deployment, profile: str, full_graphs: int
) -> None:
    """The formula was written with float divisions."""
    figures = PROFILES[profile]
    usable = max(0, sum(streams for _, streams in figures.terms(deployment, full_graphs)))
    pieces = figures.pieces(deployment)
    parts = figures.per_size(deployment) // pieces
    assert figures.capacity(deployment, full_graphs) == int(usable / pieces / parts)
