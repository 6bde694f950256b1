"""Unusual arguments of plans, budgets and plan files are accepted rightly or refused by name."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import (
    AttentionSupport,
    Batch,
    Budget,
    GraphCost,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Plan,
)
from graphrt.core.base.errors import (
    GraphRTError,
    InvalidBatchError,
    InvalidModeError,
    InvalidOptionError,
    PlanChangedWarning,
    PlanFileError,
    ResourceExhaustedError,
)
from graphrt.core.plan import saved
from graphrt.core.plan.sizes import capture_sizes
from graphrt.core.plan.traffic import by_worth

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def plan(mode: Any = "FULL_AND_PIECEWISE", **arguments: Any) -> Plan:
    if not {"sizes", "max_num_tokens", "max_num_reqs"} & arguments.keys():
        arguments["sizes"] = [1, 2, 4, 8]
    return Plan(mode, **arguments, platform="cpu")


ODD = object()
WRONG: dict[str, list[Any]] = {
    "mode": [5, "half", ["FULL"]],
    "sizes": [5, "12", [1.0], [True], [None], ["1"], [numpy.bool_(True)], [0], ODD, {}],
    "max_size": [0, 1.5, "4", True, [4], -1],
    "max_num_tokens": [0, 1.5, "8", True, -1, ODD],
    "max_num_reqs": [0, 1.5, "8", True, -1, ODD],
    "query_lens": [
        *(1, "12", (1.0,), (True,), None, ODD, (0,), (), (9,)),
        *({}, {8: 7}, {8: []}, {0: [1]}, {"8": [1]}, {1.5: [1]}, {8: [0], 2: 3}),
    ],
    "loras": [5, "1", ("1",), (-1,), (1.5,), (True,), None, ODD, ()],
    "bounds": [5, (5,), "ab", ("ab",), ((1.5,),), ((-1,),), None, (("x",),), ()],
    "variants": ["abc", 5, ([1],), None, ({},), ()],
    "attention": ["half", 7, 2.0, None, True, {"a": None}, {"a": "half"}, {1: 3}, ["a"], ODD],
    "pieces": [5, "half", True],
    "compiled": [5, "a", [5], None],
    "budget": [5, {}, "x", {"streams": 3}],
    "traffic": [5, "x", {"1": 1}, {1: "a"}, {1: float("nan")}, {1.0: 1}, {True: 1}, {}, {1: 0}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_plan_argument_is_refused_by_plan_and_runner(name: str, value: Any) -> None:
    named = (InvalidOptionError, InvalidOptionError, InvalidModeError, InvalidBatchError)
    with pytest.raises(named) as caught:
        plan(**{name: value})
    assert caught.value.got is not None and caught.value.expected is not None
    arguments = {"sizes": [1, 2, 4, 8], name: value}
    with pytest.raises(named):
        GraphRunner(
            lambda x: x,
            **arguments,
            platform="cpu",
            inputs={"x": InputSpec(torch.float32, ("tokens",))},
        )


@pytest.mark.parametrize("integer", [numpy.int64, numpy.uint16, torch.tensor])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sizes", [1, 2, 8]),
        ("query_lens", [1, 2]),
        ("loras", [0, 2]),
        ("bounds", [[16, 32]]),
        ("max_size", 4),
        ("max_num_tokens", 8),
        ("max_num_reqs", 2),
    ],
)
def test_numpy_and_tensor_integers_are_accepted_as_plan_arguments(
    name: str, values: Any, integer: Any, tmp_path: Path
) -> None:
    def odd(value: Any) -> Any:
        return list(map(odd, value)) if isinstance(value, list) else integer(value)

    subject = plan(**{name: odd(values)})
    assert subject.as_dict() == plan(**{name: values}).as_dict()
    subject.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", platform="cpu").keys == subject.keys


@pytest.mark.parametrize("array", [numpy.array, torch.tensor])
def test_sizes_may_be_a_numpy_array_or_tensor(array: Any) -> None:
    assert plan(sizes=array([1, 2, 8])).keys == plan(sizes=[1, 2, 8]).keys


@pytest.mark.parametrize("level", ["UNIFORM_BATCH", "uniform_batch ", 2])
def test_attention_may_be_given_as_level_name_or_number(level: Any) -> None:
    wanted = plan(attention=AttentionSupport.UNIFORM_BATCH)
    assert plan(attention=level).as_dict() == wanted.as_dict()
    named = plan(attention={"flash": level})
    assert named.attention == {"flash": AttentionSupport.UNIFORM_BATCH}


# Budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"streams": "x"},
        {"streams": True},
        {"graphs": [1]},
        {"device_bytes": float("nan")},
        {"cost": 5},
        {"cost": {"HALF": GraphCost()}},
        {"cost": {FULL: 5}},
        {"cost": lambda mode, descriptor: 5},
        {"min_piecewise": "x"},
        {"min_piecewise": 1.5},
        {"notes": "abc"},
        {"notes": 5},
    ],
    ids=lambda arguments: re.sub(" at 0x[0-9a-f]+", "", str(arguments)),
)
def test_a_budget_with_a_wrong_argument_is_refused(arguments: Any) -> None:
    with pytest.raises((InvalidOptionError, InvalidModeError)):
        plan(budget=Budget(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [{"streams": "x"}, {"streams": -1}, {"capture_s": float("nan")}, {"graphs": None}],
    ids=str,
)
def test_a_graph_cost_with_a_wrong_argument_is_refused(arguments: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"cost of {next(iter(arguments))}"):
        GraphCost(**arguments)


def test_a_budget_accepts_numpy_numbers_and_mode_names(tmp_path: Path) -> None:
    odd = Budget(
        streams=numpy.int64(9),
        capture_s=numpy.float32(2),
        device_bytes=torch.tensor(100),
        cost={"full": GraphCost(numpy.int64(2), 1, numpy.int64(3), numpy.float64(0.5))},
        notes=["a"],
    )
    cost = {FULL: GraphCost(2, 1, 3, 0.5)}
    wanted = Budget(streams=9, capture_s=2.0, device_bytes=100, cost=cost, notes=("a",))
    assert odd == wanted
    plan("FULL", budget=odd).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", platform="cpu")
    assert loaded.as_dict() == plan("FULL", budget=wanted).as_dict()


def strict(planned: Plan) -> GraphRunner:
    return GraphRunner(
        lambda x: x,
        planned,
        inputs={"x": InputSpec(torch.float32, ("tokens",))},
        outputs=("tokens",),
        options=GraphOptions(strict=True),
    )


def test_strict_refuses_a_budget_that_drops_sizes_but_keeps_the_mode() -> None:
    planned = plan("FULL", budget=Budget(graphs=3))
    assert planned.mode is FULL
    with pytest.raises(ResourceExhaustedError, match=r"3 of 4 graphs[\s\S]*FULL \["):
        strict(planned)
    assert len(strict(plan("FULL", budget=Budget(graphs=4))).plan.keys) == 4


def test_strict_names_the_mode_if_the_budget_drops_all_graphs() -> None:
    with pytest.raises(InvalidModeError, match="budget"):
        strict(plan("FULL", budget=Budget(graphs=0)))


# Sizes that nothing reaches, and none at all -----------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_sizes_above_max_num_tokens_are_left_out_with_a_line(mode: str) -> None:
    subject = plan(mode, sizes=[1, 32, 64, 128], max_num_tokens=32)
    assert max(descriptor.num_tokens for _, descriptor in subject.keys) == 32
    assert "left out: sizes above max_num_tokens=32: 64 128" in subject.lines()
    assert not any("left out" in line for line in plan(mode, sizes=[1, 32]).lines())


def printed_sizes(subject: Plan) -> dict[str, tuple[int, ...]]:
    """The lists of sizes in a printed plan, by name."""
    _, _, below = "\n".join(subject.lines()).partition("\nSizes, at most ")
    lists: dict[str, list[str]] = {}
    name = ""
    for line in below.splitlines()[1:]:
        if not line.startswith("  "):
            break
        row = re.fullmatch(r"  (\w.*?) +(\d+): (.*)", line)
        if row is None:
            lists[name] += line.split()
            continue
        name = row[1]
        lists[name] = row[3].replace("none", "").split()
    return {name: tuple(map(int, texts)) for name, texts in lists.items()}


def sizes_by_list(keys: Any) -> dict[str, tuple[int, ...]]:
    """The sizes of captured graphs, by the name of their list in a printed plan."""
    lists: dict[str, set[int]] = {}
    for mode, each in keys:
        name = "mixed" if mode is PIECEWISE else "any batch"
        name = f"decode, query length {each.query_len}" if each.uniform else name
        lists.setdefault(name, set()).add(each.num_tokens)
    return {name: tuple(sorted(sizes)) for name, sizes in lists.items()}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["NONE", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", None]),
    st.none() | st.lists(st.integers(1, 600), min_size=1, max_size=6, unique=True).map(sorted),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 900),
    st.none() | st.integers(1, 600),
    st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
    st.sampled_from(list(AttentionSupport)),
    st.none() | st.integers(0, 40),
    st.sampled_from([(0,), (0, 2), (None,)]),
)
def test_the_printed_sizes_are_exactly_the_captured_ones(
    mode, own, reqs, tokens, max_size, query_lens, attention, graphs, loras
):
    arguments = {"sizes": own, "max_num_reqs": reqs, "max_num_tokens": tokens, "loras": loras}
    arguments |= {"max_size": max_size, "query_lens": query_lens, "attention": attention}
    if graphs is not None:
        arguments["budget"] = Budget(graphs=graphs)
    try:
        subject = Plan(mode, **arguments, platform="cpu")
    except InvalidOptionError:
        return
    captured = sizes_by_list(subject.keys)
    printed = printed_sizes(subject)
    assert {name: sizes for name, sizes in printed.items() if sizes} == captured
    held = subject.sizes
    lists = {"mixed": held.mixed, "any batch": held.general}
    lists |= {f"decode, query length {q}": ladder for q, ladder in held.decode.items()}
    assert {name: sizes for name, sizes in lists.items() if sizes} == captured
    largest = max((sizes[-1] for sizes in captured.values()), default=0)
    assert not captured or f"Sizes, at most {largest} tokens:" in subject.lines()
    # Each of the host's own sizes has a graph as large, or a line says that it is left out.
    said = " ".join(line for line in subject.lines() if line.startswith("left out"))
    for size in own or () if subject.keys else ():
        assert size <= largest or re.search(rf"\b{size}\b", said)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"max_num_reqs": 2}, "left out: sizes above 2, the largest that is captured: 3 16 512"),
        ({"max_num_reqs": 99, "max_size": 20, "query_lens": (2,)},
         "left out: sizes above 16, the largest that is captured: 512"),
        ({"max_num_reqs": 99, "max_num_tokens": 20},
         "left out: sizes above max_num_tokens=20: 512"),
    ],
)  # fmt: skip
def test_sizes_above_the_largest_captured_one_are_left_out_with_a_line(arguments, line) -> None:
    subject = plan("FULL_DECODE_ONLY", sizes=[3, 16, 512], **arguments)
    assert [each for each in subject.lines() if each.startswith("left out")] == [line]
    assert subject.sizes.left_out == tuple(map(int, line.rpartition(": ")[2].split()))
    assert subject.sizes.mixed == subject.sizes.general == ()


def test_sizes_that_are_all_above_max_num_tokens_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="max_num_tokens leaves no capture size"):
        plan("FULL", sizes=[64], max_num_tokens=32)


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ({"max_num_tokens": 8192, "max_num_reqs": 600, "max_size": 300}, 288),
        ({"max_num_tokens": 64, "max_num_reqs": 8, "max_size": 100}, 64),
        ({"sizes": [1, 2, 4], "max_num_reqs": 4, "max_size": 100}, 4),
    ],
)
def test_a_max_size_that_no_graph_has_is_said(arguments: Any, largest: int) -> None:
    subject = plan("PIECEWISE", **arguments)
    assert subject.keys[0][1].num_tokens == largest
    note = f"Note: the largest size is {largest} instead of max_size={arguments['max_size']}"
    assert note in subject.lines() and f"Sizes, at most {largest} tokens:" in subject.lines()
    reached = plan("PIECEWISE", **{**arguments, "max_size": largest})
    assert not any("instead of" in line for line in reached.lines())


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_no_graph_has_more_active_loras_than_tokens(mode: str) -> None:
    subject = plan(mode, sizes=[1, 2, 4, 8], loras=(0, 2, 6, None))
    loras = {size: set() for size in (1, 2, 4, 8)}
    for _, descriptor in subject.keys:
        loras[descriptor.num_tokens].add((descriptor.has_lora, descriptor.num_active_loras))
    common = {(False, 0), (True, 0)}
    assert loras == {
        1: common | {(True, 1)},
        2: common | {(True, 2)},
        4: common | {(True, 2), (True, 4)},
        8: common | {(True, 2), (True, 6)},
    }
    assert len(subject.keys) == len(set(subject.keys))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_pieces_that_are_asked_for_by_name_reach_prompts(mode: str) -> None:
    few = {"max_num_reqs": 2, "max_num_tokens": 4096}
    assert plan(mode, **few).sizes.mixed[-1] == 512
    assert plan(mode, **{**few, "max_num_tokens": 300}).sizes.mixed[-2:] == (288, 300)
    assert plan(mode, **few, max_size=64).sizes.mixed[-1] == 64
    # Decode is as without the name.
    assert plan("FULL_AND_PIECEWISE", **few).sizes.decode == {1: (1, 2)}
    assert plan(None, **few).sizes.decode == {1: (1, 2)}
    assert plan(None, **few).sizes.mixed == (1, 2, 4)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 900),
    st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted),
    st.none() | st.integers(1, 64),
    st.sampled_from([None, "PIECEWISE", "FULL_AND_PIECEWISE", "FULL"]),
)
def test_the_plans_note_of_prompts_without_a_graph_matches_the_dispatcher(
    reqs, tokens, own, max_size, mode
):
    arguments = {"max_num_reqs": reqs, "max_num_tokens": tokens, "sizes": own, "max_size": max_size}
    try:
        subject = plan(mode, **arguments)
    except InvalidOptionError:
        return
    dispatcher = GraphDispatcher(subject.mode)
    for key in subject.keys:
        dispatcher.publish(*key)
    eager = [n for n in range(1, tokens + 1) if dispatcher.peek(Batch(n, 1)).slot < 0]
    notes = [line for line in subject.lines() if "prompts and mixed batches" in line]
    assert len(notes) == bool(eager)
    if eager:
        assert f"of {eager[0]} to {eager[-1]} tokens" in notes[0]


@pytest.mark.parametrize("name", ["device_bytes", "capture_s", "streams"])
def test_a_limit_without_costs_of_every_captured_mode_is_refused(name: str) -> None:
    cost = {GraphMode.FULL: GraphCost(**{name: 1})}
    with pytest.raises(InvalidOptionError, match=f"{name} needs the cost of a PIECEWISE graph"):
        plan("FULL_AND_PIECEWISE", sizes=[1, 2], budget=Budget(**{name: 8}, cost=cost))
    assert len(plan("FULL", sizes=[1, 2], budget=Budget(**{name: 8}, cost=cost)).keys) == 2
    assert plan("NONE", sizes=[1, 2], budget=Budget(**{name: 8})).keys == ()
    zero = {GraphMode.FULL: GraphCost(), GraphMode.PIECEWISE: GraphCost(**{name: 1})}
    assert len(plan("FULL", sizes=[1, 2], budget=Budget(**{name: 8}, cost=zero)).keys) == 2
    others = {GraphMode.FULL: GraphCost(graphs=2)}
    measured = Budget(**{name: 8}, cost=others)
    if name == "device_bytes":  # which a runner measures
        assert plan("FULL", sizes=[1, 2], budget=measured).is_measured
        return
    with pytest.raises(InvalidOptionError, match="FULL graph"):
        plan("FULL", sizes=[1, 2], budget=measured)


def test_a_query_length_above_max_num_tokens_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="query length 8, max_num_tokens=4"):
        plan("FULL_DECODE_ONLY", max_num_tokens=4, query_lens=(1, 8))


def test_a_decode_only_plan_without_any_fitting_graph_is_refused() -> None:
    arguments = {"max_num_tokens": 2048, "max_num_reqs": 4, "query_lens": (600,)}
    with pytest.raises(InvalidOptionError, match="none fits") as caught:
        plan("FULL_DECODE_ONLY", **arguments)
    advised = int((caught.value.advice or "").removeprefix("max_size="))
    assert plan("FULL_DECODE_ONLY", **arguments, max_size=advised).keys
    assert plan("NONE", **arguments).keys == ()


# Many sizes --------------------------------------------------------------------------------------


def slow_by_worth(sizes: list[int], traffic: dict[int, float] | None) -> tuple[int, ...]:
    """By definition: what saves least of what is left is dropped, one after another."""
    kept = sorted(sizes)
    # By traffic the smallest is one among others.
    fixed = [kept[-1]] if traffic is not None else [kept[-1], kept[0]]
    kept = kept if traffic is None else [0, *kept]

    def share(size: int) -> tuple[float, ...]:
        even = by_worth.__globals__["_even"](size)
        if traffic is None:
            return (even,)
        return (sum(traffic[each] for each in sorted(traffic) if each <= size), even)

    def saving(at: int) -> tuple[float, ...]:
        pairs = zip(share(kept[at]), share(kept[at - 1]), strict=True)
        return tuple((share - less) * (kept[at + 1] - kept[at]) for share, less in pairs)

    dropped = []
    while len(kept) > 2:
        least = min(range(1, len(kept) - 1), key=saving)
        dropped.append(kept.pop(least))
    return (*dict.fromkeys(fixed), *reversed(dropped))


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=24, unique=True),
    st.none() | st.dictionaries(st.integers(1, 600), st.integers(1, 8), min_size=1, max_size=9),
)
def test_by_worth_orders_sizes_as_a_brute_force_definition_does(
    sizes: list[int], traffic: dict[int, float] | None
) -> None:
    assert by_worth(sizes, traffic) == slow_by_worth(sizes, traffic)


def test_planning_many_thousands_of_sizes_takes_less_than_quadratic_time() -> None:
    started = time.thread_time()
    subject = plan(
        max_num_tokens=10**6, max_num_reqs=99, max_size=300_000, budget=Budget(graphs=500)
    )
    assert len(subject.keys) == 500 and len(subject.left_out) > 18_000
    assert subject.differences(subject) == []
    assert time.thread_time() - started < 20


def test_an_absurd_number_of_sizes_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="too many graphs"):
        plan(max_num_tokens=10**12, max_size=10**12)
    with pytest.raises(InvalidOptionError, match="no more than"):
        plan(sizes=itertools.count(1))
    few = capture_sizes(max_num_reqs=10**12, max_num_tokens=10**12, query_lens=(4,), max_size=9)
    assert few.decode == {4: (4, 8)}
    assert plan(max_num_tokens=10**12, max_num_reqs=10**12).keys


# Files -------------------------------------------------------------------------------------------

REPLACEMENTS = (None, -1, 1.5, "x", [], {}, [[]], {"x": 1}, True)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in JSON; of long lists the first element only."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*path, key))
    elif isinstance(content, list) and content:
        yield from places(content[0], (*path, 0))


def content_of(planned: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        planned.save(Path(folder, "plan.json"))
        content = json.loads(Path(folder, "plan.json").read_text())
    return {name: content[name] for name in ("arguments", "printed")}


def file_content() -> dict[str, Any]:
    """What a file holds."""
    planned = plan(
        "FULL",
        attention={"flash": AttentionSupport.UNIFORM_BATCH},
        budget=Budget(graphs=6, cost={"FULL": GraphCost()}),
        traffic={1: 0.5, 8: 0.5},
        variants=[("a", 1)],
        bounds=[(16,)],
    )
    return content_of(planned)


def forged(tmp_path: Path, content: Any) -> Path:
    """A file of that content."""
    path = tmp_path / "plan.json"
    head = {"graphrt_plan": saved.FORMAT, "made_with": "graphrt"}
    path.write_text(json.dumps({**head, **content}))
    return path


def load(tmp_path: Path, content: Any) -> None:
    """Load a file: it is a plan, or the error says that it is none."""
    path = forged(tmp_path, content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanChangedWarning)
        with contextlib.suppress(PlanFileError):
            Plan.load(path, platform="cpu")


def test_an_unedited_plan_file_loads_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanChangedWarning)
        assert Plan.load(forged(tmp_path, file_content()), platform="cpu").keys


@pytest.mark.parametrize("path", [path for path in places(file_content()) if path], ids=str)
def test_loading_any_edited_plan_file_works_or_raises_a_plan_file_error(
    path: tuple[Any, ...], tmp_path: Path
) -> None:
    for value in (*REPLACEMENTS, ...):
        content = file_content()
        holder: Any = content
        for key in path[:-1]:
            holder = holder[key]
        if value is ...:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
        load(tmp_path, content)


def test_control_characters_of_a_plan_file_are_escaped_wherever_they_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clear = "\x1b[2J\x9b1A\r"
    content = file_content()
    content["arguments"]["attention"] = {clear: "UNIFORM_BATCH"}
    content["printed"].append(clear)
    with pytest.warns(PlanChangedWarning) as warned:
        loaded = Plan.load(forged(tmp_path, content), platform="cpu")
    content["arguments"]["mode"] = clear
    with pytest.raises(PlanFileError) as caught:
        Plan.load(forged(tmp_path, content), platform="cpu")
    shown = [str(loaded), *(str(each.message) for each in warned), str(caught.value), caplog.text]
    assert all("\x1b" not in each and "\x9b" not in each and "\r" not in each for each in shown)
    assert "\\x1b[2J\\x9b1A" in shown[0] and "\\x1b[2J\\x9b1A" in shown[1]


def test_a_plan_file_with_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    content = file_content()
    content["arguments"]["foo"] = 1
    with pytest.raises(PlanFileError, match="foo"):
        Plan.load(forged(tmp_path, content), platform="cpu")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[" * 100_000, b"", b"null", b'{"graphrt_plan": 4}', b"\x00"]
)
def test_a_file_that_is_no_saved_plan_raises_a_plan_file_error(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError):
        Plan.load(path, platform="cpu")


@pytest.mark.parametrize("path", [None, 5, "", ".", b"plan.json"])
def test_loading_or_saving_a_plan_with_an_invalid_path_raises(path: Any) -> None:
    with pytest.raises(GraphRTError):
        Plan.load(path, platform="cpu")
    with pytest.raises(PlanFileError):
        plan().save(path)


# Notes -------------------------------------------------------------------------------------------


def eager_notes(subject: Plan) -> list[str]:
    return [line for line in subject.lines() if "will run eagerly" in line]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 900),
    st.lists(st.integers(1, 9), min_size=1, max_size=2, unique=True),
    st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted),
    st.none() | st.integers(1, 64),
    st.sampled_from(["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"]),
)
def test_the_plans_notes_of_eager_decode_batches_match_the_dispatcher(
    reqs, tokens, query_lens, own, max_size, mode
):
    arguments = {
        "max_num_reqs": reqs,
        "max_num_tokens": max(tokens, *query_lens),
        "query_lens": query_lens,
        "sizes": own,
        "max_size": max_size,
    }
    try:
        subject = plan(mode, **arguments)
    except InvalidOptionError:
        return
    dispatcher = GraphDispatcher(subject.mode)
    for key in subject.keys:
        dispatcher.publish(*key)
    notes = {
        int(note.split("query length ")[1].split(")")[0]): note for note in eager_notes(subject)
    }
    for q in query_lens:
        eager = [
            n * q
            for n in range(1, min(reqs, arguments["max_num_tokens"] // q) + 1)
            if dispatcher.peek(Batch(n * q, n, q)).slot < 0
        ]
        assert bool(eager) is (q in notes)
        if eager:
            assert f"of {eager[0]} to {eager[-1]} tokens" in notes[q]


def test_decode_batches_of_an_uncovered_query_length_get_an_eager_note():
    subject = plan(
        "FULL_DECODE_ONLY", max_num_reqs=200, max_num_tokens=8192, query_lens=(1, 4), max_size=256
    )
    (note,) = eager_notes(subject)
    assert "of 260 to 800 tokens (query length 4)" in note
