"""Pieces through Inductor: near eager, captured like others, kept over starts. Few: it is slow."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from test_compile_runner import small_runner
from torch import nn

import graphrt
from graphrt import Batch, GraphMode, GraphOptions, GraphPool, GraphRunner, InputSpec, Reason
from graphrt.compile import CompileError, CompileOptions, compile_module
from graphrt.compile.backend import inductor
from graphrt.compile.backend.choice import backend_for
from graphrt.compile.backend.inductor import size_conditions
from tests.draws import rest_long
from tests.models.llama import Llama, step_inputs

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


@graphrt.opaque("tests_inductor::halved", mutates=["out"])
def halved(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 0.5, out=out)


def options(tmp_path: Any, **more: Any) -> CompileOptions:
    keywords: dict[str, Any] = {"backend": "inductor", "cache_dir": str(tmp_path / "kept"), **more}
    return CompileOptions(**keywords)


def symbolic(size: int) -> tuple[torch.Tensor, torch.SymInt]:
    """A tensor without memory whose number of rows is a symbol, and that number."""
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.ones(size, 8), symbolic_context=context)
    return fake, fake.shape[0]


@needs_compiler
def test_code_compiled_by_inductor_gives_eager_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.manual_seed(0)
    model = Llama(layers=1)
    original = copy.deepcopy(model)
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool, options=options(tmp_path))
    with small_runner(model, pool) as runner:
        runner.capture()
        assert compiled.figures.backend == "inductor"
        # Two pieces, and the whole graph.
        assert (compiled.figures.compilations, compiled.figures.loads) == (3, 0)
        for step, size in enumerate((1, 2, 3, 8, 11)):
            inputs = step_inputs(size, step=step)
            with torch.no_grad():
                eager = original(**inputs)
            for batch in (Batch(size, size, 1), Batch(size, size)):
                output = runner.verify(batch, **inputs)
                torch.testing.assert_close(output, eager, rtol=1e-4, atol=1e-5)
        assert runner.last_dispatch.mode is GraphMode.NONE

    for name in ("computation_graph.py", "transformed_code.py", "whole_graph.py", "whole_code.py"):
        assert list((tmp_path / "kept").rglob(name))

    again = compile_module(copy.deepcopy(original), options=options(tmp_path))
    again.ensure_compiled(**step_inputs(4))
    assert (again.figures.compilations, again.figures.loads) == (0, 2)
    torch.testing.assert_close(
        again(**step_inputs(5)), original(**step_inputs(5)), rtol=1e-4, atol=1e-5
    )


@needs_compiler
def test_memory_that_compiled_code_makes_may_be_elsewhere_in_each_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("halves", torch.empty(4, 8))

        def forward(self, x):
            # Kernels fill the linears' inputs, linears memory of the code's own; and an operator
            # reads what is a result too. Watches see operators only beside one that splits, and
            # writes state.
            hidden = self.first(x.sin()).cos()
            halved(x, self.halves)
            return hidden, self.second(hidden) + self.halves

    model, pool = graphrt.support_compile(dynamic_dims={})(Model)().eval(), GraphPool("cpu")
    compile_module(model, pool=pool, options=options(tmp_path))
    runner = GraphRunner(
        model,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        pool=pool,
        options=GraphOptions(check="always"),
    )
    runner.capture()
    kept = []
    for count in range(6):
        runner(Batch(4, 4, 4), x=torch.randn(4, 8))
        assert runner.last_dispatch.reason is Reason.HIT
        kept += [torch.empty(4, 8) for _ in range(count)]
    # No argument of any operator differs between two steps: such a one would hide later changes.
    tried = runner.graphs.checks.graph_to_try(runner.last_dispatch)
    assert tried.varying == frozenset()
    # Nor is it a weight that nothing leads to, though a result keeps it alive.
    runner.weights_changed()


@needs_compiler
def test_a_counter_of_the_host_is_no_change_for_code_that_writes_rows(tmp_path, monkeypatch):
    """Warm-ups read such rows to tell which these are, and no graph does."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(9, 8))
            self.steps = 0

        def forward(self, x, rows):
            self.cache[rows] = x * 2
            return self.cache[rows] + x

    model, pool = Model().eval(), GraphPool("cpu")
    compile_module(model, ["x", "rows"], pool=pool, options=options(tmp_path))
    inputs = {
        "x": InputSpec(torch.float32, ("tokens", 8)),
        "rows": InputSpec(torch.int64, ("tokens",), index=True, pad=8),
    }
    runner = GraphRunner(
        model, mode="FULL", sizes=[2, 4], inputs=inputs, outputs=("tokens", 8), pool=pool
    )
    runner.capture()
    for count in (2, 4, 3):
        model.steps += 1
        x = torch.randn(count, 8)
        assert torch.equal(runner(x=x, rows=torch.randperm(8)[:count]), x * 2 + x)
        assert runner.last_dispatch.reason is Reason.HIT


