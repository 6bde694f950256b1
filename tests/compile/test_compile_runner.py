"""Compiled pieces as graphs: PIECEWISE, FULL around PIECEWISE, and one runner around it all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from graphrt import Batch, GraphMode, GraphOptions, GraphPool, GraphRunner, InputSpec, eager_break
from graphrt.compile import (
    CompileOptions,
    CompileSealedError,
    CompileSizeError,
    compile_module,
    opaque,
)
from graphrt.core.base.errors import (
    BreakError,
    GraphQuarantinedWarning,
    InvalidOptionError,
    OutputError,
    OverwrittenOutputError,
)
from graphrt.core.base.torch_names import can_mark_unreadable
from graphrt.core.batch.modes import AttentionSupport, PieceProvider
from graphrt.core.dispatch.reasons import Reason
from tests.draws import rest_long
from tests.models.llama import Llama, check_both_modes, llama_runner, step_inputs


@opaque("graphrt_tests::doubled", mutates=[], fake=torch.empty_like)
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(layers=2)


def small_runner(model: Any, pool: GraphPool, **more: Any) -> GraphRunner:
    """Of two sizes: each costs a capture and a trial of every piece."""
    return llama_runner(model, pool, **{"sizes": [1, 8], **more})


@pytest.mark.parametrize("platform", ["cpu"])
def test_full_and_piecewise_graphs_share_one_trace(model, platform):
    original = copy.deepcopy(model)
    pool = GraphPool(platform)
    compiled = compile_module(model, pool=pool)
    runner = small_runner(model, pool)
    runner.capture()
    # Three pieces, and the whole graph.
    assert (compiled.figures.traces, compiled.figures.compilations) == (1, 4)
    assert len(compiled.wrappers) == 3
    assert all(len(wrapper.entries) == 2 for wrapper in compiled.wrappers)
    before = copy.deepcopy(counters)
    check_both_modes(runner, original, exact=True)
    assert counters == before


def test_batches_after_capture_cause_no_compilation_or_capture(model):
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool)
    with small_runner(model, pool) as runner:
        runner.capture()
        before, figures = copy.deepcopy(counters), copy.copy(compiled.figures)
        entries = [dict(wrapper.entries) for wrapper in runner.graphs.owners()]
        generator = torch.Generator().manual_seed(0)
        sizes = [1, 2, *torch.randint(1, 12, (200,), generator=generator).tolist()]
        for size in sizes:
            batch = Batch(size, size, 1) if size % 2 else Batch(size, size)
            runner(batch, **step_inputs(size))
        assert counters == before and compiled.figures == figures
        assert [dict(wrapper.entries) for wrapper in runner.graphs.owners()] == entries


def test_capture_next_captures_graph_by_graph_and_compiles_only_at_the_first_call(model):
    original = copy.deepcopy(model)
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool)
    runner = small_runner(model, pool)
    left = runner.capture_next().left
    before = copy.deepcopy(counters)
    while left:
        for size in (1, 3, 8):
            inputs = step_inputs(size)
            expected = original(**inputs)
            assert torch.allclose(runner(Batch(size, size), **inputs), expected, atol=1e-5)
        left = runner.capture_next().left
    assert counters == before and compiled.figures.compilations == 4
    assert all(len(wrapper.entries) == 2 for wrapper in compiled.wrappers)
    check_both_modes(runner, original, exact=True)


@pytest.mark.parametrize("warmups", [0, 1])
def test_capture_compiles_the_module_and_seals_its_pieces(model, warmups):
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool)
    with small_runner(model, pool, sizes=[4], options=GraphOptions(warmups=warmups)) as runner:
        assert not compiled.compiled
        runner.capture()
        assert compiled.compiled and all(wrapper.sealed for wrapper in compiled.wrappers)


def test_a_sealed_runner_refuses_to_compile(model):
    pool = GraphPool("cpu")
    compile_module(model, pool=pool)
    with small_runner(model, pool) as runner:
        runner.seal()
        with pytest.raises(CompileSealedError):
            runner(Batch(2, 2), **step_inputs(2))
        runner.capture()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("compiled", marks=LONG),
        pytest.param("method", marks=LONG),
        "function",
        "parent",
    ],
)
def test_a_compiled_module_may_be_called_anywhere_in_a_forward(model, kind):
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool)
    parent = nn.ModuleList([model])

    def function(**inputs):
        return model(**inputs)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, **inputs):
            return self.inner(**inputs)

    forwards = {
        "compiled": compiled,
        "method": parent[0].__call__,
        "function": function,
        "parent": Parent(),
    }
    # What is a module has its parts in it; of a function they must be named.
    announced = [compiled] if kind in ("method", "function") else []
    with small_runner(forwards[kind], pool, sizes=[4], compiled=announced) as runner:
        runner.capture()
        assert compiled.compiled
        compiled.unseal()
        runner.seal()
        assert compiled._sealed


def test_a_compile_size_that_is_no_capture_size_is_refused(model):
    pool = GraphPool("cpu")
    compile_module(model, pool=pool, options=CompileOptions(compile_sizes=(3,)))
    with pytest.raises(CompileSizeError, match="compile size 3"):
        small_runner(model, pool)


def test_pieces_are_compiled_for_every_capture_size_if_asked(model):
    pool = GraphPool("cpu")
    compile_options = CompileOptions(compile_sizes=("capture_sizes",))
    compiled = compile_module(model, pool=pool, options=compile_options)
    with small_runner(model, pool) as runner:
        runner.capture()
        # Two sizes of three pieces, and of the whole graph.
        assert compiled.figures.static_compilations == 2 * 4
        runner.verify(Batch(3, 3), **step_inputs(3))


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(doubled(self.first(x)))


X = {"x": InputSpec(torch.float32, ("tokens", 4))}


def test_outputs_of_a_splitting_operator_stay_at_the_same_address():
    pool = GraphPool("cpu")
    model = Doubling()
    compile_module(model, ["x"], pool=pool)
    with GraphRunner(
        model, inputs=X, mode="PIECEWISE", sizes=[2, 4], pool=pool, pieces="fx"
    ) as runner:
        runner.capture()
        for size in (4, 1, 3, 2, 4):
            runner.verify(x=torch.randn(size, 4))
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE


def test_a_splitting_operator_that_changes_its_shape_is_an_error():
    rows = [None]

    @opaque("graphrt_tests::cut", mutates=[], fake=torch.empty_like)
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[: rows[0]] * 2

    pool = GraphPool("cpu")
    compiled = compile_module(lambda x: cut(x + 1) + 1, ["x"], pool=pool)
    with GraphRunner(
        compiled, inputs=X, mode="PIECEWISE", sizes=[4], pool=pool, pieces="fx"
    ) as runner:
        runner.capture()
        rows[0] = 2
        with pytest.raises((BreakError, OutputError)):
            runner(x=torch.randn(4, 4))


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_results_of_compiled_pieces_are_cloned_or_in_place_as_options_say(outputs):
    pool = GraphPool("cpu")
    compiled = compile_module(Doubling(), ["x"], pool=pool)
    compiled.use_wrapper_options(GraphOptions(outputs=outputs))
    with GraphRunner(
        compiled,
        inputs=X,
        mode="PIECEWISE",
        sizes=[2, 4],
        pool=pool,
        pieces="fx",
        options=GraphOptions(check="off"),  # what a tried step hands out is no graph's
    ) as runner:
        runner.capture()
        first = runner(x=torch.ones(4, 4))
        kept = first.clone()
        second = runner(x=-torch.ones(4, 4))
        assert not torch.equal(second, kept)
        held = [entry.outputs for entry in compiled.wrappers[-1].entries.values()]
        in_place = second.data_ptr() in {tensor.data_ptr() for tensor in held}
        assert in_place is (outputs != "clone" and can_mark_unreadable)
        if can_mark_unreadable:  # the runner itself was asked for no copies
            with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
                first.sum()
        else:
            assert torch.equal(first, kept)


SUPPORT = [
    (AttentionSupport.ALWAYS, GraphMode.FULL),
    (AttentionSupport.UNIFORM_BATCH, GraphMode.FULL_DECODE_ONLY),
    (AttentionSupport.NEVER, GraphMode.NONE),
]
PIECES = ["auto", "fx", "breakable", None]


@pytest.mark.parametrize(
    ("support", "mode", "pieces"),
    rest_long(
        [(*each, pieces) for each in SUPPORT for pieces in PIECES],
        *((*each, "auto") for each in SUPPORT),
        *((*SUPPORT[0], pieces) for pieces in PIECES),
    ),
)
def test_a_forward_without_splitting_operators_is_a_single_full_graph(support, mode, pieces):
    model, pool = Llama(layers=1), GraphPool("cpu")
    compiled = compile_module(model, pool=pool, options=CompileOptions(splitting_ops=[]))
    with small_runner(model, pool, sizes=[4], pieces=pieces, attention=support) as runner:
        runner.capture()
        assert compiled.figures.pieces == 1 and compiled.wrappers == ()
        assert runner.mode is mode
        if support is not AttentionSupport.NEVER:
            assert runner.plan.resolution.steps[-1].rule == "whole-graph"
        runner.verify(Batch(3, 3, 1), **step_inputs(3))
        assert runner.last_dispatch.mode is mode.decode_mode


def test_a_runner_captures_the_pieces_of_its_compiled_forward(model):
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool)
    with small_runner(model, pool, pieces="auto") as runner:
        runner.capture()
        assert runner.graphs.owners()[-1] in compiled.wrappers
        runner.verify(Batch(3, 3), **step_inputs(3))
        assert runner.last_dispatch.mode is GraphMode.PIECEWISE


def test_a_breakable_capture_around_pieces_with_a_pool_is_refused(model):
    pool = GraphPool("cpu")
    compile_module(model, pool=pool)
    with pytest.raises(InvalidOptionError, match="captures its own pieces"):
        small_runner(model, pool, pieces="breakable")


def test_compiled_pieces_without_a_pool_are_segments_of_a_breakable_capture(model):
    original = copy.deepcopy(model)
    compiled = compile_module(model)
    with small_runner(model, GraphPool("cpu"), pieces="auto") as runner:
        runner.capture()
        assert compiled.wrappers == () and compiled.figures.pieces == 3
        piecewise = next(w for w in runner.graphs.owners() if w.runtime_mode is GraphMode.PIECEWISE)
        assert {len(entry.parts) for entry in piecewise.entries.values()} == {3 + 2}
        for step, size in enumerate((3, 8, 1)):
            inputs = step_inputs(size, step=step)
            mixed = runner.verify(Batch(size, size), **inputs).clone()
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            assert torch.equal(mixed, runner(Batch(size, size, 1), **inputs))
            torch.testing.assert_close(mixed, original(**inputs))


def test_a_device_without_inductor_partitions_gets_fx_pieces_and_a_reason(tmp_path):
    model, pool = Llama(layers=1), GraphPool("cpu")
    compile_options = CompileOptions(
        backend="inductor", use_inductor_graph_partition=True, cache_dir=str(tmp_path)
    )
    compiled = compile_module(model, pool=pool, options=compile_options)
    with small_runner(model, pool, pieces="auto") as runner:
        runner.capture()
        assert compiled.provides is PieceProvider.FX and len(compiled.wrappers) == 2
        assert "'cpu'" in compiled.figures.partition_reason
        runner.verify(Batch(3, 3), **step_inputs(3))


def test_an_opaque_function_breaks_a_breakable_capture():
    model = Doubling()
    with GraphRunner(model, inputs=X, mode="PIECEWISE", sizes=[4], platform="cpu") as runner:
        runner.capture()
        wrapper = runner.graphs.owners()[0]
        (entry,) = wrapper.entries.values()
        assert len(entry.parts) == 3
        runner.verify(x=torch.randn(3, 4))


def test_a_breakable_capture_may_contain_a_compiled_module():
    @eager_break
    def outside(x):
        return x + 1

    compiled = compile_module(Doubling(), ["x"])
    with GraphRunner(
        lambda x: outside(compiled(x)),
        inputs=X,
        mode="PIECEWISE",
        sizes=[4],
        compiled=[compiled],
        platform="cpu",
    ) as runner:
        runner.capture()
        runner.verify(x=torch.randn(3, 4))


class EvenOrOdd(nn.Module):
    def forward(self, x):
        return x.sin() if x.shape[0] % 2 else x.cos()


class Pairs(nn.Module):
    def forward(self, x):
        return x.unflatten(0, (x.shape[0] // 2, 2)).sin().flatten(0, 1)


def _padded_runner(module: nn.Module) -> GraphRunner:
    compile_module(module, ["x"], pool=(pool := GraphPool("cpu")))
    runner = GraphRunner(
        module,
        mode="FULL",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
        pool=pool,
    )
    runner.capture()
    return runner


def test_a_forward_that_branches_differently_for_padded_and_live_size_is_found():
    runner, x = _padded_runner(EvenOrOdd()), torch.randn(3, 3)
    with pytest.warns(GraphQuarantinedWarning, match="padding rows change the results"):
        torch.testing.assert_close(runner(Batch(3, 3, 1), x=x), x.sin())
    # In quarantine the module runs uncompiled.
    torch.testing.assert_close(runner(Batch(3, 3, 1), x=x), x.sin())
    assert runner.last_dispatch.reason is Reason.QUARANTINED


def test_a_compiled_forward_that_fails_at_the_live_size_is_served_with_padding():
    runner, x = _padded_runner(Pairs()), torch.randn(3, 3)
    for _ in range(2):
        torch.testing.assert_close(runner(Batch(3, 3, 1), x=x), x.sin())
        assert runner.last_dispatch.reason is Reason.HIT
