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


def on_devices(cases: Iterable[Any], *kept: Any, on_gpus: Iterable[Any] | None = None) -> list[Any]:
    """Cases and devices: on a CPU those kept are for `make test`; on a GPU those of `on_gpus`, by
    default all. The rest is `long`."""
    every = list(cases)
    gpu = every if on_gpus is None else list(on_gpus)
    absent = {*kept, *gpu} - set(every)
    assert not absent, f"no such case: {absent}"
    long, cuda = pytest.mark.long, pytest.mark.cuda
    return [
        *(pytest.param(c, "cpu", marks=[] if c in kept else [long]) for c in every),
        *(pytest.param(c, "cuda", marks=[cuda] if c in gpu else [cuda, long]) for c in every),
    ]
