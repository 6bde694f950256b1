"""Sizes, lists and files that would take all memory or time are refused at once."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphOptions,
    GraphRTError,
    GraphRunner,
    InputSpec,
    Plan,
    forward_context,
)
from graphrt.core.base.errors import (
    InvalidBatchError,
    InvalidInputError,
    InvalidOptionError,
    PlanFileError,
)
from graphrt.core.device.contract import MemoryFigures
from graphrt.core.plan.budget import Budget
from graphrt.cpu import CpuPlatform
from graphrt.demo.settings import read_settings

LONG = 10**12
BEYOND = 10**30
UNPRINTABLE = 10**5000
"""Python itself refuses to print it."""
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    started = time.thread_time()
    yield
    assert time.thread_time() - started < 5


def runner(spec: InputSpec | None = None, **arguments: Any) -> GraphRunner:
    spec = spec or InputSpec(torch.float32, ("tokens", 4))
    keywords = {"mode": "FULL", "sizes": [4], **arguments}
    return GraphRunner(torch.relu, inputs={"input": spec}, platform="cpu", **keywords)


@pytest.mark.parametrize("number", [LONG, BEYOND])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: runner(sizes=[number]),
        lambda number: runner(max_num_tokens=number),
        lambda number: runner(InputSpec(torch.float32, ("tokens", number))),
        lambda number: runner(InputSpec(torch.float32, (number,))),
        lambda number: runner(InputSpec(torch.float32, (f"tokens+{number}",))),
    ],
)
def test_input_buffers_too_large_for_any_machine_are_refused_before_allocation(make, number):
    with pytest.raises((InvalidInputError, InvalidOptionError)) as caught:
        make(number)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("number", [1 << 63, 10**400, UNPRINTABLE], ids=["2**63", "400", "5000"])
@pytest.mark.parametrize("field", ["num_tokens", "num_reqs", "query_len", "num_active_loras"])
def test_a_batch_with_a_count_that_no_int64_holds_is_refused_by_name(field, number):
    served = runner()
    batch = Batch(**{"num_tokens": 4, field: number})
    x = torch.ones(4, 4)
    for use in (served.dispatcher.dispatch, served.slot, lambda batch: served(batch, input=x)):
        with pytest.raises(InvalidBatchError, match=field) as caught:
            use(batch)
        assert len(str(caught.value)) < 1000
    # The constructor leaves it to what uses the batch, and it can be printed.
    assert len(repr(batch)) < 1000
    with pytest.raises(InvalidBatchError, match=field):
        forward_context("FULL", BatchDescriptor(4), live=batch)


@pytest.mark.parametrize("live", [5, "4 tokens", (4, 2), BatchDescriptor(4)], ids=repr)
def test_a_context_of_a_live_batch_that_is_none_is_refused(live):
    with pytest.raises(InvalidBatchError, match="no Batch"):
        forward_context("FULL", BatchDescriptor(4), live=live)


def test_an_input_with_a_huge_axis_before_its_batch_axis_is_refused():
    with pytest.raises(InvalidInputError, match="in front of the batch axis"):
        InputSpec(torch.uint8, (1 << 20, "tokens"))


def test_inputs_larger_than_device_memory_are_refused_with_their_bytes():
    class Small(CpuPlatform):
        def memory_figures(self) -> MemoryFigures:
            return MemoryFigures(free_bytes=1 << 31, total_bytes=1 << 31)

    rows = InputSpec(torch.float64, ("tokens", 1 << 20))
    specs = {"ids": InputSpec(torch.int64, ("tokens",)), "rows": rows}
    with pytest.raises(InvalidInputError, match=f"'rows' most(?s:.*){512 * ((8 << 20) + 8)} bytes"):
        GraphRunner(torch.relu, mode="FULL", sizes=[512], inputs=specs, platform=Small())


@pytest.mark.parametrize(
    "argument", ["max_num_tokens", "max_num_reqs", "max_size", "sizes", "query_lens", "loras"]
)
def test_a_plan_argument_beyond_int64_is_refused(argument):
    lists = argument in ("sizes", "query_lens", "loras")
    for number in (BEYOND, UNPRINTABLE):
        keywords = {"sizes": [4], argument: [number] if lists else number}
        with pytest.raises(GraphRTError, match=r"larger|4") as caught:
            Plan("FULL", platform="cpu", **keywords)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("argument", ["sizes", "query_lens", "loras", "bounds", "variants"])
@pytest.mark.parametrize("endless", [lambda: itertools.repeat(1), lambda: range(LONG)])
def test_an_endless_list_as_a_plan_argument_is_refused(argument, endless):
    with pytest.raises((InvalidOptionError, InvalidOptionError), match="no more than"):
        Plan("FULL", platform="cpu", **{"sizes": [4], argument: endless()})


def test_plan_arguments_that_multiply_to_too_many_graphs_are_refused():
    many = range(1, 5000)
    with pytest.raises(InvalidOptionError, match="24990001 graphs"):
        Plan("FULL", sizes=many, loras=many, platform="cpu")
    with pytest.raises(InvalidOptionError, match="24990001 graphs"):
        Plan("FULL_DECODE_ONLY", sizes=many, query_lens=many, platform="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"warmups": LONG},
        {"warmups": UNPRINTABLE},
        {"state_limit_bytes": UNPRINTABLE},
        {"max_padding": UNPRINTABLE},
        {"max_padding": float("nan")},
        {"max_padding": float("inf")},
    ],
    ids=range(6),
)
def test_absurdly_large_or_non_finite_options_are_refused(options):
    with pytest.raises(InvalidOptionError):
        GraphOptions(**options)


@pytest.mark.parametrize("amount", [UNPRINTABLE, float("nan"), "9" * 5000], ids=range(3))
def test_absurdly_large_or_non_finite_budgets_and_traffic_are_refused(amount):
    for make in (lambda: Budget(device_bytes=amount), lambda: Budget(capture_s=amount)):
        with pytest.raises(InvalidOptionError):
            make()
    for traffic in ({4: amount}, {UNPRINTABLE: 1.0}):
        with pytest.raises(InvalidOptionError):
            Plan("FULL", sizes=[4], traffic=traffic, platform="cpu")


@pytest.mark.parametrize("value", [DEEP, "9" * 5000], ids=range(2))
def test_a_setting_of_deep_brackets_or_endless_digits_stays_text(value):
    assert read_settings([f"sizes={value}"]) == {"sizes": value}


@pytest.fixture(params=["/dev/zero", "pipe", "nul", "binary", "directory", "name"])
def no_text(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path of what cannot be read as a text with an end."""
    pipe, binary = tmp_path / "pipe", tmp_path / "binary"
    if request.param == "pipe":
        os.mkfifo(pipe)
    binary.write_bytes(b"\xff\xfe\x00")
    return {
        "/dev/zero": "/dev/zero",
        "pipe": str(pipe),
        "nul": "a\0b",
        "binary": str(binary),
        "directory": str(tmp_path),
        "name": "a" * 5000,
    }[request.param]


