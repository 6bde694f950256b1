"""Memory that a forward fills in place when it runs first, and notes in Python that it did."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphrt import GraphRunner, Reason
from graphrt.errors import PythonStateError
from tests.trust.test_python_state import LEVELS, WIDTH, X, rows, runner_of, served

Fill = Callable[[torch.Tensor, torch.Tensor], object]
Forward = Callable[[torch.Tensor], torch.Tensor]


def by_flag(fill: Fill) -> Forward:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(WIDTH))
            self.ready = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                fill(self.table, x)
                self.ready = True
            return x + self.table

    return Table()


def by_none(fill: Fill) -> Forward:
    model = SimpleNamespace(table=torch.zeros(WIDTH), filled_by=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.filled_by is None:
            fill(model.table, x)
            model.filled_by = object()
        return x + model.table

    return forward


def by_dict(fill: Fill) -> Forward:
    table, done = torch.zeros(WIDTH), {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if "table" not in done:
            fill(table, x)
            done["table"] = True
        return x + table

    return forward


def by_list(fill: Fill) -> Forward:
    table, calls = torch.zeros(WIDTH), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not calls:
            fill(table, x)
        calls.append(len(x))
        return x + table

    return forward


def by_attribute(fill: Fill) -> Forward:
    model = SimpleNamespace(tables=[torch.zeros(WIDTH)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(model, "ready"):
            fill(model.tables[0], x)
            model.ready = True
        return x + model.tables[0]

    return forward


def by_closure(fill: Fill) -> Forward:
    table, ready = torch.zeros(WIDTH), False

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal ready
        if not ready:
            fill(table, x)
            ready = True
        return x + table

    return forward


MARKS = [by_flag, by_none, by_dict, by_list, by_attribute, by_closure]


def a_table(table: torch.Tensor, x: torch.Tensor) -> None:
    table.copy_(torch.arange(float(WIDTH))).mul_(2)


def a_scale(table: torch.Tensor, x: torch.Tensor) -> None:
    table.copy_(x.abs().amax(0))


@pytest.mark.parametrize("fill", [a_table, a_scale])
@pytest.mark.parametrize("mark", MARKS)
def test_a_table_filled_in_place_by_the_first_call_is_refused_by_name(mark, fill):
    with pytest.raises(
        PythonStateError, match="first call of the forward made or filled"
    ) as raised:
        runner_of(mark(fill))
    assert re.search(r"got: .*table.*: .*table\.copy_\(", str(raised.value))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_table_filled_by_a_call_before_capture_is_right_at_every_level(level, mode):
    right, ran, said, _ = served(lambda: called(by_flag(a_table), 3), level=level, mode=mode)
    assert right and set(ran) == {Reason.HIT} and not said


def called(forward: Forward, *counts: int) -> Forward:
    for count in counts:
        forward(rows(count, seed=9))
    return forward


def test_a_scale_taken_from_a_batch_before_capture_is_right():
    right, ran, said, _ = served(lambda: called(by_flag(a_scale), 3))
    assert right and set(ran) == {Reason.HIT} and not said


def test_a_refused_capture_leaves_the_first_call_undone():
    forward = by_flag(a_scale)
    with pytest.raises(PythonStateError):
        runner_of(forward)
    assert not forward.ready and not forward.table.any()


def rows_of_a_table() -> Forward:
    table, seen = torch.zeros(16, 1), set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in seen:
            table[: len(x), 0] = torch.arange(float(len(x)))
            seen.add(len(x))
        return x + table[: len(x)]

    return forward


def a_table_of_some_sizes() -> Forward:
    tables, done = {n: torch.zeros(1) for n in (1, 2, 4)}, set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) in tables and len(x) not in done:
            tables[len(x)].fill_(2)
            done.add(len(x))
        return x * tables.get(len(x), 2.0)

    return forward


@pytest.mark.parametrize("make", [rows_of_a_table, a_table_of_some_sizes])
def test_a_table_filled_by_each_size_needs_a_call_of_each_size_before_capture(make):
    sizes = [1, 2, 4, 8]
    for counts in ((), (8, 4, 2)):
        with pytest.raises(PythonStateError, match="first call of the forward made or filled"):
            runner_of(called(make(), *counts), sizes=sizes)
    right, ran, said, _ = served(
        lambda: called(make(), *sizes), (4, 3, 2, 8, 5, 4, 1, 2), sizes=sizes
    )
    assert right and set(ran) == {Reason.HIT} and not said


def cache_that_the_first_call_clears(was: float) -> Forward:
    model = SimpleNamespace(cache=torch.full((8, WIDTH), was), cleared=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not model.cleared:
            model.cache.zero_()
            model.cleared = True
        model.cache[0].add_(x[0])
        return x + model.cache.sum(0)

    return forward


@pytest.mark.parametrize("was", [0.0, 1.0])
def test_a_cache_that_the_first_call_clears_is_refused_by_name(was):
    with pytest.raises(
        PythonStateError, match="first call of the forward made or filled"
    ) as raised:
        runner_of(cache_that_the_first_call_clears(was))
    assert "model.cache" in str(raised.value)


def test_buffers_written_at_alternate_calls_are_put_back_after_capture():
    buffers, model = [torch.zeros(1), torch.zeros(1)], SimpleNamespace(at=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        buffers[model.at].copy_(x.sum())
        model.at = 1 - model.at
        return x * 2

    runner_of(forward)
    assert [each.item() for each in buffers] == [0, 0]


def test_state_written_by_every_second_call_is_put_back_after_capture():
    sums, model = torch.zeros(1), SimpleNamespace(odd=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.odd = not model.odd
        if model.odd:
            sums.add_(x.sum() + 1)
        return x * 2

    runner_of(forward)
    assert sums.item() == 0


def at_small_sizes(part: Forward) -> Forward:
    return lambda x: part(x) if len(x) <= 2 else x * 2


def small_sum_in_an_attribute() -> Forward:
    model = SimpleNamespace(sum=None)

    def part(x: torch.Tensor) -> torch.Tensor:
        if model.sum is None:
            model.sum = torch.zeros(WIDTH)
        model.sum.add_(1)
        return x + model.sum

    return at_small_sizes(part)


def small_sum_in_a_new_attribute() -> Forward:
    model = SimpleNamespace()

    def part(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(model, "sum"):
            model.sum = torch.zeros(WIDTH)
        model.sum.add_(1)
        return x + model.sum

    return at_small_sizes(part)


def small_scale_in_a_dict() -> Forward:
    kept: dict[str, torch.Tensor] = {}

    def part(x: torch.Tensor) -> torch.Tensor:
        if "row" not in kept:
            kept["row"] = x[:1].clone()
        return x + kept["row"]

    return at_small_sizes(part)


def small_sum_in_a_list() -> Forward:
    kept: list[torch.Tensor] = []

    def part(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.zeros(WIDTH))
        kept[0].add_(1)
        return x + kept[0]

    return at_small_sizes(part)


def small_scale_in_a_closure() -> Forward:
    scale = None

    def part(x: torch.Tensor) -> torch.Tensor:
        nonlocal scale
        if scale is None:
            scale = x.amax(0)
        return x + scale

    return at_small_sizes(part)


def sum_of_two_rows_in_memory_made_per_size() -> Forward:
    model = SimpleNamespace(sum=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.sum is None or len(model.sum) != len(x):
            model.sum = torch.zeros(len(x), WIDTH)
        if len(x) == 2:
            model.sum.add_(1)
        return x + model.sum

    return forward


SMALL = [
    small_sum_in_an_attribute,
    small_sum_in_a_new_attribute,
    small_scale_in_a_dict,
    small_sum_in_a_list,
    small_scale_in_a_closure,
    sum_of_two_rows_in_memory_made_per_size,
]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("make", SMALL)
def test_state_that_smaller_sizes_alone_make_is_refused_by_name(make, mode):
    with pytest.raises(PythonStateError, match="first call of the forward made or filled"):
        runner_of(make(), mode=mode, sizes=[1, 2, 4, 8])


@pytest.mark.parametrize("make", SMALL)
def test_state_that_smaller_sizes_alone_make_is_refused_in_sessions_of_one_graph(make):
    inputs, sizes = {"x": X}, [1, 2, 4, 8]
    runner = GraphRunner(make(), mode="FULL", inputs=inputs, sizes=sizes, platform="cpu")

    def capture_one_by_one() -> None:
        while runner.capture_next():
            pass

    with pytest.raises(PythonStateError, match="first call of the forward made or filled"):
        capture_one_by_one()


def workspaces_of_small_sizes() -> Forward:
    spaces: dict[int, torch.Tensor] = {}

    def part(x: torch.Tensor) -> torch.Tensor:
        space = spaces.setdefault(len(x), torch.zeros_like(x))
        torch.mul(x, 3, out=space)
        return space + 1

    return at_small_sizes(part)


def tables_of_small_sizes() -> Forward:
    tables: dict[int, torch.Tensor] = {}

    def part(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in tables:
            table = torch.zeros(WIDTH)
            table[2] = len(x)
            tables[len(x)] = table.add_(1)
        return x + tables[len(x)]

    return at_small_sizes(part)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("make", [workspaces_of_small_sizes, tables_of_small_sizes])
def test_workspaces_and_tables_that_smaller_sizes_alone_make_are_right(make, mode):
    right, ran, said, _ = served(make, (4, 2, 1, 8, 2, 1), "always", mode=mode, sizes=[1, 2, 4, 8])
    assert right and set(ran) == {Reason.HIT} and not said
