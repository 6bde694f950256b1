"""`Plan`: resolved, printed, saved and loaded; the same for the runner and the command line."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt import (
    AttentionSupport,
    Batch,
    BatchDescriptor,
    Budget,
    GraphCost,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Plan,
    Reason,
    forward_context,
)
from graphrt.core.base.errors import (
    InvalidModeError,
    InvalidOptionError,
    PlanChangedWarning,
    PlanFileError,
)
from graphrt.core.plan.plan import PlanArguments
from graphrt.cpu import CPUGraphWrapper, CpuPlatform

INPUTS = {"x": InputSpec(torch.float32, ("tokens", 4))}


class SmallWrapper(CPUGraphWrapper):
    platform_name = "small"


class SmallPlatform(CpuPlatform):
    """Another device, which captures less by default."""

    name = "small"

    def get_static_graph_wrapper_cls(self) -> str:
        return f"{__name__}.SmallWrapper"

    def default_max_size(self) -> int:
        return 16


def runner(plan: Plan | None = None, **arguments: Any) -> GraphRunner:
    return GraphRunner(lambda x: x + 1, plan, inputs=INPUTS, outputs=("tokens", 4), **arguments)


def test_a_plan_lists_the_graphs_that_a_runner_with_its_arguments_captures() -> None:
    arguments: PlanArguments = {"mode": "FULL_AND_PIECEWISE", "sizes": [1, 2, 4], "max_num_reqs": 4}
    planned = Plan(**arguments, platform="cpu")
    with runner(planned) as first, runner(platform="cpu", **arguments) as second:
        assert first.plan is planned
        assert first.plan.keys == second.plan.keys == planned.keys
        first.capture()
        captured = [(graph.mode, graph.descriptor) for graph in first.report().graphs]
        assert tuple(captured) == planned.keys


def test_a_plan_and_a_runner_take_the_same_plan_keywords() -> None:
    assert set(Plan(sizes=[1], platform="cpu").arguments) == set(PlanArguments.__annotations__)
    assert len(inspect.signature(GraphRunner).parameters) <= 10


def test_a_runner_refuses_plan_arguments_beside_a_plan() -> None:
    with pytest.raises(InvalidOptionError, match="sizes"):
        runner(Plan(sizes=[1], platform="cpu"), sizes=[2])


def test_an_unknown_plan_argument_raises_and_names_its_right_place() -> None:
    with pytest.raises(InvalidOptionError, match=r"host=Host"):
        runner(sizes=[1], bind=print)
    with pytest.raises(InvalidOptionError, match="no such argument"):
        Plan(sizes=[1], platform="cpu").replace(size=[2])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, InvalidOptionError),
        ({"sizes": [2, 1]}, InvalidOptionError),
        ({"sizes": [1], "mode": "HALF"}, InvalidModeError),
        ({"sizes": [1], "compiled": [print]}, InvalidOptionError),
    ],
)
def test_a_plan_with_invalid_or_missing_arguments_raises(
    arguments: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Plan(**arguments, platform="cpu")


def test_a_printed_plan_shows_mode_sizes_graphs_and_budget() -> None:
    planned = Plan(
        "FULL",
        max_num_reqs=8,
        attention={"flash": AttentionSupport.UNIFORM_BATCH},
        budget=Budget(graphs=7, cost={GraphMode.PIECEWISE: GraphCost(graphs=3)}),
        platform="cpu",
    )
    text = str(planned)
    assert "Mode: FULL requested, FULL_AND_PIECEWISE runs" not in text
    assert "FULL becomes FULL_AND_PIECEWISE" in text and "flash supports UNIFORM_BATCH" in text
    assert "mixed" in text and "decode, query length 1" in text
    assert "Graphs to capture, largest first: 4 (4 FULL)" in text
    assert "left out: PIECEWISE [8 tokens]" in text


def test_strict_refuses_a_mode_that_steps_down() -> None:
    with pytest.raises(InvalidModeError, match="NEVER"):
        runner(
            sizes=[1],
            mode="FULL",
            attention=AttentionSupport.NEVER,
            options=GraphOptions(strict=True),
        )


def test_editing_the_arguments_of_a_plan_afterwards_does_not_change_the_plan() -> None:
    attention, lens = {"flash": AttentionSupport.ALWAYS}, [1]
    planned = Plan("FULL", sizes=[1, 4], attention=attention, query_lens=lens, platform="cpu")
    before = planned.as_dict()
    attention["flash"] = AttentionSupport.NEVER
    lens.append(4)
    assert planned.as_dict() == before
    assert planned.replace(max_size=4).keys == planned.keys


@pytest.mark.parametrize(
    ("name", "values"), [("loras", (0, 1)), ("variants", ("a", "b")), ("query_lens", (1, 4))]
)
def test_a_plan_accepts_iterators_for_loras_variants_and_query_lengths(
    name: str, values: Any
) -> None:
    once = Plan("FULL", sizes=[4, 8], platform="cpu", **{name: iter(values)})
    again = Plan("FULL", sizes=[4, 8], platform="cpu", **{name: values})
    assert once.keys == again.keys and once.replace().keys == again.keys


@pytest.mark.parametrize("name", ["loras", "variants", "bounds"])
def test_an_empty_list_of_loras_variants_or_bounds_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=name):
        Plan(sizes=[1], platform="cpu", **{name: []})


@pytest.mark.parametrize(
    "wrong", [{"plan": "FULL"}, {"options": {"outputs": "clone"}}, {"host": {"bind": print}}]
)
def test_a_runner_refuses_a_plan_options_or_host_of_wrong_type(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="wrong type"):
        runner(**wrong)


def test_a_loaded_budget_keeps_the_costs_of_sizes_outside_its_plan(tmp_path: Path) -> None:
    cost = {GraphMode.FULL: GraphCost(device_bytes=10), GraphMode.PIECEWISE: GraphCost(3, 3, 30)}
    saved = Plan(sizes=[1, 2, 4, 8], budget=Budget(device_bytes=60, cost=cost), platform="cpu")
    saved.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", platform="cpu")
    more = [1, 2, 4, 8, 16, 32]
    assert loaded.replace(sizes=more).total == saved.replace(sizes=more).total


# Off ---------------------------------------------------------------------------------------------


def test_graphrt_mode_none_in_the_environment_turns_graphs_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHRT_MODE", "none")
    with runner(mode="FULL", sizes=[4], options=GraphOptions(strict=True)) as off:
        off.capture()
        assert off.mode is GraphMode.NONE and off.report().graphs == ()
        assert off.plan.resolution.steps[-1].rule == "environment"
        assert torch.equal(off(x=torch.ones(3, 4)), torch.full((3, 4), 2.0))


def test_graphrt_mode_none_also_turns_off_a_plan_made_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Plan("FULL", sizes=[4], platform="cpu")
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    with pytest.warns(PlanChangedWarning, match="NONE"):
        off = runner(planned)
    off.capture()
    assert off.mode is GraphMode.NONE
    off.close()


def test_graphrt_mode_none_also_turns_off_a_hosts_own_dispatcher_and_wrappers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    dispatcher, calls = GraphDispatcher("FULL"), []
    wrapper = CPUGraphWrapper(calls.append, "FULL", options=GraphOptions(lazy=True))
    dispatcher.publish(GraphMode.FULL, BatchDescriptor(4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.MODE_NONE
    with forward_context("FULL", BatchDescriptor(4)):
        wrapper(1)
    assert calls == [1] and not wrapper.entries


def test_graphrt_mode_with_a_value_other_than_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHRT_MODE", "FULL")
    with pytest.raises(InvalidModeError, match="GRAPHRT_MODE"):
        Plan(sizes=[1], platform="cpu")


# Files -------------------------------------------------------------------------------------------

VARIANTS = st.recursive(
    st.text(max_size=4) | st.integers(-9, 9), lambda inner: st.tuples(inner, inner), max_leaves=3
)


@given(
    mode=st.none() | st.sampled_from([mode.name for mode in GraphMode]),
    sizes=st.none() | st.sets(st.integers(1, 99), min_size=1, max_size=5).map(sorted),
    reqs=st.integers(1, 40),
    query_lens=st.sets(st.integers(1, 4), min_size=1).map(sorted)
    | st.sampled_from([{40: [3]}, {8: [4, 2], 64: [1]}]),
    attention=st.sampled_from(AttentionSupport)
    | st.dictionaries(st.text(min_size=1, max_size=3), st.sampled_from(AttentionSupport)),
    pieces=st.sampled_from(["auto", None, "fx", "breakable"]),
    loras=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=2, unique=True),
    bounds=st.sampled_from([[()], [(16,), (64,)]]),
    variants=st.lists(st.none() | VARIANTS, min_size=1, max_size=2, unique=True),
    limit=st.none() | st.integers(0, 40),
    traffic=st.none() | st.dictionaries(st.integers(1, 40), st.floats(0.1, 1), min_size=1),
)
def test_a_loaded_plan_equals_the_saved_plan(
    tmp_path_factory: pytest.TempPathFactory, limit: int | None, reqs: int, **arguments: Any
) -> None:
    if limit is not None:
        cost = {GraphMode.PIECEWISE: GraphCost(graphs=2)}
        arguments["budget"] = Budget(graphs=limit, cost=cost, notes=("a note",))
    saved = Plan(**arguments, max_num_reqs=reqs, max_num_tokens=100, platform="cpu")
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    saved.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanChangedWarning)
        loaded = Plan.load(path, platform="cpu")
    assert loaded.as_dict() == saved.as_dict()
    assert (loaded.keys, loaded.resolution) == (saved.keys, saved.resolution)
    assert str(loaded) == str(saved)


def test_loading_a_plan_for_another_platform_resolves_the_plan_anew_with_a_warning(
    tmp_path: Path,
) -> None:
    saved = Plan("FULL", max_num_reqs=64, platform="cpu")
    saved.save(tmp_path / "plan.json")
    with pytest.warns(
        PlanChangedWarning, match=r"- Platform: cpu\n[\s\S]*\+ Platform: small\n[\s\S]*5 FULL"
    ):
        loaded = Plan.load(tmp_path / "plan.json", platform=SmallPlatform())
    assert max(key[1].num_tokens for key in loaded.keys) == 16
    assert "- Graphs to capture, largest first: 11 (11 FULL)" in saved.differences(loaded)
    with pytest.warns(PlanChangedWarning), runner(saved, platform=SmallPlatform()) as small:
        assert small.plan.keys == loaded.keys


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"graphrt_plan": 4', '"graphrt_plan": 5'),
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
    ],
)
def test_loading_a_damaged_plan_file_raises_plan_file_error(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "plan.json"
    Plan("FULL", max_num_reqs=8, platform="cpu").save(path)
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    with pytest.raises(PlanFileError, match="no plan"):
        Plan.load(path)


def test_loading_an_edited_plan_warns_with_the_lines_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan("FULL", max_num_reqs=8, platform="cpu").save(path)
    path.write_text(path.read_text().replace('"max_num_reqs": 8', '"max_num_reqs": 9'))
    with pytest.warns(PlanChangedWarning, match="at most 9 tokens"):
        assert Plan.load(path, platform="cpu").sizes.max_num_reqs == 9


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("traffic", '"1": 0.5', '"1": 0.25'),
        ("max_size", '"max_size": null', '"max_size": 100'),
        ("max_num_reqs", '"max_num_reqs": null', '"max_num_reqs": 64'),
        ("variants", '"None"', "\"'a'\""),
    ],
)
def test_an_edited_argument_that_changes_no_printed_line_gives_a_warning(
    tmp_path: Path, name: str, was: str, now: str
) -> None:
    path = tmp_path / "plan.json"
    Plan("FULL", sizes=[1, 8], traffic={1: 0.5, 8: 0.5}, platform="cpu").save(path)
    before = path.read_text()
    path.write_text(before.replace(was, now, 1))
    assert path.read_text() != before
    with pytest.warns(PlanChangedWarning, match=f"- {name} = "):
        Plan.load(path, platform="cpu")


def test_a_missing_plan_file_or_folder_raises_plan_file_error(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="missing"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match="cannot be written"):
        Plan(sizes=[1], platform="cpu").save(tmp_path / "missing" / "plan.json")


def test_saving_a_plan_whose_variant_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    planned = Plan(sizes=[1], variants=[object()], platform="cpu")
    with pytest.raises(InvalidOptionError, match="variant"):
        planned.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_mode_that_steps_down_logs_a_single_warning(caplog):
    with caplog.at_level("WARNING", logger="graphrt"):
        Plan("FULL", max_num_tokens=8, platform="cpu")
        assert caplog.records == []
        Plan("FULL", max_num_tokens=8, attention=AttentionSupport.NEVER, platform="cpu")
    (record,) = caplog.records
    assert "FULL runs as PIECEWISE" in record.message and "NEVER" in record.message


def test_a_printed_plan_shows_only_the_sizes_of_its_mode():
    assert "decode" not in str(Plan(mode="FULL", sizes=[1, 2]))
    assert "any batch    2: 1 2" in str(Plan(mode="FULL", sizes=[1, 2]))
    assert "decode, query length 1" in str(Plan(mode="FULL_DECODE_ONLY", sizes=[1, 2]))


# Another place ----------------------------------------------------------------------------------


class Compiled:
    """A compiled module, as far as a plan looks."""

    graphs, provides, whole_graph = True, None, False


def test_fitted_to_returns_the_same_plan_only_for_its_platform_and_modules() -> None:
    first, second = Compiled(), Compiled()
    plan = Plan("FULL", sizes=[2], platform="cpu", compiled=[first, second])
    assert plan.fitted_to(plan.platform, [first, second]) is plan
    for modules in ([second, first], [first], []):
        other = plan.fitted_to(plan.platform, modules)
        assert other is not plan and list(other.compiled) == modules
    small = SmallPlatform()
    moved = plan.fitted_to(small, [first, second])
    assert moved is not plan and moved.platform is small


@pytest.mark.parametrize("made", [None, "NONE"])
@pytest.mark.parametrize("fitted", [None, "NONE"])
@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_fitted_to_returns_the_same_plan_until_graphrt_mode_changes(
    monkeypatch, made, fitted, mode
) -> None:
    def switch(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("GRAPHRT_MODE", raising=False)
        else:
            monkeypatch.setenv("GRAPHRT_MODE", value)

    switch(made)
    plan = Plan(mode, sizes=[2], platform="cpu")
    switch(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanChangedWarning)
        again = plan.fitted_to(plan.platform, [])
    assert again.mode.name == ("NONE" if fitted else mode)
    assert (again is plan) == (made == fitted or mode == "NONE")
