"""Splitting rules on small graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphrt.compile import CompileError, opaque
from graphrt.compile.split.effects import written
from graphrt.compile.split.graph import returned_count, split
from graphrt.compile.split.groups import Roles, partition, splits_at
from graphrt.compile.split.identity import fingerprint, normalised
from graphrt.compile.trace.sizes import resolve_sizes, value_of


@opaque("graphrt_tests::touch", mutates=["out"])
def touch(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@opaque("graphrt_tests::halves", mutates=[], fake=lambda x: (x[:1].clone(), x[1:].clone()))
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:1].clone(), x[1:].clone()


TOUCH = torch.ops.graphrt_tests.touch
HALVES = torch.ops.graphrt_tests.halves


class Recipe:
    """A graph written as lines "name = op a b"; one letter stands for an operator."""

    def __init__(self, *lines: str) -> None:
        self.graph = fx.Graph()
        nodes = {"x": self.graph.placeholder("x")}
        for line in lines:
            name, _, call = line.partition(" = ")
            kind, *args = call.split()
            values = tuple(nodes.get(arg, int(arg) if arg.isdigit() else arg) for arg in args)
            nodes[name] = self.graph.call_function(_KINDS[kind], values, name=name)
        self.graph.output((nodes[lines[-1].partition(" = ")[0]],))

    def parts(self, names=None):
        is_splitting = splits_at(names)
        return [
            ("!" if part.splitting else "") + " ".join(n.name for n in part.nodes)
            for part in partition(self.graph, is_splitting, Roles.of(self.graph, is_splitting))
        ]


_KINDS = {
    "relu": torch.relu,
    "add": operator.add,
    "empty": torch.empty_like,
    "zeros": torch.ops.aten.zeros_like.default,
    "touch": TOUCH.default,
    "packet": TOUCH,
    "halves": HALVES.default,
    "item": operator.getitem,
}


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        pytest.param(["a = relu x", "b = relu a"], ["a b"], id="nothing splits"),
        pytest.param(
            ["a = relu x", "o = empty a", "t = touch a o", "b = relu o"],
            ["a o", "!t", "b"],
            id="one operator",
        ),
        pytest.param(
            ["a = relu x", "o = empty a", "t = touch a o", "u = touch a o", "b = relu o"],
            ["a o", "!t u", "b"],
            id="consecutive ones share a piece",
        ),
        pytest.param(
            ["a = relu x", "h = halves a", "b = item h 0", "c = item h 1", "d = add b c"],
            ["a", "!h b c", "d"],
            id="elements belong to their producer",
        ),
        pytest.param(
            ["a = relu x", "h = halves a", "r = relu a", "b = item h 0", "d = add b r"],
            ["a", "!h b", "r d"],
            id="elements belong to their producer, wherever they are taken",
        ),
        pytest.param(
            ["a = relu x", "o = empty a", "t = touch a o", "p = empty a", "u = touch o p"],
            ["a o p", "!t u"],
            id="a lone allocation joins the piece before",
        ),
        pytest.param(
            ["a = relu x", "o = empty a", "t = touch a o", "p = zeros o", "u = touch o p"],
            ["a o p", "!t u"],
            id="so does a lone fill",
        ),
        pytest.param(
            ["a = relu x", "h = halves a", "b = item h 0", "p = empty b", "u = touch b p"],
            ["a", "!h b", "p", "!u"],
            id="not one that needs what the splitting operator makes",
        ),
        pytest.param(
            ["o = empty x", "t = touch x o", "b = relu o"],
            ["o", "!t", "b"],
            id="not the first, which has nothing before it",
        ),
        pytest.param(
            ["t = packet x x", "b = relu x"], ["!t", "b"], id="a packet counts as its operator"
        ),
    ],
)
def test_a_graph_is_split_into_expected_parts_around_splitting_operators(lines, parts):
    assert Recipe(*lines).parts() == parts


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (None, ["a", "!t", "b"]),
        ([], ["a t b"]),
        (["graphrt_tests::touch"], ["a", "!t", "b"]),
        (["graphrt_tests::touch.default"], ["a", "!t", "b"]),
        (["graphrt_tests::touch.other"], ["a t b"]),
        (["graphrt_tests::halves"], ["a t b"]),
    ],
)
def test_operators_are_named_with_or_without_overload(names, parts):
    assert Recipe("a = relu x", "t = touch a x", "b = relu x").parts(names) == parts


def fake_module(build) -> fx.GraphModule:
    """A graph with sizes s0 and a tensor x [s0, 4], as Dynamo makes them."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    real = torch.empty(6, 4)
    torch._dynamo.mark_dynamic(real, 0)
    fake = mode.from_tensor(real, static_shapes=False)
    graph = fx.Graph()
    size = graph.placeholder("s0")
    size.meta["example_value"] = fake.shape[0]
    x = graph.placeholder("x")
    x.meta["example_value"] = fake

    def call(function, *args, method=False):
        node = graph.call_method(function, args) if method else graph.call_function(function, args)
        values = fx.node.map_arg(args, value_of)
        with mode:
            node.meta["example_value"] = (
                getattr(values[0], function)(*values[1:]) if method else function(*values)
            )
        return node

    graph.output(tuple(build(call, size, x)))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_piece_takes_sizes_as_numbers_and_not_from_tensors():
    def build(call, size, x):
        a = call(torch.relu, x)
        shape = call("size", a, method=True)
        rows = call(operator.getitem, shape, 0)
        columns = call(operator.getitem, shape, 1)
        twice = call(operator.mul, rows, 2)
        call(TOUCH.default, x, x)
        b = call("view", x, twice, 2, method=True)
        c = call("view", x, columns, rows, method=True)
        return call(torch.abs, b), call(torch.abs, c)

    whole = fake_module(build)
    resolve_sizes(whole.graph)
    pieces = split(whole, splits_at(None))
    assert [p.splitting for p in pieces] == [False, True, False]
    assert [n.name for n in pieces[2].inputs] == ["s0", "x"]
    x = torch.arange(24.0).view(6, 4)
    first, second = pieces[2].graph(6, x)
    assert first.shape == (12, 2) and second.shape == (4, 6)


