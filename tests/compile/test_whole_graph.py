"""FULL graphs run the whole forward as one compilation, PIECEWISE ones its pieces; every run that
stands for a graph runs the code that the graph has captured."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, Reason
from graphrt.compile import (
    CompiledModule,
    CompileError,
    CompileOptions,
    compile_module,
    opaque,
)
from graphrt.compile.pieces.assembly import Code
from graphrt.errors import GraphQuarantinedWarning
from tests.models.llama import Llama, llama_runner, step_inputs

FULL = GraphMode.FULL
X = {"x": InputSpec(torch.float32, ("tokens", 4))}


@opaque("graphrt_whole::softened", mutates=["out"])
def softened(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(x, -1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        out = torch.empty_like(y)
        softened(y, out)
        return self.second(out)


def runner_of(compiled: Any, mode: str, **more: Any) -> GraphRunner:
    more = {"sizes": [1, 4, 8], "outputs": ("tokens", 4), **more}
    return GraphRunner(compiled, mode=mode, inputs=X, **more)


@contextmanager
def runs_noted(compiled: CompiledModule) -> Iterator[list[str]]:
    """The code of each call: "whole" or "pieces"."""
    runs: list[str] = []
    built = compiled._built
    assert built is not None
    named = {name: getattr(built, name) for name in ("whole", "in_pieces")}

    def noting(code: Code, name: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            runs.append(name)
            return code.run(*args, **kwargs)

        return noted

    for name, code in named.items():
        if code is not None:
            setattr(built, name, replace(code, run=noting(code, name)))
    yield runs
    for name, code in named.items():
        setattr(built, name, code)


@pytest.fixture(params=[True, False], ids=["pool", "no pool"])
def pool(request: Any) -> GraphPool | None:
    return GraphPool("cpu") if request.param else None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("mode", "whole", "pieces"),
    [("FULL", 1, 0), ("PIECEWISE", 0, 2), ("FULL_AND_PIECEWISE", 1, 2), ("FULL_DECODE_ONLY", 1, 0)],
)
def test_a_plan_compiles_the_code_of_its_modes_alone(pool, tmp_path, backend, mode, whole, pieces):
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(model, ["x"], pool=pool, options=options, in_place=False)
    with runner_of(compiled, mode, pool=pool) as runner:
        runner.capture()
        figures = compiled.figures
        assert (figures.traces, figures.pieces) == (1, pieces)
        assert figures.compilations == whole + pieces
        assert bool(figures.whole_s) is bool(whole) and not figures.full_reason
        for tokens, query_len in ((3, 1), (8, 1), (5, None), (9, None)):
            x = torch.randn(tokens, 4)
            found = runner.verify(Batch(tokens, tokens, query_len), x=x)
            torch.testing.assert_close(found, reference(x))


def test_every_run_for_a_full_graph_runs_the_code_that_it_has_captured():
    pool = GraphPool("cpu")
    compiled = compile_module(Model(), ["x"], pool=pool, in_place=False)
    compiled._modes |= {GraphMode.FULL, GraphMode.PIECEWISE}
    compiled(torch.randn(8, 4))
    with (
        runs_noted(compiled) as runs,
        runner_of(compiled, "FULL_AND_PIECEWISE", pool=pool) as runner,
    ):
        modes = [mode for mode, _ in runner.plan.keys]
        sessions: list[list[str]] = []
        for _ in modes:
            runner.capture_next()
            sessions.append(runs.copy())
            runs.clear()
        # A warm-up and a capture each; the first also probes outputs, and the last tries all.
        wanted = ["whole" if mode is FULL else "in_pieces" for mode in modes]
        assert [each[0] for each in sessions] == wanted
        assert [set(each) for each in sessions[1:-1]] == [{each} for each in wanted[1:-1]]
        assert wanted[0] == "in_pieces" and sessions[0][-1] == "whole"
        # A trial: eager runs on padded rows, on other padding, and on the live rows alone.
        runner.verify(Batch(3, 3, 1), x=torch.randn(3, 4))
        assert len(runs) >= 3 and set(runs) == {"whole"}
        runs.clear()
        runner.verify(Batch(3, 3), x=torch.randn(3, 4))
        assert len(runs) >= 3 and set(runs) == {"in_pieces"}
        runs.clear()
        # No graph: pieces, as there are some.
        runner(Batch(11, 11), x=torch.randn(11, 4))
        assert runner.last_dispatch.reason is Reason.TOO_LARGE and runs == ["in_pieces"]
        runs.clear()
        batch = Batch(3, 3, 1)
        dispatch = runner.dispatcher.dispatch(batch)
        runner.run_padded_eagerly(batch, dispatch, {"x": torch.randn(3, 4)})
        assert runs == ["whole"]


def test_a_step_in_quarantine_runs_the_code_of_its_graph(monkeypatch):
    pool = GraphPool("cpu")
    compiled = compile_module(Model(), ["x"], pool=pool, in_place=False)
    runner = runner_of(compiled, "FULL_AND_PIECEWISE", pool=pool)
    with runner:
        runner.capture()
        slot = runner.dispatcher.dispatch(Batch(4, 4, 1)).slot
        entry = runner.graphs.steps[slot].entry
        for name in ("first", "second"):
            with torch.no_grad():
                getattr(compiled.module, name).weight.add_(1)
        graph = entry.graph
        replay = graph.replay
        monkeypatch.setattr(type(graph), "replay", lambda self: None if self is graph else replay())
        with pytest.warns(GraphQuarantinedWarning):
            runner(Batch(4, 4, 1), x=torch.randn(4, 4))
        with runs_noted(compiled) as runs:
            x = torch.randn(4, 4)
            found = runner(Batch(4, 4, 1), x=x)
            assert runner.last_dispatch.reason is Reason.QUARANTINED
            assert runs == ["whole"]
            assert torch.equal(found, compiled.module(x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_misses_of_a_full_plan_run_the_whole_graph(tmp_path, backend):
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(Model(), ["x"], options=options, in_place=False)
    with runner_of(compiled, "FULL", sizes=[4]) as runner:
        runner.capture()
        with runs_noted(compiled) as runs:
            runner(Batch(6, 6), x=torch.randn(6, 4))
            assert runs == ["whole"]


def test_a_module_that_was_called_before_its_runner_was_made_gets_what_the_plan_needs():
    pool = GraphPool("cpu")
    compiled = compile_module(Model(), ["x"], pool=pool, in_place=False)
    x = torch.randn(8, 4)
    expected = compiled(x)
    assert compiled.figures.pieces == 2 and compiled.compiled
    with runner_of(compiled, "FULL", pool=pool) as runner:
        assert not compiled.compiled
        runner.capture()
        assert compiled.compiled and compiled.figures.compilations == 3
        assert torch.equal(runner(Batch(8, 8, 1), x=x), expected)


def test_two_runners_of_one_module_each_have_the_code_of_their_plans():
    pool = GraphPool("cpu")
    compiled = compile_module(Model(), ["x"], pool=pool, in_place=False)
    x = torch.randn(4, 4)
    with runner_of(compiled, "PIECEWISE", pool=pool, sizes=[4]) as first:
        first.capture()
        with runner_of(compiled, "FULL", pool=pool, sizes=[4]) as second:
            # The second is not captured: the first serves on, and compiles nothing.
            assert torch.equal(first(Batch(4, 4), x=x), compiled.module(x))
            first(Batch(9, 9), x=torch.randn(9, 4))
            assert compiled.figures.compilations == 2
            second.capture()
            assert compiled.figures.compilations == 3
            assert torch.equal(second(Batch(4, 4, 1), x=x), compiled.module(x))
            assert torch.equal(first(Batch(4, 4), x=x), compiled.module(x))
            assert first.last_dispatch.reason is Reason.HIT


def test_replaced_weights_reach_the_code_of_both_modes_and_are_not_kept():
    pool = GraphPool("cpu")
    compiled = compile_module(Model(), ["x"], pool=pool, in_place=False)
    model, x = compiled.module, torch.randn(4, 4)
    with runner_of(compiled, "FULL_AND_PIECEWISE", pool=pool, sizes=[4]) as runner:
        runner.capture()
        model.first.weight = nn.Parameter(torch.randn(4, 4))
        runner.recapture()
        for query_len in (1, None):
            found = runner.verify(Batch(4, 4, query_len), x=x)
            assert torch.equal(found, model(x))


@opaque("graphrt_whole::counted", mutates=[])
def counted(x: torch.Tensor) -> None:
    counts.append(x.shape[0])


counts: list[int] = []


class Counting(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted(x)
        return self.second(super().forward(x))


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_full_graphs_run_pieces_where_inductor_would_lose_an_operator(tmp_path, mode, caplog):
    pool = GraphPool("cpu")
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(Counting(), ["x"], pool=pool, options=options, in_place=False)
    with (
        caplog.at_level(logging.WARNING),
        runner_of(compiled, mode, pool=pool, sizes=[4]) as runner,
    ):
        runner.capture()
        reason = compiled.figures.full_reason
        assert reason == "Inductor leaves graphrt_whole::counted out of the whole graph"
        assert "FULL graphs of Counting run the code of its pieces" in caplog.text
        counts.clear()
        runner.verify(Batch(3, 3, 1), x=torch.randn(3, 4))
        assert counts


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_the_option_full_has_full_graphs_run_the_code_of_pieces(mode):
    pool = GraphPool("cpu")
    options = CompileOptions(full="pieces")
    compiled = compile_module(Model(), ["x"], pool=pool, options=options, in_place=False)
    with runner_of(compiled, mode, pool=pool) as runner:
        runner.capture()
        assert compiled.figures.compilations == 2 and not compiled.figures.whole_s
        runner.verify(Batch(3, 3, 1), x=torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_a_warm_start_loads_the_whole_graph_and_the_pieces(tmp_path, mode):
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    found = []
    for start in ("cold", "warm"):
        torch.manual_seed(0)
        pool = GraphPool("cpu")
        compiled = compile_module(Model(), ["x"], pool=pool, options=options, in_place=False)
        with runner_of(compiled, mode, pool=pool, sizes=[4]) as runner:
            runner.capture()
            found.append(runner(Batch(4, 4, 1), x=torch.ones(4, 4)).clone())
            count = 1 if mode == "FULL" else 3
            counts = (compiled.figures.compilations, compiled.figures.loads)
            assert counts == ((count, 0) if start == "cold" else (0, count))
    assert torch.equal(*found)


@pytest.mark.parametrize("pieces", [True, False])
def test_inductors_whole_graph_is_right_for_a_paged_llama(tmp_path, pieces):
    """Its attention writes the cache, which warm-ups put back."""
    torch.manual_seed(0)
    model = Llama(layers=2)
    original = copy.deepcopy(model)
    pool = GraphPool("cpu")
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(model, pool=pool, options=options)
    mode = "FULL_AND_PIECEWISE" if pieces else "FULL"
    with llama_runner(model, pool, mode=mode, sizes=[1, 8]) as runner:
        runner.capture()
        assert not compiled.figures.full_reason
        assert not any(layer.keys.any() for layer in model.layers)
        for tokens in (1, 3, 8):
            inputs = step_inputs(tokens)
            found = runner.verify(Batch(tokens, tokens, 1), **inputs)
            assert runner.last_dispatch.mode is GraphMode.FULL
            torch.testing.assert_close(found, original(**inputs), rtol=1e-4, atol=1e-4)


@opaque("graphrt_whole::sorted", mutates=[], fake=torch.empty_like)
def sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sort(-1).values


class Region(nn.Module):
    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.linear, self.splits = nn.Linear(4, 4), splits
        self.cache: torch.Tensor
        self.register_buffer("cache", torch.zeros(9, 4))

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.cache.index_copy_(0, rows, y)
        return x + (sorted_rows(y) if self.splits else torch.softmax(y, -1))


class Regions(nn.Module):
    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Region(splits=splits) for _ in range(3))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rows)
        return x


def regions_runner(model: nn.Module, mode: str, **more: Any) -> GraphRunner:
    inputs = {**X, "rows": InputSpec(torch.int64, ("tokens",), pad=8, index=True)}
    return GraphRunner(
        model, mode=mode, sizes=[1, 4, 8], inputs=inputs, outputs=("tokens", 4), **more
    )


@pytest.mark.parametrize("splits", [True, False])
def test_a_model_of_nested_regions_is_captured_in_full(tmp_path, splits):
    torch.manual_seed(0)
    model = Regions(splits=splits).requires_grad_(False)
    reference = copy.deepcopy(model)
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compile_module(model, ["x", "rows"], options=options)
    with regions_runner(model, "FULL") as runner:
        runner.capture()
        for tokens in (3, 8, 1):
            x, rows = torch.randn(tokens, 4), torch.arange(tokens)
            found = runner.verify(Batch(tokens, tokens), x=x, rows=rows)
            torch.testing.assert_close(found, reference(x, rows))
        for layer, other in zip(model.layers, reference.layers, strict=True):
            torch.testing.assert_close(layer.cache[:8], other.cache[:8])


def test_a_splitting_operator_in_a_region_is_refused_in_pieces():
    model = Regions(splits=True).requires_grad_(False)
    compile_module(model, ["x", "rows"])
    with (
        regions_runner(model, "FULL_AND_PIECEWISE") as runner,
        pytest.raises(CompileError, match="in a region"),
    ):
        runner.capture()


@pytest.mark.parametrize(
    ("options", "mode", "line"),
    [
        ({}, "FULL_AND_PIECEWISE", "the whole graph for FULL, pieces for PIECEWISE (full='whole')"),
        ({}, "PIECEWISE", "pieces for PIECEWISE"),
        ({"full": "pieces"}, "FULL", "pieces for FULL (full='pieces')"),
        ({}, "NONE", "the whole graph"),
    ],
)
def test_a_plan_prints_which_code_its_graphs_run(options, mode, line):
    compiled = compile_module(
        Model(), ["x"], pool=GraphPool("cpu"), options=CompileOptions(**options), in_place=False
    )
    with runner_of(compiled, mode) as runner:
        assert str(runner.plan).splitlines()[-1] == f"Compiled Model: {line}"


def test_sizes_have_code_of_their_own_in_the_modes_that_have_graphs_of_them():
    pool = GraphPool("cpu")
    options = CompileOptions(compile_sizes=("capture_sizes",))
    compiled = compile_module(Model(), ["x"], pool=pool, options=options, in_place=False)
    # Decode batches have two tokens a request; mixed ones have each size.
    sizes = {"sizes": [2, 4, 6], "query_lens": [2], "max_num_reqs": 2}
    with runner_of(compiled, "FULL_AND_PIECEWISE", pool=pool, **sizes) as runner:
        modes = [mode for mode, _ in runner.plan.keys]
        assert (modes.count(GraphMode.FULL), modes.count(GraphMode.PIECEWISE)) == (2, 3)
        runner.capture()
        assert compiled.figures.static_compilations == 2 * 1 + 3 * 2


order: list[str] = []


@opaque("graphrt_whole::filled", mutates=["out"])
def filled(x: torch.Tensor, out: torch.Tensor) -> None:
    order.append("filled")
    out.copy_(x)


@opaque("graphrt_whole::read", mutates=[], fake=torch.empty_like)
def read(x: torch.Tensor) -> torch.Tensor:
    order.append("read")
    return x.clone()


def interleaved(x: torch.Tensor) -> torch.Tensor:
    ones = x.new_ones(4, 4)
    first, second, third = (torch.empty_like(x) for _ in range(3))
    filled(x @ ones, first)
    filled(first + 1, second)
    a = read((x - 2) @ ones)
    filled(a, third)
    b = read(first.relu())
    return first + third.sin() + a.sin() + second.sin() + b


def backwards(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    a = read(x @ x.new_ones(4, 4))
    filled(x.relu(), out)
    b = read(x + 1)
    c = read(x.sin())
    return c + b.sin() + out.sin() + a.sin()


@pytest.mark.parametrize("forward", [interleaved, backwards])
def test_opaque_operators_keep_their_order_in_inductors_whole_graph(tmp_path, forward):
    """They may share state that is no argument, such as a cache."""
    order.clear()
    x = torch.randn(4, 4)
    expected = forward(x)
    wanted = order.copy()
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(forward, ["x"], options=options)
    with runner_of(compiled, "FULL", sizes=[4]) as runner:
        runner.capture()
        assert not compiled.figures.full_reason
        order.clear()
        torch.testing.assert_close(runner(x=x), expected)
        runner(x=x)
        assert order[-len(wanted) :] == wanted


@opaque("graphrt_whole::bumped", mutates=["x"])
def bumped(x: torch.Tensor) -> None:
    x.mul_(0.5).add_(0.25)


def read_then_written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    filled(x, out)
    before = out * 0.5 + 1
    bumped(out)
    return torch.stack([before.sum(-1), out.sum(-1)], -1).repeat(1, 2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_memory_that_is_written_after_it_was_read_is_right_in_full(tmp_path, backend):
    """Inductor's whole graph would compute `before` from what `bumped` has written."""
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(read_then_written, ["x"], options=options)
    with runner_of(compiled, "FULL", sizes=[4]) as runner:
        runner.capture()
        assert ("has read before" in compiled.figures.full_reason) is (backend == "inductor")
        x = torch.randn(4, 4)
        torch.testing.assert_close(runner(x=x), read_then_written(x))
