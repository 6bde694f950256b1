"""The tensors that a node of a traced graph may write, and the nodes that stand for one memory:
views, and results of in-place updates.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import AliasError, CompileError
from graphrt.compile.private_torch.operators import (
    is_higher_order,
    is_transformed,
    operator_names,
    returns,
    storage_identity,
    written_arguments,
)
from graphrt.compile.trace.sizes import value_of

# Operators of Python with an in-place form: `iadd`, `__iadd__`.
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
# Functions whose names do not say that they write: the flag that asks for it, the arguments.
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
    """Raise `CompileError` for a node that changes a tensor's shape or memory in place: what the
    trace knows of the tensor would be wrong before or after it."""
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
    """Raise `CompileError` for a transform of `torch.func` inside of the forward: the memory of its
    tensors is unknown, and a piece could end in the middle of it."""
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
    """The bare name of a node's function: "add_", "setitem"."""
    if isinstance(node.target, str):
        return node.target
    names = operator_names(node.target)
    if names:
        return names[0].rpartition("::")[2]
    return str(getattr(node.target, "__name__", ""))


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """As `written`: by the operator's schema or inner graphs; of a function of Python by its name
    and flags."""
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
    bound = _bound(node)
    # `add_` writes; `__and__` does not.
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if in_place or bound.get("inplace"):
        yield from nodes_in(node.args[0] if node.args else bound.get("input"))
    flag, state = _STATEFUL.get(name, ("", ()))
    if bound.get(flag) not in (None, False):
        for argument in state:
            yield from nodes_in(bound.get(argument))


def _writes_inside(node: fx.Node) -> bool:
    """Whether a higher-order operator may write its arguments: its graphs tell. One without graphs,
    such as a Triton kernel, may."""
    root = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    attributes = [getattr(root, name, None) for name in names]
    graphs = [value for value in attributes if isinstance(value, fx.GraphModule)]
    return not graphs or any(written(n) for graph in graphs for n in graph.graph.nodes)


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument, which may be a list of them."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return nodes


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments by name; only the keyword ones if the function has no signature."""
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


def forward_updates(graph: fx.Graph) -> None:
    """Replace the result of each in-place update by the tensor that it updated: after
    `y = x.add_(1)`, nodes that use `y` use `x`.

    Raises `AliasError` for a node that writes a tensor and returns another view of it.
    """
    for node in graph.nodes:
        value = value_of(node)
        if not node.users or not isinstance(value, torch.Tensor):
            continue
        candidates = [n for n in written(node) if _storages(n) & _storages(node)]
        for updated in candidates:
            if _geometry(value_of(updated)) == _geometry(value):
                node.replace_all_uses_with(updated)
                break
        else:
            if candidates:
                raise AliasError(
                    f"{node.name} writes a tensor and returns another view of it",
                    got=node.format_node(),
                    expected="the tensor itself, or a new one",
                    advice="update first, and take the view in a line of its own",
                )


def elements(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that take an element of a tuple or list; indexing a tensor is none of these."""
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is operator.getitem and node.op == "call_function":
            producer = node.args[0]
            if isinstance(producer, fx.Node) and _is_sequence(producer, taken):
                taken.add(node)
    return taken


def views(
    graph: fx.Graph, is_splitting: Callable[[fx.Node], bool], of_tuples: set[fx.Node]
) -> set[fx.Node]:
    """The nodes that only make views of their inputs: any piece that has the inputs can make them.

    `of_tuples` are the nodes of `elements`. Raises `AliasError` for an operator that returns an
    argument although its schema does not say so.
    """
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or is_splitting(node):
            continue
        if node in of_tuples:
            if node.args[0] in nodes:
                nodes.add(node)
            continue
        storages = _storages(node)
        input_storages = {s for n in node.all_input_nodes for s in _storages(n)}
        if (
            not storages
            or not storages <= input_storages
            or written(node)
            or is_higher_order(node.target)
        ):
            # It has memory of its own or writes some, or its inner graphs may.
            continue
        if returns(node.target) is not None and not _declares_views(node):
            raise AliasError(
                "an operator returns a tensor that it was given, and its schema does not say so",
                got=f"{operator_names(node.target)[0]} in {node.format_node()}",
                expected="new tensors",
                advice="return a copy, or write into a tensor that it is given",
            )
        nodes.add(node)
    return nodes


def check_roots(graph: fx.Graph, view_nodes: frozenset[fx.Node]) -> None:
    """Raise `AliasError` where two tensors share memory, neither of them is a view of the other
    (in `view_nodes`), and a node writes them: a piece that takes one would not know the other."""
    changed = {s for node in graph.nodes for n in written(node) for s in _storages(n)}
    roots: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if node in view_nodes or not isinstance(value, torch.Tensor) or written(node):
            continue  # another name of a tensor: a view, or the result of an update
        for storage in _storages(node) & changed:
            first = roots.setdefault(storage, node)
            # Weights may be tied: `_check_inputs` of the compiler checks pieces that write them.
            if first is not node and node.op not in ("placeholder", "get_attr"):
                raise AliasError(
                    f"{first.name} and {node.name} share memory that the forward writes, and "
                    "neither is a view of the other",
                    got=node.format_node(),
                    expected="a view, or tensors of their own",
                    advice="let the operator return one tensor, and take views of it",
                )


def _is_sequence(node: fx.Node, of_tuples: set[fx.Node]) -> bool:
    """Whether a node stands for a tuple or list."""
    value = value_of(node)
    if value is not None:
        return isinstance(value, tuple | list)
    results = returns(node.target)
    return node in of_tuples or (results is not None and len(results) > 1)


def _declares_views(node: fx.Node) -> bool:
    name = operator_names(node.target)[0]
    return name.startswith("aten::") or any(returns(node.target) or ())


def _storages(node: fx.Node) -> set[int]:
    return {storage_identity(each) for each in _tensors(value_of(node))}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _geometry(value: Any) -> tuple[object, ...]:
    # As text: a comparison of symbolic sizes would become a condition of the trace.
    return (value.dtype, str(tuple(value.shape)), str(value.stride()), str(value.storage_offset()))