def test_resolving_sizes_leaves_numbers_read_from_data():
    graph = fx.Graph()
    x = graph.placeholder("x")
    item = graph.call_method("item", (x,))
    item.meta["example_value"] = ShapeEnv().create_unbacked_symint()
    more = graph.call_function(operator.add, (item, 1))
    more.meta["example_value"] = item.meta["example_value"] + 1
    graph.output((more,))
    resolve_sizes(graph)
    assert [n.name for n in graph.nodes] == ["x", "item", "add", "output"]


def two_layers(constant: float = 1.0) -> list:
    def build(call, size, x):
        for factor in (1.0, constant):
            x = call(operator.mul, x, factor)
            y = call(torch.relu, x)
            call(TOUCH.default, x, y)
            x = y
        return (x,)

    return split(fake_module(build), splits_at(None))


def test_equal_pieces_of_two_layers_have_equal_fingerprints():
    first, _, second, _ = two_layers()
    assert fingerprint(first.graph) == fingerprint(second.graph)
    assert normalised(first.graph) == normalised(second.graph)


def test_pieces_with_different_constants_have_different_fingerprints():
    first, _, second, _ = two_layers(constant=2.0)
    assert fingerprint(first.graph) != fingerprint(second.graph)


def test_fingerprints_differ_by_dtype_and_by_shared_memory():
    def pieces(dtype, shared):
        mode = FakeTensorMode()
        with mode:
            a = torch.empty(4, dtype=dtype)
            b = a.view(2, 2).view(4) if shared else torch.empty(4, dtype=dtype)
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in "ab"]
        for node, value in zip(nodes, (a, b), strict=True):
            node.meta["example_value"] = value
        graph.output(graph.call_function(operator.add, tuple(nodes)))
        return fingerprint(fx.GraphModule(torch.nn.Module(), graph))

    made = {pieces(d, s) for d in (torch.float32, torch.float64) for s in (False, True)}
    assert len(made) == 4