@needs_compiler
def test_a_compile_size_gets_inductor_code_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def forward(x):
        return (x.view(x.shape[0] * 2, 2) * 3).relu()

    compile_options = options(tmp_path, compile_sizes=(4,), autotune=False)
    compiled = compile_module(forward, ["x"], options=compile_options)
    compiled.use_capture_sizes([2, 4])
    for size in (4, 2, 1):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), forward(x))
    assert (compiled.figures.compilations, compiled.figures.static_compilations) == (2, 1)


def test_a_device_without_inductor_gets_eager_pieces_with_a_reason():
    backend, reason = backend_for("inductor", "meta")
    assert backend.name == "eager"
    assert "'meta'" in reason


@needs_compiler
def test_an_input_copied_into_another_before_being_written_keeps_eager_results(tmp_path, caplog):
    def forward(x, y):
        x.copy_(y)
        y.neg_()
        return y + 1

    compiled = compile_module(forward, ["x", "y"], options=options(tmp_path))
    actual, expected = ([torch.arange(8.0).view(2, 4), torch.ones(2, 4)] for _ in "ab")
    assert torch.equal(compiled(*actual), forward(*expected))
    assert all(map(torch.equal, actual, expected))
    assert "runs uncompiled" in caplog.text


@needs_compiler
def test_a_number_read_from_a_tensor_in_a_piece_is_passed_to_later_pieces(tmp_path, caplog):
    def forward(x, scale):
        by, whole = scale.item(), scale.long().item()
        out = torch.empty_like(x)
        halved(x, out)
        return out * by + whole, by

    compiled = compile_module(forward, ["x"], options=options(tmp_path))
    for value in (2.5, 3.0):
        tensors = torch.randn(3, 4), torch.tensor(value)
        output, number = compiled(*tensors)
        expected, _ = forward(*tensors)
        torch.testing.assert_close(output, expected)
        assert number == value
    assert "piece_0 passes on numbers of tensors: it runs uncompiled" in caplog.text


@needs_compiler
@pytest.mark.parametrize("made", [pytest.param("contiguous", marks=pytest.mark.long), "strided"])
def test_writes_to_views_of_an_argument_are_right_at_other_sizes(tmp_path, made):
    def forward(x, y):
        y.select(1, 3).mul_(0.5)
        y.unflatten(1, (2, 2)).select(2, -1).add_(1)
        y.chunk(2, 1)[0].add_(1)
        y.split([1, 3], 1)[1].select(1, 1).mul_(2)
        y.narrow(1, 1, 2)[:, ::2].neg_()
        return (x,)

    def arguments(size: int) -> list[torch.Tensor]:
        values = torch.randn(size, 8)
        y = values[:, :4].clone() if made == "contiguous" else values[:, ::2]
        return [torch.randn(size, 4), y]

    compiled = compile_module(forward, ["x", "y"], options=options(tmp_path))
    compiled.ensure_compiled(*arguments(4))
    for size in (5, 2, 7):
        actual = arguments(size)
        expected = [each.clone() for each in actual]
        compiled(*actual)
        forward(*expected)
        torch.testing.assert_close(actual, expected)


def test_size_conditions_assumed_by_a_compiler_are_found():
    (fake, rows) = symbolic(4)
    with size_conditions([fake]) as conditions:
        assert rows >= 2 and rows < 100 and rows * 2 != 1
    assert [str(each).partition(" ")[2] for each in conditions] == ["< 100"]
    with size_conditions([fake]) as later:
        assert rows < 200
    assert later == conditions, "what is decided once is known to the next piece"


