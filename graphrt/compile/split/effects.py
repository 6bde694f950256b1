"""What a node of a traced graph does to its arguments: which it may write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.operators import (
    is_higher_order,
    is_transformed,
    operator_names,
    written_arguments,
)
from graphrt.compile.trace.sizes import value_of

_I = ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub")
_IN_PLACE = frozenset(
    {
        *("setitem", "delitem", "__setitem__", "__delitem__"),
        *(f"i{name}" for name in (*_I, "truediv", "xor", "concat")),
        *(f"__i{name}__" for name in (*_I, "truediv", "xor")),
    }
)
_METADATA = frozenset(
    {
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"),
        *("resize_", "resize_as_", "set_", "set_data"),
    }
)
# Of functions that write an argument in silence: the argument that says so, and those written.
_STATEFUL = {
    "batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight",)),
}


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node may write, in order and each once."""
    return list(dict.fromkeys(_written(node)))


def check_metadata(graph: fx.Graph) -> None:
    """Raise `CompileError` for what gives a tensor another shape or memory in place: what is known
    of the tensor from before would be wrong."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and name_of(node) in _METADATA:
            name = name_of(node)
            raise CompileError(
                f"the forward changes the shape or the memory of a tensor in place: {name}",
                got=node.format_node(),
                expected="a new view",
                advice=f"write x = x.{name.removesuffix('_')}(...) in place of x.{name}(...)",
            )


def check_transforms(graph: fx.Graph) -> None:
    """Raise `CompileError` for a transform of `torch.func` inside of the forward: whose memory its
    tensors are is not known, and a piece could end in the middle of it."""
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and is_transformed(value):
            raise CompileError(
                "the forward transforms a function: torch.vmap, torch.func.grad or another one",
                got=node.format_node(),
                expected="operators on tensors",
                advice="take it into an opaque operator, or write it without the transform",
            )


def name_of(node: fx.Node) -> str:
    """The bare name of what a node calls: "add_", "setitem"."""
    if isinstance(node.target, str):
        return node.target
    names = operator_names(node.target)
    if names:
        return names[0].rpartition("::")[2]
    return str(getattr(node.target, "__name__", ""))


def _written(node: fx.Node) -> Iterator[fx.Node]:
    if node.op not in ("call_function", "call_method"):
        return
    out = node.kwargs.get("out")
    if out is not None:
        yield from nodes_in(out)
    arguments = written_arguments(node.target)
    if arguments is not None:
        for index, name in arguments:
            if index < len(node.args):
                yield from nodes_in(node.args[index])
            yield from nodes_in(node.kwargs.get(name))
        return
    if is_higher_order(node.target):
        if _writes_inside(node):
            yield from node.all_input_nodes
        return
    name = name_of(node)
    given = _bound(node)
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if in_place or given.get("inplace"):
        yield from nodes_in(node.args[0] if node.args else given.get("input"))
    flag, state = _STATEFUL.get(name, ("", ()))
    if given.get(flag) not in (None, False):
        for argument in state:
            yield from nodes_in(given.get(argument))


def _writes_inside(node: fx.Node) -> bool:
    """Whether a higher-order operator may write what it is given: where graphs say what it does,
    they tell; a Triton kernel, or what has none, may."""
    root = node.graph.owning_module
    inner = [n for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [getattr(root, str(n.target), None) for n in inner]
    found = [graph for graph in graphs if isinstance(graph, fx.GraphModule)]
    return not found or any(written(n) for graph in found for n in graph.graph.nodes)


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument, which may be a list of them."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments by name, with defaults; empty for what has no signature."""
    signature = None if isinstance(node.target, str) else _signature(node.target)
    if signature is None:
        return dict(node.kwargs)
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError:
        return dict(node.kwargs)
    return dict(bound.arguments)


@cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