def test_a_piece_returns_a_single_tensor_bare_and_no_outputs_as_none():
    def build(call, size, x):
        y = call(torch.relu, x)
        call(TOUCH.default, x, y)
        return (call(torch.relu, y),)

    first, middle, last = split(fake_module(build), splits_at(None))
    x = torch.randn(3, 4)
    assert isinstance(first.graph(x), torch.Tensor)
    assert middle.graph(x, x.clone()) is None
    assert isinstance(last.graph(x), torch.Tensor)


def test_indexing_a_tensor_stays_after_the_operator_that_writes_the_tensor():
    def build(call, size, x):
        out = call(torch.empty_like, x)
        call(TOUCH.default, x, out)
        rows = call(torch.arange, 2)
        return (call(operator.getitem, out, rows),)

    pieces = split(fake_module(build), splits_at(None))
    assert [p.splitting for p in pieces] == [False, True, False]
    x, out = torch.randn(6, 4), torch.zeros(6, 4)
    pieces[1].graph(x, out)
    assert torch.equal(pieces[2].graph(out), x[:2])


def test_a_compiled_piece_takes_the_base_and_a_splitting_operator_the_view():
    def build(call, size, x):
        base = call(torch.relu, x)
        view = call("transpose", base, 0, 1, method=True)
        call(TOUCH.default, view, view)
        call("add_", view, 1, method=True)
        return (call(torch.abs, base), view)

    first, middle, last = split(fake_module(build), splits_at(None))
    assert [n.name for n in first.outputs] == ["relu", "transpose"]
    assert [n.name for n in middle.inputs] == ["transpose"]
    assert [n.name for n in last.inputs] == ["relu"] and last.written == (0,)
    assert returned_count(first.graph) == 1  # no result of compiled code is a view of another
    base, view = first.with_views(first.graph.forward)(torch.randn(6, 4))
    assert view._is_view() and view.data_ptr() == base.data_ptr()


def test_the_result_of_an_in_place_update_is_the_updated_tensor_in_later_pieces():
    def build(call, size, x):
        base = call(torch.relu, x)
        more = call("add_", base, 1, method=True)
        call(TOUCH.default, more, base)
        return (call(torch.abs, more),)

    _, middle, last = split(fake_module(build), splits_at(None))
    assert [n.name for n in middle.inputs] == [n.name for n in last.inputs] == ["relu"]


@opaque("graphrt_tests::itself", mutates=[], fake=lambda x: x)
def itself(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("name", "error"), [("t_", "in place: t_"), ("itself", "schema does not say so")]
)
def test_an_operator_that_aliases_or_restrides_its_input_is_refused(name, error):
    def build(call, size, x):
        y = call(torch.relu, x)
        if name == "itself":
            return (call(torch.ops.graphrt_tests.itself.default, y),)
        return (call(name, y, method=True),)

    with pytest.raises(CompileError, match=error):
        split(fake_module(build), splits_at([]))


# Higher-order operators ----------------------------------------------------------------------


def checkpointed(inner: Callable[[Any], Any]) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """A graph that calls the graph of `inner`, its input and the call."""
    root, graph = torch.nn.Module(), fx.Graph()
    root.body = fx.symbolic_trace(inner)
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    called = graph.call_function(checkpoint, (graph.get_attr("body"), x))
    graph.output(called)
    return fx.GraphModule(root, graph), x, called


def test_pieces_that_differ_inside_a_higher_order_operator_are_distinct():
    sine = fingerprint(checkpointed(lambda x: x.sin())[0])
    assert sine == fingerprint(checkpointed(lambda x: x.sin())[0])
    assert sine != fingerprint(checkpointed(lambda x: x.cos())[0])


def test_a_higher_order_operator_writes_the_inputs_that_its_graph_writes():
    _, x, called = checkpointed(lambda x: x.add_(1) * 2)
    assert x in written(called)
    _, _, called = checkpointed(lambda x: x.add(1) * 2)
    assert not written(called)