def test_a_size_that_a_compiler_takes_for_a_constant_is_refused_by_name():
    (fake, rows) = symbolic(4)
    with (
        pytest.raises(CompileError, match="takes a batch size for another one, or for a constant"),
        size_conditions([fake]),
    ):
        assert rows == 4


@needs_compiler
@pytest.mark.parametrize("started", [pytest.param("cold", marks=pytest.mark.long), "warm"])
def test_sizes_outside_the_conditions_of_the_code_run_uncompiled(
    tmp_path, caplog, monkeypatch, started
):
    def decides(graph, inputs, **more):
        """As Inductor does for indices of 16 or 32 bits: by the example's size."""
        (tensor,) = (each for each in inputs if isinstance(each, torch.Tensor))
        assert tensor.shape[0] < 100
        return compile_it(graph, inputs, **more)

    compile_it = inductor.inductor_compile
    monkeypatch.setattr(inductor, "inductor_compile", decides)

    def forward(x):
        return x * 2 + 1

    compiled = compile_module(forward, ["x"], options=options(tmp_path))
    compiled.ensure_compiled(torch.ones(8))
    if started == "warm":
        compiled = compile_module(forward, ["x"], options=options(tmp_path))
        compiled.ensure_compiled(torch.ones(8))
        assert (compiled.figures.compilations, compiled.figures.loads) == (0, 1)
    for size, told in ((9, False), (400, True), (400, False), (99, False), (100, False)):
        x = torch.rand(size)
        caplog.clear()
        torch.testing.assert_close(compiled(x), forward(x))
        said = "runs uncompiled at sizes of tokens = 400: its code is for tokens < 100"
        assert (said in caplog.text) is told


@needs_compiler
def test_a_sum_over_more_rows_than_inductors_code_is_for_runs_uncompiled(tmp_path, caplog):
    def forward(x):
        return x.sum(0), x.softmax(0), x.sum()

    compiled = compile_module(forward, ["x"], options=options(tmp_path))
    compiled.ensure_compiled(torch.ones(8, 4))
    for size in (2, 1000, 40_000):
        x = torch.rand(size, 4)
        for got, expected in zip(compiled(x), forward(x.double()), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-9)
        assert ("runs uncompiled" in caplog.text) is (size > 1000)


def writes_elements_of_unbind(x: torch.Tensor) -> torch.Tensor:
    x.unbind(1)[3].mul_(0.5)
    return x * 2


@needs_compiler
@pytest.mark.parametrize(
    ("forward", "name"),
    [(writes_elements_of_unbind, "x"), (torch.nn.BatchNorm1d(8).train(), "input")],
    ids=["unbind", "batch norm that trains"],
)
def test_what_inductor_cannot_compile_for_all_sizes_is_named(tmp_path, forward, name):
    """torch 2.13 takes the batch size of one for a constant, and has no symbol for that of the
    other."""
    compiled = compile_module(forward, [name], options=options(tmp_path), in_place=False)
    with pytest.raises(CompileError, match=r"for a constant|cannot compile piece"):
        compiled.ensure_compiled(torch.randn(4, 8))


def last_rows(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return x[starts[1:] - 1]


@needs_compiler
@pytest.mark.parametrize("first", rest_long([2, 3, 5, 7, 13], 3))
def test_gathering_last_rows_is_right_whatever_the_rows_of_the_first_call(first, tmp_path):
    dims = {"x": {0: "tokens"}, "starts": {0: "reqs"}}
    compiled = compile_module(last_rows, dims, options=options(tmp_path))
    for rows in (first, 2, 3, 9):
        x, starts = torch.randn(rows, 4), torch.arange(rows) + 1
        assert torch.equal(compiled(x, starts), last_rows(x, starts))


# test_unknown_sizes.py has such refusals without Inductor.
@pytest.mark.long
@needs_compiler
def test_a_refused_first_call_of_two_rows_advises_ensure_compiled(tmp_path):
    def between(x: torch.Tensor) -> torch.Tensor:
        return x[1:] - x[:-1]

    x = torch.randn(2, 4)
    with pytest.raises(CompileError, match="ensure_compiled"):
        compile_module(between, ["x"], options=options(tmp_path))(x)
    compiled = compile_module(between, ["x"], options=options(tmp_path))
    compiled.ensure_compiled(torch.randn(4, 4))
    assert torch.equal(compiled(x), between(x))
