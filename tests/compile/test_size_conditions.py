"""Code that is right for some sizes only: which sizes a call has, and what runs then."""

from __future__ import annotations

import sympy
import torch

from graphrt.compile.pieces._conditions import WhereRight, conditions_on

ROWS, REQS = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def called(conditions, places, *args):
    def code(*_: object) -> str:
        return "code"

    def otherwise(*_: object) -> str:
        return "otherwise"

    return WhereRight(code, otherwise, conditions, places, "piece")(*args)


def test_a_size_is_read_off_a_number_or_a_dimension():
    for place, small, large in (
        ((0, None, ROWS), 4, 5),
        ((0, 1, ROWS), torch.empty(9, 4), torch.empty(9, 5)),
        ((0, 0, ROWS * 2 + 1), torch.empty(9), torch.empty(11)),
    ):
        assert called([ROWS <= 4], [place], small) == "code"
        assert called([ROWS <= 4], [place], large) == "otherwise"


def test_all_conditions_have_to_hold():
    places = [(0, None, ROWS), (1, None, REQS)]
    conditions = [ROWS <= 4, sympy.Le(REQS, ROWS)]
    assert [called(conditions, places, *sizes) for sizes in ((4, 2), (5, 2), (4, 5))] == [
        "code",
        "otherwise",
        "otherwise",
    ]


def test_what_no_argument_tells_runs_as_it_is():
    places = [(0, None, ROWS * REQS)]
    assert called([ROWS <= 4], places, 4) == "otherwise"


def test_a_piece_is_held_to_conditions_on_its_own_sizes_only():
    places = [(0, None, ROWS)]
    assert conditions_on([ROWS <= 4, REQS <= 4, sympy.Le(REQS, ROWS)], places) == [ROWS <= 4]
