"""Compiled pieces as CUDA graphs: FULL and PIECEWISE of the same pieces, equal to eager calls."""

from __future__ import annotations

import copy

import pytest
import torch
from test_compile_runner import llama_runner
from test_whole_graph import Regions, backwards, interleaved, order, regions_runner, runner_of
from torch._dynamo.utils import counters

from graphrt import Batch, GraphMode, GraphOptions, GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompileOptions, compile_module, opaque
from graphrt.core.base.errors import RowsMixedError
from graphrt.core.batch.modes import PieceProvider
from tests.models.llama import Llama, check_both_modes, step_inputs

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def fresh_inductor_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_full_and_piecewise_graphs_share_one_trace_on_a_gpu(tmp_path, backend):
    torch.manual_seed(0)
    model = Llama(layers=3).cuda()
    original = copy.deepcopy(model)
    pool = GraphPool("cuda")
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(model, pool=pool, options=options)
    with llama_runner(model, pool) as runner:
        runner.capture()
        assert compiled.figures.backend == backend
        # Three pieces that differ, and the whole graph.
        assert (compiled.figures.traces, compiled.figures.compilations) == (1, 4)
        assert len(compiled.wrappers) == 4
        before = copy.deepcopy(counters)
        check_both_modes(runner, original, exact=False)
        assert counters == before


def test_a_thousand_batches_after_capture_cause_no_compilation_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = Llama(layers=2).cuda()
    pool = GraphPool("cuda")
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(model, pool=pool, options=options)
    with llama_runner(model, pool) as runner:
        runner.capture()
        entries = sum(len(wrapper.entries) for wrapper in compiled.wrappers)
        compilations, before = compiled.figures.compilations, copy.deepcopy(counters)
        sizes = torch.randint(1, 16, (998,), generator=torch.Generator().manual_seed(0)).tolist()
        for place, size in enumerate([1, 2, *sizes]):
            query_len = 1 if place % 2 else None
            inputs = {name: each.cuda() for name, each in step_inputs(size).items()}
            runner(Batch(size, size, query_len), **inputs)
        assert compiled.figures.compilations == compilations
        assert sum(len(wrapper.entries) for wrapper in compiled.wrappers) == entries
        assert counters == before


def partitioned(**more):
    return CompileOptions(backend="inductor", use_inductor_graph_partition=True, **more)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_partitions_made_by_inductor_are_captured_as_graphs(tmp_path, start):
    torch.manual_seed(0)
    model = Llama(layers=3).cuda()
    original = copy.deepcopy(model)
    if start == "warm":
        options = partitioned(cache_dir=str(tmp_path))
        first = compile_module(copy.deepcopy(model), options=options)
        first.ensure_compiled(**{n: x.cuda() for n, x in step_inputs(4).items()})
        assert first.figures.compilations == 1
    pool = GraphPool("cuda")
    compiled = compile_module(model, pool=pool, options=partitioned(cache_dir=str(tmp_path)))
    assert compiled.provides is PieceProvider.INDUCTOR
    with llama_runner(model, pool, pieces="auto") as runner:
        runner.capture()
        assert runner.mode is GraphMode.FULL_AND_PIECEWISE
        assert compiled.figures.compilations == (start == "cold")
        assert compiled.figures.loads == (start == "warm")
        assert compiled.figures.partitions == len(compiled.wrappers) == 4
        assert all(len(wrapper.entries) == 4 for wrapper in compiled.wrappers)
        check_both_modes(runner, original, exact=False)


