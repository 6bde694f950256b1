"""Forwards of `various.py` through `graphrt.compile`: eager's values, or an error by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphRTError
from graphrt.compile import CompileOptions, compile_module
from tests.compile.various import CASES, Case, rows

SIZES = (5, 2, 7, 1, 5)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


def same(actual: Any, expected: Any, exact: bool) -> bool:
    """Whether two results are alike, in their containers too."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or actual.dtype is not expected.dtype:
            return False
        if exact or not expected.is_floating_point():
            return actual.shape == expected.shape and torch.equal(
                actual.nan_to_num(), expected.nan_to_num()
            )
        return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[key], expected[key], exact) for key in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(
            same(*each, exact) for each in zip(actual, expected, strict=True)
        )
    return bool(actual == expected)


def inputs_of(case: Case, rows_: int) -> dict[str, Any]:
    torch.manual_seed(rows_)
    return {"x": rows(rows_), **case.more(rows_)}


def called(forward: Any, inputs: dict[str, Any]) -> Any:
    """With the first one by position: modules of torch call it otherwise."""
    return forward(inputs["x"], **{name: each for name, each in inputs.items() if name != "x"})


def built(case: Case) -> Any:
    torch.manual_seed(0)
    return case.build()


def state_of(forward: Any) -> dict[str, Any]:
    return dict(forward.state_dict()) if isinstance(forward, nn.Module) else {}


def check(case: Case, backend: str, cache_dir: Path) -> None:
    eager, ours = built(case), built(case)
    options = CompileOptions(backend=backend, cache_dir=str(cache_dir))
    compiled = compile_module(ours, case.dims, options=options, in_place=False)
    for size in SIZES:
        theirs, mine = inputs_of(case, size), inputs_of(case, size)
        with torch.no_grad():
            if case.refused:
                with pytest.raises(GraphRTError):
                    called(compiled, mine)
                continue
            expected, actual = called(eager, theirs), called(compiled, mine)
        exact = backend == "eager"
        assert same(actual, expected, exact), f"{size} rows: {actual} is not {expected}"
        assert same(mine, theirs, exact), f"{size} rows: arguments are {mine}, not {theirs}"
        assert same(state_of(ours), state_of(eager), exact), f"{size} rows: other buffers"
    assert compiled.figures.compilations <= 3


def test_the_table_has_at_least_seventy_five_forwards():
    assert len(CASES) >= 75


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_compiled_forwards_have_the_values_of_eager(name, tmp_path):
    check(CASES[name], "eager", tmp_path)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.inductor])
def test_forwards_compiled_by_inductor_are_near_eager(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    check(CASES[name], "inductor", tmp_path / "kept")
