"""Code that is right for some sizes only: which sizes a call has, and what runs then."""

from __future__ import annotations

import logging

import pytest
import sympy
import torch

from graphrt.compile import compile_module
from graphrt.compile.pieces.by_size import BySize, conditions_on
from graphrt.compile.trace.parameters import Leaf

ROWS, REQS = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def where_right(conditions, places, **more) -> BySize:
    def code(*_: object) -> str:
        return "code"

    def otherwise(*_: object) -> str:
        return "otherwise"

    return BySize(code, otherwise, conditions, places, "piece", **more)


def called(conditions, places, *args):
    return where_right(conditions, places)(*args)


def test_a_size_is_read_from_a_number_argument_or_a_tensor_dimension():
    for place, small, large in (
        ((0, None, ROWS), 4, 5),
        ((0, 1, ROWS), torch.empty(9, 4), torch.empty(9, 5)),
        ((0, 0, ROWS * 2 + 1), torch.empty(9), torch.empty(11)),
    ):
        assert called([ROWS <= 4], [place], small) == "code"
        assert called([ROWS <= 4], [place], large) == "otherwise"


def test_compiled_code_runs_only_where_all_size_conditions_hold():
    places = [(0, None, ROWS), (1, None, REQS)]
    conditions = [ROWS <= 4, sympy.Le(REQS, ROWS)]
    assert [called(conditions, places, *sizes) for sizes in ((4, 2), (5, 2), (4, 5))] == [
        "code",
        "otherwise",
        "otherwise",
    ]


def test_a_size_that_no_argument_determines_runs_uncompiled():
    places = [(0, None, ROWS * REQS)]
    assert called([ROWS <= 4], places, 4) == "otherwise"


def test_a_piece_is_checked_for_conditions_on_its_own_sizes_only():
    places = [(0, None, ROWS)]
    assert conditions_on([ROWS <= 4, REQS <= 4, sympy.Le(REQS, ROWS)], places) == [ROWS <= 4]


def test_each_failed_condition_is_logged_once_with_the_names_of_axes(caplog):
    places = [(0, None, ROWS), (1, None, REQS)]
    axes = {"s0": ("tokens", 0), "s1": ("reqs", 1)}
    call = where_right([ROWS <= 4, sympy.Le(2 * REQS, 9)], places, axes=axes)
    said = []
    for sizes in ((4, 2), (5, 2), (6, 2), (4, 5), (3, 6)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="graphrt"):
            call(*sizes)
        said.append(caplog.text)
    assert [bool(text) for text in said] == [False, True, False, True, False]
    assert "runs uncompiled at sizes of tokens = 5: its code is for tokens <= 4" in said[1]
    assert "runs uncompiled at sizes of reqs = 4: its code is for 2*reqs + 2 <= 9" in said[3]


def test_a_failed_condition_on_an_unnamed_size_is_logged_by_its_symbol(caplog):
    with caplog.at_level(logging.WARNING, logger="graphrt"):
        called([ROWS <= 4], [(0, None, ROWS)], 7)
    assert "at sizes of s0 = 7: its code is for s0 <= 4" in caplog.text


def test_the_cache_of_checked_sizes_of_a_piece_is_bounded():
    call = where_right([ROWS <= 3000], [(0, None, ROWS)])
    for _ in range(2):
        for size in range(4000):
            assert call(size) == ("code" if size <= 3000 else "otherwise")
            assert len(call._code_by_sizes) <= 1024


@pytest.mark.parametrize("most", [1, 2, 4096])
def test_the_cache_of_checked_sizes_of_a_compiled_module_is_bounded(most, monkeypatch):
    monkeypatch.setattr("graphrt.compile.trace.check._MOST_SIZES", most)
    compiled = compile_module(lambda x: x * (2 if x.shape[0] == 1 else 3), ["x"], in_place=False)
    for size in (6, 1, 5, 4, 1, 1, 3, 6):
        x = torch.ones(size, 4)
        assert torch.equal(compiled(x), x * (2 if size == 1 else 3))
        checker = compiled._built.checker
        assert len(checker._checked_sizes) <= most
        for asked in (size, 1, 2):
            needed = checker.axes_needing_own_code([Leaf("x", torch.ones(asked, 4))])
            assert needed == ((("tokens", 1),) if asked == 1 else ())


def test_halves_of_a_batch_are_traced_as_equal_although_rows_equal_columns():
    def halved(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        return torch.cat([x[:half] * x[half:], x[:half]])

    # The trace has another number of rows, as 4 is the size of both dimensions here.
    compiled = compile_module(halved, ["x"], in_place=False)
    for rows in (4, 2, 6, 10):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), halved(x))