@opaque("graphrt_tests::tripled", mutates=[], fake=torch.empty_like)
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Tripling(torch.nn.Module):
    """What the operator returns lies somewhere else in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = tripled(self.linear(x).relu())
        z = self.linear(y.add_(1)).relu()
        return tripled(z + y) + z


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_outputs_of_a_splitting_operator_reach_the_next_partition(tmp_path, outputs):
    torch.manual_seed(0)
    model = Tripling().cuda()
    pool = GraphPool("cuda")
    compiled = compile_module(
        model,
        ["x"],
        pool=pool,
        options=partitioned(cache_dir=str(tmp_path)),
        in_place=False,
    )
    compiled.use_wrapper_options(GraphOptions(outputs=outputs))
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    with GraphRunner(compiled, inputs=inputs, mode="PIECEWISE", sizes=[2, 4], pool=pool) as runner:
        runner.capture()
        kept = []
        for size in (4, 2, 4, 3):
            x = torch.randn(size, 4, device="cuda")
            # Whatever is allocated here moves what the operator returns.
            kept.append(torch.empty(1024 * size, device="cuda"))
            output = runner.verify(Batch(size, size), x=x)
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            with torch.no_grad():
                torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-4)


def test_a_forward_without_splitting_operators_is_a_single_full_graph_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = Llama(layers=2).cuda()
    pool = GraphPool("cuda")
    options = CompileOptions(backend="inductor", splitting_ops=[], cache_dir=str(tmp_path))
    compile_module(model, pool=pool, options=options)
    with llama_runner(model, pool, pieces="auto") as runner:
        runner.capture()
        assert runner.mode is GraphMode.FULL
        for size in (1, 3, 8):
            runner.verify(Batch(size, size), **step_inputs(size))
            assert runner.last_dispatch.mode is GraphMode.FULL


def test_compiled_pieces_are_segments_of_a_breakable_capture_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = Llama(layers=2).cuda()
    original = copy.deepcopy(model)
    compile_module(model, options=CompileOptions(backend="inductor", cache_dir=str(tmp_path)))
    with llama_runner(model, GraphPool("cuda"), pieces="auto") as runner:
        runner.capture()
        for size in (1, 3, 8):
            inputs = {name: each.cuda() for name, each in step_inputs(size).items()}
            mixed = runner.verify(Batch(size, size), **inputs)
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            with torch.no_grad():
                torch.testing.assert_close(mixed, original(**inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forward", [interleaved, backwards])
def test_opaque_operators_keep_their_order_in_a_whole_graph_on_a_gpu(tmp_path, forward):
    x = torch.randn(5, 4, device="cuda")
    order.clear()
    expected = forward(x)
    wanted = order.copy()
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(forward, ["x"], options=options)
    with runner_of(compiled, "FULL", sizes=[4], platform="cuda") as runner:
        runner.capture()
        assert not compiled.figures.full_reason
        order.clear()
        # Larger than the graph: it runs the whole graph's code.
        torch.testing.assert_close(runner(x=x), expected)
        assert order == wanted
        torch.testing.assert_close(runner(x=x[:4]), expected[:4])
        assert runner.last_dispatch.mode is GraphMode.FULL


def test_a_model_of_nested_regions_is_captured_in_full_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = Regions(splits=False).requires_grad_(False).cuda()
    reference = copy.deepcopy(model)
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compile_module(model, ["x", "rows"], options=options)
    with regions_runner(model, "FULL", platform="cuda") as runner:
        runner.capture()
        for tokens in (3, 8, 1):
            x, rows = torch.randn(tokens, 4).cuda(), torch.arange(tokens).cuda()
            found = runner.verify(Batch(tokens, tokens), x=x, rows=rows)
            torch.testing.assert_close(found, reference(x, rows), rtol=1e-4, atol=1e-4)


def test_padding_on_a_live_row_is_named_in_inductors_code_on_a_gpu(tmp_path):
    device = "cuda"
    cache = torch.zeros(32, 4, device=device)

    def forward(x, slot):
        cache[slot] = x * 2
        return x + cache[slot]

    rows = InputSpec(torch.int64, ("tokens",), pad=-1, index=True)
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    runner = GraphRunner(
        compile_module(forward, ["x", "slot"], options=options),
        mode="FULL",
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4)), "slot": rows},
        options=GraphOptions(strict=True),
        platform=device,
    )
    with runner:
        runner.capture()
        runner(x=torch.ones(2, 4, device=device), slot=torch.tensor([31, 4], device=device))
        with pytest.raises(RowsMixedError, match=r"padding \(slot=-1\) writes row 31 of"):
            runner(x=torch.ones(3, 4, device=device), slot=torch.tensor([4, 5, 6], device=device))