def test_loading_a_plan_from_a_device_pipe_or_folder_raises_at_once(no_text):
    with pytest.raises(PlanFileError) as caught:
        Plan.load(no_text)
    assert len(str(caught.value)) < 1000


def test_loading_a_plan_file_of_a_terabyte_raises_at_once(tmp_path):
    file = tmp_path / "large.json"
    with file.open("wb") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(PlanFileError, match="more than"):
        Plan.load(file)


def nested(depth: int) -> Any:
    nest: Any = 1
    for _ in range(depth):
        nest = [nest]
    return nest


def forged(path: Path, top: dict[str, Any], arguments: dict[str, Any]) -> Path:
    """A plan's file with other content."""
    plan = Plan("FULL_AND_PIECEWISE", sizes=[1, 2, 4], budget=Budget(graphs=3), platform="cpu")
    plan.save(path)
    whole = json.loads(path.read_text())
    content = {name: whole[name] for name in ("arguments", "printed")}
    content["arguments"].update(arguments)
    content.update(top)
    path.write_text(json.dumps({**whole, **content}))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        {"sizes": [BEYOND]},
        {"sizes": list(range(1, 5000)), "loras": list(range(5000)), "budget": None},
        {"loras": list(range(70_000))},
        {"variants": [nested(500)]},
        {"variants": [nested(40)]},
        {"traffic": {"9" * 5000: 1.0}},
        {"max_num_tokens": "512"},
        {"max_num_tokens": float("nan")},
        {"max_num_reqs": 1e300},
        {"query_lens": "1" * 70_000},
        {"budget": nested(500)},
        {"mode": "X" * 100_000},
        {"unknown": 1},
    ],
    ids=range(13),
)
def test_a_plan_file_with_oversized_or_malformed_arguments_is_refused(tmp_path, arguments):
    with pytest.raises(PlanFileError) as caught:
        Plan.load(forged(tmp_path / "plan.json", {}, arguments), platform="cpu")
    assert len(str(caught.value)) < 2000


def test_saving_a_plan_nested_too_deeply_to_load_is_refused(tmp_path):
    deep: Any = 1
    for _ in range(1000):
        deep = (deep,)
    plan = Plan("FULL", sizes=[1, 2], variants=[deep], platform="cpu")
    with pytest.raises(InvalidOptionError, match="cannot be saved"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_plan_file_with_a_malformed_section_is_refused(tmp_path):
    tops = {"arguments": nested(500)}, {"arguments": {"a": 1}}, {"printed": None}, {"printed": 5}
    for top in tops:
        with pytest.raises(PlanFileError):
            Plan.load(forged(tmp_path / "plan.json", top, {}), platform="cpu")


def test_a_plan_file_of_deeply_nested_brackets_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    for depth in (900, 100_000):
        brackets = "[" * depth + "]" * depth
        file.write_text('{"graphrt_plan": 4, "a": ' + brackets + "}")
        with pytest.raises(PlanFileError):
            Plan.load(file)
