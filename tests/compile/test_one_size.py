"""`dynamic_dims={}`: code for one batch size alone, with graphs of it; another one is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec
from graphrt.compile import (
    CompileError,
    CompileOptions,
    CompileSizeError,
    RetraceError,
    TraceError,
    compile_module,
    opaque,
)

ROWS = 6
BACKENDS = [
    "eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
    ),
]


@opaque("graphrt_one_size::spread", mutates=["out"])
def spread(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(x, -1))


class Cached(nn.Module):
    """Reads a cache of `ROWS` rows: no other number of rows goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor
        self.register_buffer("cache", torch.linspace(0, 1, ROWS * 4).view(ROWS, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        spread(x * 2, out)
        return (out + self.cache).view(ROWS, 4).relu()


def compiled_and_runner(tmp_path: Any, backend: str, mode: str, sizes: list[int]) -> Any:
    pool = GraphPool("cpu")
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(Cached(), {}, pool=pool, options=options, in_place=False)
    runner = GraphRunner(
        compiled,
        mode=mode,
        sizes=sizes,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        pool=pool,
    )
    return compiled, runner


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_compiled_for_a_single_size_has_pieces_and_graphs_of_that_size(tmp_path, backend):
    # FULL compiles the whole graph, PIECEWISE two pieces.
    starts = [("FULL", "cold"), ("PIECEWISE", "cold"), ("FULL", "warm"), ("PIECEWISE", "warm")]
    for mode, started in starts:
        compiled, runner = compiled_and_runner(tmp_path, backend, mode, [ROWS])
        with runner:
            runner.capture()
            count = 2 if mode == "PIECEWISE" else 0
            assert compiled.figures.pieces == count
            assert compiled.figures.splitting_pieces == count // 2
            if backend == "inductor":
                kept = compiled.figures.compilations, compiled.figures.loads
                assert kept == ((count or 1, 0) if started == "cold" else (0, count or 1))
            for rows in (3, ROWS, 1, ROWS):
                x = torch.randn(rows, 4)
                whole = torch.cat([x, torch.zeros(ROWS - rows, 4)])
                output = runner(x=x)
                assert runner.last_dispatch.mode is GraphMode[mode]
                torch.testing.assert_close(output, Cached()(whole)[:rows])
            runner.verify(Batch(ROWS, ROWS, 1), x=torch.randn(ROWS, 4))


@pytest.mark.parametrize("rows", [0, 1, 2, ROWS + 1])
def test_a_call_at_a_size_other_than_the_compiled_size_is_refused(rows):
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = compile_module(forward, {})
    compiled(torch.ones(ROWS, 4))
    with pytest.raises(RetraceError, match=r"dynamic_dims names no dimension") as caught:
        compiled(torch.ones(rows, 4))
    assert caught.value.input == "x" and f"sizes=[{ROWS}]" in str(caught.value)


def test_a_second_captured_size_is_refused_by_name(tmp_path):
    _, runner = compiled_and_runner(tmp_path, "eager", "FULL", [2, ROWS])
    with runner, pytest.raises(RetraceError, match="another size in dimension 0"):
        runner.capture()


def constant(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == torch.ones(ROWS).view(x.shape[0]).numel() else x


@pytest.mark.parametrize(
    ("forward", "advice"), [(Cached(), "write dynamic_dims={}"), (constant, "{} for none")]
)
def test_the_advice_to_write_empty_dynamic_dims_works(forward, advice):
    x = torch.ones(ROWS, 4)
    with pytest.raises(TraceError) as caught:
        compile_module(forward, ["x"], in_place=False)(x)
    assert advice in str(caught.value)
    assert torch.equal(compile_module(forward, {}, in_place=False)(x), forward(x))


def test_compile_sizes_without_a_batch_dimension_are_refused():
    with pytest.raises(CompileSizeError, match="one alone") as caught:
        compile_module(Cached(), {}, options=CompileOptions(compile_sizes=(2, 6)))
    assert caught.value.size == 2


def test_dynamic_dims_that_no_tensor_argument_has_are_refused():
    def forward(x: torch.Tensor | None, y: float) -> float:
        return y

    with pytest.raises(CompileError, match="no argument of the call has a batch dimension"):
        compile_module(forward, ["x"])(None, 2.0)
