"""Compiled modules on the eager backend: what they return, what they refuse, what they count."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import graphrt.compile
from graphrt.compile import (
    CompiledModule,
    CompileError,
    CompileOptions,
    CompileSealedError,
    CompileSizeError,
    ReassignedStateError,
    RetraceError,
    TraceError,
    compile_module,
    support_compile,
)
from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError
from tests import starts
from tests.draws import rest_long
from tests.models.llama import Llama, step_inputs

SHAPES = ("backed", "unbacked", "backed_size_oblivious")


def options(**keywords: Any) -> CompileOptions:
    return CompileOptions(**keywords)


@pytest.fixture
def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(layers=2)


def reference(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """What the model returns eagerly, with its state as it was."""
    with torch.no_grad():
        return copy.deepcopy(model)(**inputs)


def test_sixteen_layers_give_seventeen_pieces_of_three_distinct_graphs():
    compiled = compile_module(Llama(layers=16))
    compiled.ensure_compiled(**step_inputs(3))
    figures = compiled.figures
    assert (figures.pieces, figures.splitting_pieces) == (17, 16)
    assert (figures.distinct_pieces, figures.compilations, figures.traces) == (3, 3, 1)
    assert [piece.name for piece in compiled.pieces] == [f"piece_{n}" for n in range(33)]
    assert [piece.splitting for piece in compiled.pieces] == [n % 2 == 1 for n in range(33)]


@pytest.mark.parametrize(
    ("shapes", "first"),
    rest_long(product(SHAPES, [1, 5]), ("backed", 1), *((shapes, 5) for shapes in SHAPES)),
)
def test_a_single_trace_gives_eager_results_at_every_batch_size(llama, shapes, first):
    expected = {n: reference(llama, **step_inputs(n)) for n in range(1, 13)}
    compiled = compile_module(llama, options=options(dynamic_shapes=shapes))
    compiled.ensure_compiled(**step_inputs(first))
    before = copy.deepcopy(counters)
    for size in (1, 2, *range(12, 0, -1)):
        assert torch.equal(llama(**step_inputs(size)), expected[size])
    assert counters == before
    assert compiled.figures.traces == 1 and compiled.figures.compilations == 3


def test_compiling_does_not_run_the_forward(llama):
    compile_module(llama).ensure_compiled(**step_inputs(4))
    assert not any(layer.keys.any() for layer in llama.layers)


def test_the_generated_call_is_straight_line_python(llama):
    compiled = compile_module(llama)
    assert compiled.source == ""
    compiled.ensure_compiled(**step_inputs(4))
    lines = compiled.source.splitlines()
    assert lines[0] == "def forward(ids, positions, slots, table, lengths):"
    assert sum("piece_" in line for line in lines) == 5
    assert any(line.strip().startswith("del ") for line in lines)
    assert "piece_4, compiled" in compiled.computation_graph


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.seen = 0
        self.log: list[int] = []
        self.register_buffer("kept", torch.zeros(()))
        self.table = {"a": torch.ones(()), "b": torch.ones(())}

    def forward(self, x, scale=2.0, *, extra=None):
        y = self.linear(x) * scale
        return y if extra is None else y + extra


def compiled_small(**keywords: Any) -> CompiledModule:
    compiled = compile_module(Small(), {"x": 0, "extra": 0}, **keywords)
    compiled.ensure_compiled(torch.randn(6, 4), extra=torch.randn(6, 4))
    return compiled


X = torch.randn(6, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "name", "text"),
    [
        ((X.double(),), {"extra": X}, "x", "dtype"),
        ((X[None],), {"extra": X}, "x", "number of dimensions"),
        ((torch.randn(6, 5),), {"extra": X}, "x", "dimension 1"),
        ((X.to("meta"),), {"extra": X}, "x", "device"),
        ((torch.randn(4, 6).t(),), {"extra": X}, "x", "the strides"),
        ((X, 3.0), {"extra": X}, "scale", "baked in"),
        ((X, 2), {"extra": X}, "scale", "baked in"),
        ((X,), {}, "extra", "type"),
        ((X,), {"extra": torch.randn(5, 4)}, "extra", "another number of tokens"),
        ((X.tolist(),), {"extra": X}, "x", "structure"),
    ],
)
def test_a_call_that_would_need_another_trace_names_the_input(args, kwargs, name, text):
    compiled = compiled_small()
    with pytest.raises(RetraceError, match=text) as caught:
        compiled(*args, **kwargs)
    assert caught.value.input.startswith(name)
    assert compiled.figures.traces == 1


def test_a_size_that_the_forward_branches_on_is_named():
    def forward(x):
        return x + 1 if x.shape[0] > 8 else x - 1

    compiled = compile_module(forward, ["x"])
    assert torch.equal(compiled(torch.zeros(20, 3)), torch.ones(20, 3))
    assert torch.equal(compiled(torch.zeros(9, 3)), torch.ones(9, 3))
    with pytest.raises(RetraceError, match="number of tokens") as caught:
        compiled(torch.zeros(4, 3))
    assert caught.value.input == "x" and "tokens > 8" in str(caught.value)


def test_a_branch_on_an_unbacked_size_is_refused():
    def forward(x):
        return x + 1 if x.shape[0] > 8 else x - 1

    with pytest.raises(TraceError, match="unbacked"):
        compile_module(forward, ["x"], options=options(dynamic_shapes="unbacked"))(X)


def test_a_batch_dimension_fixed_to_a_constant_is_refused():
    with pytest.raises(TraceError, match="constant in the forward"):
        compile_module(lambda x: x.view(6, 2, 2), ["x"])(X)


def test_a_graph_break_in_the_forward_raises_a_trace_error():
    def forward(x):
        print("side effect")
        return x + (1 if x.sum().item() > 0 else 2)

    with pytest.raises(TraceError, match="one graph"):
        compile_module(forward, ["x"])(X)


def test_axes_of_tokens_and_requests_vary_independently():
    def forward(x, starts, pages):
        return x[starts[:-1]] + pages.sum(1, keepdim=True), pages.shape[0]

    dims = {"x": 0, "starts": {0: "reqs+1"}, "pages": {0: "reqs"}}
    compiled = compile_module(forward, dims)
    for tokens, reqs in ((4, 4), (7, 3), (1, 1), (9, 2)):
        args = torch.randn(tokens, 3), torch.arange(reqs + 1) % tokens, torch.ones(reqs, 5)
        output, count = compiled(*args)
        assert torch.equal(output, forward(*args)[0]) and count == reqs
    assert compiled.figures.traces == 1
    with pytest.raises(RetraceError, match="reqs") as caught:
        compiled(torch.randn(7, 3), torch.arange(3), torch.ones(3, 5))
    assert caught.value.input == "pages"


@dataclass
class Result:
    logits: torch.Tensor
    rows: int

    def __post_init__(self) -> None:
        self.first = self.rows


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: {"y": x + 1, "x": x, "pair": (x * 2, None), "rows": x.shape[0]},
        lambda x: [x + 1, x.shape[0] * 3, "text", 1.5, True],
        lambda x: (x, x, x * 2),
        lambda x: (x + 1,),
        lambda x: Result(x + 1, x.shape[0]),
        lambda x: (x.relu(), x.size()),
        lambda x: x.add_(1),
    ],
)
def test_a_forward_may_return_any_structure_of_outputs(forward):
    compiled = compile_module(forward, ["x"])
    for size in (3, 1, 5):
        x = torch.randn(size, 4)
        output, expected = compiled(x.clone()), forward(x.clone())
        assert type(output) is type(expected)
        assert_same(vars_of(output), vars_of(expected))
    assert compiled.figures.traces == 1


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: (x + 1, x.relu()), ""),
        (lambda x: Result(x + 1, x.shape[0]), "what its graph returns"),
    ],
)
def test_a_call_that_keeps_the_code_of_dynamo_gives_the_reason(forward, reason):
    compiled = compile_module(forward, ["x"])
    compiled(torch.randn(3, 4))
    reason_kept = compiled.figures.call_reason
    assert (reason in reason_kept) if reason else reason_kept == ""


def assert_same(actual: Any, expected: Any) -> None:
    ours, theirs = list(tree.leaves(actual)), list(tree.leaves(expected))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def vars_of(value: Any) -> Any:
    return [value.logits, value.rows, value.first] if isinstance(value, Result) else value


def test_nested_arguments_are_named_by_their_path():
    def forward(hidden, *, meta):
        return hidden[0] + hidden[1] * meta["scale"]

    compiled = compile_module(forward, {"hidden": 0})
    hidden = [torch.randn(5, 2), torch.randn(5, 2)]
    meta = {"scale": torch.randn(2)}
    assert torch.equal(compiled(hidden, meta=meta), forward(hidden, meta=meta))
    with pytest.raises(RetraceError) as caught:
        compiled([hidden[0], hidden[1].double()], meta=meta)
    assert caught.value.input == "hidden[1]"
    with pytest.raises(RetraceError) as caught:
        compiled(hidden, meta={"scale": torch.randn(1)})
    assert caught.value.input == "meta['scale']"


def test_a_tensor_first_passed_for_two_arguments_may_later_be_two_tensors():
    def forward(x, y):
        return x + 2 * y

    compiled = compile_module(forward, ["x", "y"])
    compiled(X, X)
    assert torch.equal(compiled(X, -X), -X)


class Assigning(Small):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "buffer":
            self.count = self.count + self.kept
        elif self.kind == "table":
            self.table["b"] = self.table["a"] + self.table["b"]
        elif self.kind == "attribute":
            self.seen = self.seen + 1
        elif self.kind == "inner":
            self.linear.last = x
        elif self.kind == "list":
            self.log.append(1)
        else:
            self.count.add_(1)
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("buffer", ("module.count",)),
        ("table", ("module.table.b",)),
        ("attribute", ("module.seen",)),
        ("inner", ("module.linear.last",)),
        ("list", ("module.log",)),
    ],
)
def test_a_forward_that_assigns_module_state_is_refused_with_graphs(kind, names):
    compiled = compile_module(Assigning(kind), ["x"])
    with pytest.raises(ReassignedStateError, match=names[0]) as caught:
        compiled(X)
    assert caught.value.names == names
    assert "graphs=False" in str(caught.value) and "not numbers" in str(caught.value)
    assert not compiled.compiled


def test_a_forward_that_assigns_module_state_works_without_graphs():
    model = Assigning("buffer")
    model.kept.fill_(1)
    compiled = compile_module(model, ["x"], graphs=False)
    compiled(X)
    compiled(X[:2])
    assert model.count == 2


def test_a_forward_that_counts_in_a_number_is_traced_for_one_count_without_graphs():
    compiled = compile_module(Assigning("attribute"), ["x"], graphs=False)
    compiled(X)
    with pytest.raises(RetraceError, match=r"module\.seen"):
        compiled(X)


@pytest.mark.parametrize("dims", [["x"], None])
def test_a_class_in_place_of_an_instance_is_named(dims):
    with pytest.raises(CompileError, match=r"compile\(Small\(\.\.\.\)"):
        compile_module(Small, dims)


def test_in_place_updates_of_module_state_are_allowed():
    model = Assigning("in place")
    compiled = compile_module(model, ["x"])
    compiled(X)
    compiled(X[:1])
    assert model.count == 2


def test_a_call_that_needs_compilation_after_seal_raises():
    compiled = compile_module(Small(), ["x"])
    compiled.seal()
    with pytest.raises(CompileSealedError, match="seal"):
        compiled(X)
    compiled.unseal()
    compiled.ensure_compiled(X)
    compiled.seal()
    compiled(X[:2])


def test_a_call_of_no_rows_after_seal_names_the_size_and_advice_that_works():
    compiled = compile_module(Small(), ["x"])
    compiled.ensure_compiled(X)
    compiled.seal()
    with pytest.raises(CompileSealedError, match="call the module with this size") as caught:
        compiled(X[:0])
    assert "size 0 of" in str(caught.value.got)
    compiled.unseal()
    compiled(X[:0])
    compiled.seal()
    assert len(compiled(X[:0])) == 0


def test_rebind_weights_uses_replaced_weights_and_refuses_another_shape():
    compiled = compiled_small()
    model = compiled.unwrap()
    model.linear.weight = nn.Parameter(torch.ones(4, 4))
    compiled.rebind_weights()
    assert torch.equal(compiled(X, extra=X), reference(model, x=X, extra=X))
    model.linear.weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(RetraceError) as caught:
        compiled.rebind_weights()
    assert caught.value.input == "linear.weight"


def test_compiling_in_place_keeps_the_module_with_its_state_dict():
    model = nn.Sequential(nn.Linear(4, 4), Small())
    inner = compile_module(model[1], ["x"])
    expected = reference(model, input=X)
    assert torch.equal(model(X), expected)
    assert inner.compiled and inner.linear is model[1].linear
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())


def test_the_package_graphrt_compile_is_callable():
    compiled = graphrt.compile(Small(), ["x"])
    assert isinstance(compiled, graphrt.compile.CompiledModule)


def test_support_compile_declares_the_dynamic_dims_of_a_class():
    class Marked(Small):
        pass

    support_compile(dynamic_dims={"x": 0})(Marked)
    assert compile_module(Marked())(X).shape == (6, 4)
    with pytest.raises(CompileError, match="dynamic_dims") as caught:
        compile_module(nn.Sequential(Marked()))
    assert "'0'" in str(caught.value)
    with pytest.raises(CompileError, match="class"):
        support_compile(dynamic_dims=["x"])(lambda x: x)


@pytest.mark.parametrize("dims", ["x", {"y": 0}, {"x": "tokens"}, {"x": {0: "a b"}}, {"x": 1.5}])
def test_wrong_dynamic_dims_raise_errors_that_name_the_problem(dims):
    with pytest.raises(CompileError):
        compile_module(Small(), dims)


def test_sizes_to_compile_for_must_be_capture_sizes():
    compile_options = options(compile_sizes=(2, 5))
    compiled = compile_module(Small(), ["x"], options=compile_options)
    with pytest.raises(CompileSizeError, match="compile size 5") as caught:
        compiled.use_capture_sizes([2, 4, 8])
    assert caught.value.size == 5
    compiled(X)
    with pytest.raises(CompileSizeError):
        compiled.use_capture_sizes([2, 4])


def test_compile_sizes_may_be_all_capture_sizes():
    compile_options = options(compile_sizes=("capture_sizes", 2))
    with pytest.raises(CompileSizeError, match="nobody has named"):
        compile_module(Small(), ["x"], options=compile_options)(X)
    model = Small()
    compiled = compile_module(model, ["x"], options=compile_options)
    compiled.use_capture_sizes([2, 4])
    compiled(X)
    assert compiled.figures.static_compilations == 2
    assert compiled.figures.compilations == 3


def test_a_copy_of_a_compiled_module_has_the_capture_sizes_of_the_original():
    compile_options = options(compile_sizes=("capture_sizes",))
    compiled = compile_module(Small(), ["x"], options=compile_options)
    compiled.use_capture_sizes([2, 4])
    assert torch.equal(copy.deepcopy(compiled)(X), compiled(X))


def test_compile_options_have_defaults_and_refuse_unknown_values():
    assert CompileOptions.from_dict({"splitting_ops": "ns::op"}).splitting_ops == ("ns::op",)
    assert CompileOptions(splitting_ops=[]).whole_graph
    assert not CompileOptions().whole_graph
    with pytest.raises(InvalidOptionError, match="splitting_op"):
        CompileOptions.from_dict({"splitting_op": []})
    with pytest.raises(InvalidOptionError):
        CompileOptions(save_format="zip")
    with pytest.raises(CompileError, match="unknown compile backend"):
        compile_module(Small(), ["x"], options=options(backend="tvm"))(X)
    with pytest.raises(InvalidOptionError, match="not registered"):
        compile_module(Small(), ["x"], options=options(splitting_ops=["ns::atention"]))(X)


def test_importing_graphrt_compile_does_not_load_inductor():
    code = "import sys, graphrt.compile; print('torch._inductor.compile_fx' in sys.modules)"
    process = starts.run("-c", code, check=True)
    assert process.stdout.strip() == "False"


STRIDED = {
    "transposed": lambda n: torch.randn(4, n).t(),
    "permuted": lambda n: torch.randn(3, n, 4).permute(1, 0, 2),
    "reversed": lambda n: torch.randn(4, 3, n).permute(2, 1, 0),
    "expanded rows": lambda n: torch.randn(4).expand(n, 4),
    "expanded columns": lambda n: torch.randn(n, 1).expand(n, 4),
    "expanded and transposed": lambda n: torch.randn(2, 1, n).expand(2, 3, n).permute(2, 0, 1),
}


def by_rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten(1) * 2 + x.reshape(x.shape[0], -1).sin()


def by_strides(x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.stride())


@pytest.mark.parametrize("made", STRIDED)
def test_strides_may_follow_the_batch_as_those_of_transposed_and_expanded_inputs_do(made):
    compiled, asking = compile_module(by_rows, ["x"]), compile_module(by_strides, ["x"])
    for rows in (5, 2, 7, 1, 16, 3):
        x = STRIDED[made](rows)
        assert torch.equal(compiled(x), by_rows(x))
        if rows > 1:
            assert torch.equal(asking(x), by_strides(x))


def test_columns_cut_out_of_wider_rows_keep_their_stride():
    compiled = compile_module(lambda x: x * 2, ["x"])
    compiled(torch.randn(5, 9)[:, 2:6])
    x = torch.randn(7, 9)[:, 1:5]
    assert torch.equal(compiled(x), x * 2)
    with pytest.raises(RetraceError, match="strides"):
        compiled(torch.randn(4, 9).t()[:, :4])
