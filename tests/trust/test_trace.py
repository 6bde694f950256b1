"""Two runs, operator by operator: where they part, and what is not done after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.trust.watching.rows import in_bounds
from graphrt.trust.watching.watch import (
    Deviation,
    Trace,
    Watch,
    first_difference,
    same_but_for_size,
)

aten = torch.ops.aten
WEIGHT, OTHER = torch.ones(4), torch.ones(4)
TABLE = torch.ones(8, 4)
nan = float("nan")


def traced(function: Callable[[], Any]) -> Trace:
    watch = Watch()
    watch.around(function)
    return watch.trace


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 4)


ALIKE = {
    "nan": (lambda: rows(2) * nan, lambda: rows(2) * nan, None),
    "Python data": (lambda: torch.tensor([1, 2]), lambda: torch.tensor([1, 2]), None),
    "Python data with nan": (lambda: torch.tensor([nan]), lambda: torch.tensor([nan]), None),
}
DIFFERENT = {
    "another operator": (lambda: rows(2) + 1, lambda: rows(2) * 1, 1),
    "a fraction": (lambda: rows(2) * 2.5, lambda: rows(2) * 2.0, 1),
    "the sign of zero": (lambda: rows(2) * -0.0, lambda: rows(2) * 0.0, 1),
    "nan and a number": (lambda: rows(2) * nan, lambda: rows(2) * 1.0, 1),
    "another tensor": (lambda: WEIGHT + 1, lambda: OTHER + 1, 0),
    "another part of a tensor": (lambda: TABLE[0] + 1, lambda: TABLE[1] + 1, 0),
    "a text": (
        lambda: torch.div(rows(1), 2, rounding_mode="floor"),
        lambda: torch.div(rows(1), 2, rounding_mode="trunc"),
        1,
    ),
    "a dtype": (lambda: rows(1).to(torch.int8), lambda: rows(1).to(torch.int16), 1),
    "a flag": (lambda: rows(1).sum(0, True), lambda: rows(1).sum(0, False), 1),
    "one operator more": (lambda: rows(1) + 1 + 1, lambda: rows(1) + 1, 2),
    "one operator less": (lambda: rows(1) + 1, lambda: rows(1) + 1 + 1, 2),
    "inside or outside": (lambda: WEIGHT + 1, lambda: torch.add(torch.ones(4), 1)[:0], 0),
}
OF_THE_SIZE = {
    "rows": (lambda: rows(2) + 1.5, lambda: rows(3) + 1.5),
    "an integer": (lambda: torch.arange(2), lambda: torch.arange(3)),
    "a part of a tensor": (lambda: TABLE[:2] + 1, lambda: TABLE[:3] + 1),
    "a list of sizes": (lambda: rows(2).view(8), lambda: rows(3).view(12)),
    "a list of tensors": (lambda: torch.cat([rows(1)] * 2), lambda: torch.cat([rows(2)] * 2)),
    "Python data": (lambda: torch.tensor([1, 2]), lambda: torch.tensor([1, 2, 3])),
}
NOT_OF_THE_SIZE = {
    name: DIFFERENT[name] for name in DIFFERENT if name not in ("another part of a tensor",)
}


def params(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in table.items()]


@pytest.mark.parametrize(("ours", "theirs", "place"), params(ALIKE | DIFFERENT))
def test_traces_of_equal_size_differ_by_any_operator_argument(ours, theirs, place):
    found = first_difference(traced(ours), traced(theirs))
    assert (None if found is None else found[0]) == place


@pytest.mark.parametrize(("ours", "theirs"), params(OF_THE_SIZE))
def test_traces_of_two_sizes_ignore_differences_that_follow_from_the_size(ours, theirs):
    ours, theirs = traced(ours), traced(theirs)
    assert first_difference(ours, theirs) is not None
    assert first_difference(ours, theirs, same_but_for_size) is None


@pytest.mark.parametrize(("ours", "theirs", "place"), params(ALIKE | NOT_OF_THE_SIZE))
def test_traces_of_two_sizes_still_differ_by_arguments_unrelated_to_size(ours, theirs, place):
    found = first_difference(traced(ours), traced(theirs), same_but_for_size)
    assert (None if found is None else found[0]) == place


def test_a_difference_between_two_sizes_names_the_number_and_not_the_shape():
    found = first_difference(
        traced(lambda: rows(2) * 2.5), traced(lambda: rows(3) * 2.0), same_but_for_size
    )
    assert found is not None and found[1].endswith("mul.Tensor: 2.5 where the graph has 2.0")


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (lambda: rows(1) + 1, lambda: rows(1) * 1, "aten.add.Tensor where the graph has aten.mul"),
        (lambda: rows(1) * 2.5, lambda: rows(1) * 2.0, "mul.Tensor: 2.5 where the graph has 2.0"),
        (lambda: rows(2) + 1, lambda: rows(3) + 1, "[2, 4]"),
        (lambda: WEIGHT + 1, lambda: OTHER + 1, f"a tensor (4,) at {WEIGHT.data_ptr():#x}"),
        (lambda: rows(1) + 1, lambda: rows(1), "aten.add.Tensor where the graph has none"),
        (lambda: rows(1), lambda: rows(1) + 1, "none where the graph has aten.add.Tensor"),
    ],
    ids=["operator", "number", "rows", "weight", "shorter", "longer"],
)
def test_a_difference_is_described_for_both_traces(ours, theirs, text):
    found = first_difference(traced(ours), traced(theirs))
    said = found[1].replace("(2, 4)", "[2, 4]")
    assert text in said, said


def test_values_of_tensors_make_no_difference_between_traces():
    weight = torch.ones(4)
    then = traced(lambda: weight + 1)
    weight.fill_(2)
    assert first_difference(traced(lambda: weight + 1), then) is None


def test_tensors_made_in_a_run_are_compared_by_shape_and_dtype_alone():
    assert traced(lambda: torch.ones(3) + 1) == traced(lambda: torch.ones(3) + 1)
    assert traced(lambda: torch.ones(3) + 1)[1] != traced(lambda: torch.zeros(3).int() + 1)[-1]


# Following a run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted():
    """An operator of a host's own, and how often it ran."""
    library = torch.library.Library("graphrt_test_trace", "DEF")
    calls: list[int] = []

    def bump(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    library.define("bump(Tensor x) -> Tensor")
    library.impl("bump", bump, "CPU")
    yield torch.ops.graphrt_test_trace.bump, calls
    library._destroy()


def followed(then: Callable[[], Any], now: Callable[[], Any]) -> Watch:
    watch = Watch(follows=traced(then))
    watch.around(now)
    return watch


def test_a_repeated_run_does_not_deviate_from_its_trace(counted):
    bump, calls = counted
    calls.clear()
    run = lambda: bump(TABLE[torch.tensor([7])]) * nan  # noqa: E731
    watch = followed(run, run)
    assert watch.deviation == "" and len(calls) == 2


def test_a_run_that_deviates_into_torch_operators_continues_and_is_named():
    watch = followed(lambda: rows(2) * 2.0, lambda: rows(2) * 3.0 + 1)
    assert watch.deviation.startswith("aten.mul.Tensor at ")
    assert "test_trace.py" in watch.deviation
    assert len(watch.trace) == 3


def test_a_longer_run_deviates_from_its_trace_and_a_shorter_does_not():
    assert followed(lambda: rows(2), lambda: rows(2) + 1).deviation
    assert not followed(lambda: rows(2) + 1, lambda: rows(2)).deviation


@pytest.mark.parametrize("before", [0, 1])
def test_a_custom_operator_is_not_run_after_a_deviation(counted, before):
    bump, calls = counted
    then = traced(lambda: bump(rows(2) * 2.0))
    calls.clear()
    watch = Watch(follows=then)
    with pytest.raises(Deviation):
        watch.around(lambda: bump(rows(2 + before) * (2.0 + (not before))))
    assert calls == [] and watch.deviation


def with_index(name: str, index: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    table, at = torch.zeros(8, 4), index.view(-1, 1).expand(-1, 4)
    source = torch.ones(len(index), 4)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "embedding": (aten.embedding.default, (table, index)),
        "index": (aten.index.Tensor, (table, [index])),
        "index of the second": (aten.index.Tensor, (table.t(), [None, index])),
        "index_put_": (aten.index_put_.default, (table, [index], source)),
        "_index_put_impl_": (aten._index_put_impl_.default, (table, [index], source)),
        "index_select": (aten.index_select.default, (table, 0, index)),
        "gather": (aten.gather.default, (table, 0, at)),
        "index_copy_": (aten.index_copy_.default, (table, 0, index, source)),
        "index_add_": (aten.index_add_.default, (table, 0, index, source)),
        "index_fill_": (aten.index_fill_.int_Scalar, (table, 0, index, 1.0)),
        "scatter_": (aten.scatter_.src, (table, 0, at, source)),
        "scatter_add_": (aten.scatter_add_.default, (table, 0, at, source)),
        "scatter": (aten.scatter.src, (table, 0, at, source)),
        "take": (aten.take.default, (table[:, 0], index)),
        "put_": (aten.put_.default, (table[:, 0], index, source[:, 0])),
        "index_reduce_": (aten.index_reduce_.default, (table, 0, index, source, "prod")),
        "scatter_reduce_": (aten.scatter_reduce_.two, (table, 0, at, source, "sum")),
        "scatter_add": (aten.scatter_add.default, (table, 0, at, source)),
        "index_put": (aten.index_put.default, (table, [index], source)),
        "index_add": (aten.index_add.default, (table, 0, index, source)),
        "index_copy": (aten.index_copy.default, (table, 0, index, source)),
        "index_fill": (aten.index_fill.int_Scalar, (table, 0, index, 1.0)),
        "_unsafe_index": (aten._unsafe_index.Tensor, (table, [index])),
        "embedding_bag": (
            aten._embedding_bag.default,
            (table, index, torch.tensor([0])),
        ),
    }
    return calls[name]


NAMES = (
    *("embedding", "index", "index of the second", "index_put_", "_index_put_impl_"),
    *("index_select", "gather"),
    *("index_copy_", "index_add_", "index_fill_", "scatter_", "scatter_add_", "scatter"),
)
UNKNOWN = (
    *("take", "put_", "index_reduce_", "scatter_reduce_", "scatter_add", "index_put"),
    *("index_add", "index_copy", "index_fill", "_unsafe_index", "embedding_bag"),
)


@pytest.mark.parametrize("name", NAMES + UNKNOWN)
@pytest.mark.parametrize("rows", [[], [0, 7]])
def test_indices_within_the_tensor_are_in_bounds(name, rows):
    assert in_bounds(*with_index(name, torch.tensor(rows, dtype=torch.int64)))


@pytest.mark.parametrize("name", [*NAMES, *UNKNOWN])
@pytest.mark.parametrize("row", [8, 1 << 20, -(1 << 20)])
def test_indices_beyond_the_tensor_are_out_of_bounds(name, row):
    assert not in_bounds(*with_index(name, torch.tensor([0, row])))


@pytest.mark.parametrize(
    ("index", "inside"),
    [
        ([torch.tensor([True] * 8)], True),
        ([None, torch.tensor([3])], True),
        ([None, torch.tensor([4])], False),
        ([torch.tensor([-8]), torch.tensor([-4])], True),
        ([torch.tensor([-9]), torch.tensor([0])], False),
        ([torch.tensor([0]), torch.tensor([4])], False),
        ([torch.ones(8, 4, dtype=torch.bool)], True),
        ([torch.ones(8, dtype=torch.bool), torch.tensor([4])], False),
        ([torch.tensor([3], dtype=torch.int32)], True),
    ],
)
def test_each_index_is_checked_against_its_own_dimension(index, inside):
    assert in_bounds(aten.index.Tensor, (torch.zeros(8, 4), index)) is inside


@pytest.mark.parametrize(("row", "inside"), [(2, True), (3, False)])
def test_a_boolean_mask_indexes_as_many_dimensions_as_the_mask_has(row, inside):
    index = [torch.ones(8, 4, dtype=torch.bool), torch.tensor([row])]
    assert in_bounds(aten.index.Tensor, (torch.zeros(8, 4, 3), index)) is inside


@pytest.mark.parametrize("name", NAMES)
def test_an_index_out_of_bounds_is_not_used_after_a_deviation(name):
    then = traced(lambda: rows(2) + 1)
    func, args = with_index(name, torch.tensor([8]))
    state = args[0].clone()
    with pytest.raises(Deviation):
        Watch(follows=then).around(lambda: func(*args))
    assert torch.equal(args[0], state)


def test_an_out_of_bounds_index_also_in_the_trace_raises_the_error_of_torch():
    index = torch.tensor([8])
    watch = Watch()
    with pytest.raises(IndexError):
        watch.around(lambda: TABLE[index])
    with pytest.raises(IndexError):
        Watch(follows=watch.trace).around(lambda: TABLE[index])


def test_traces_described_without_addresses_differ_by_numbers_and_shapes_alone():
    def described(tensor: torch.Tensor, number: float, *, with_addresses: bool = False) -> Trace:
        trace = traced(lambda: torch.cat([tensor, tensor * number]))
        return trace.described(with_addresses=with_addresses, scratch=())

    first = described(WEIGHT, 2.0)
    assert first == described(OTHER, 2.0)
    assert first != described(WEIGHT, 3.0)
    assert first != described(TABLE, 2.0)
    assert described(WEIGHT, 2.0, with_addresses=True) != described(OTHER, 2.0, with_addresses=True)
