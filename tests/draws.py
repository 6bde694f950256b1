"""How many cases `make test` runs of a table, and how many are drawn of random ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MORE = int(os.environ.get("GRAPHRT_TEST_MORE", "1"))
"""Tests marked `draws` draw `GRAPHRT_TEST_MORE` times as many cases as usual."""


def rest_long(
    cases: Iterable[Any], *kept: Any, name: Callable[[Any], object] = lambda case: case
) -> list[Any]:
    """`cases` for `parametrize`: those named in `kept` are for `make test`, the rest is `long`."""
    every = list(cases)
    absent = set(kept) - {name(case) for case in every}
    assert not absent, f"no such case: {absent}"
    return [case if name(case) in kept else _long(case) for case in every]


def _long(case: Any) -> Any:
    # A plain tuple has a value for each of several names.
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.long)


def on_devices(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases and devices: of a CPU those kept are for `make test`, of a GPU all of them."""
    every = list(cases)
    absent = set(kept) - set(every)
    assert not absent, f"no such case: {absent}"
    return [
        *(pytest.param(c, "cpu", marks=[] if c in kept else [pytest.mark.long]) for c in every),
        *(pytest.param(c, "cuda", marks=pytest.mark.cuda) for c in every),
    ]
