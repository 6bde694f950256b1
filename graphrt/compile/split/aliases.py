"""Which nodes of a graph stand for the same memory: views, and results of in-place updates."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import AliasError
from graphrt.compile.private_torch.operators import (
    is_higher_order,
    operator_names,
    returns,
    storage_identity,
)
from graphrt.compile.split.effects import written
from graphrt.compile.trace.sizes import value_of


def forward_updates(graph: fx.Graph) -> None:
    """Let every use of what an in-place update returns be a use of the tensor that it updated,
    which is the same one: `y = x.add_(1)` makes no tensor.

    Raises `AliasError` where a node that writes returns another view of what it wrote.
    """
    for node in graph.nodes:
        value = value_of(node)
        if not node.users or not isinstance(value, torch.Tensor):
            continue
        same = [n for n in written(node) if _storages(n) & _storages(node)]
        for updated in same:
            if _geometry(value_of(updated)) == _geometry(value):
                node.replace_all_uses_with(updated)
                break
        else:
            if same:
                raise AliasError(
                    f"{node.name} writes a tensor and returns another view of it",
                    got=node.format_node(),
                    expected="the tensor itself, or a new one",
                    advice="update first, and take the view in a line of its own",
                )


def elements(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that only take an element of a tuple or list; no indexing of a tensor is one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is operator.getitem and node.op == "call_function":
            producer = node.args[0]
            if isinstance(producer, fx.Node) and _is_several(producer, found):
                found.add(node)
    return found


def views(
    graph: fx.Graph, is_splitting: Callable[[fx.Node], bool], of_tuples: set[fx.Node]
) -> set[fx.Node]:
    """The nodes that read and write no memory, and make tensors of what they are given.

    They can be made again wherever what they look at is. `of_tuples` are `elements`. Raises
    `AliasError` for an operator that returns what it is given though its schema says otherwise.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or is_splitting(node):
            continue
        if node in of_tuples:
            if node.args[0] in found:
                found.add(node)
            continue
        own = _storages(node)
        given = {s for n in node.all_input_nodes for s in _storages(n)}
        if not own or not own <= given or written(node) or is_higher_order(node.target):
            continue
        if returns(node.target) is not None and not _says_so(node):
            raise AliasError(
                "an operator returns a tensor that it was given, and its schema does not say so",
                got=f"{operator_names(node.target)[0]} in {node.format_node()}",
                expected="new tensors",
                advice="return a copy, or write into a tensor that it is given",
            )
        found.add(node)
    return found


def check_roots(graph: fx.Graph, seen: frozenset[fx.Node]) -> None:
    """Raise `AliasError` where two tensors share memory, neither of them is a view of the other
    (in `seen`), and something writes them: no piece that gets one would know of the other."""
    changed = {s for node in graph.nodes for n in written(node) for s in _storages(n)}
    roots: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if node in seen or not isinstance(value, torch.Tensor) or written(node):
            continue
        for storage in _storages(node) & changed:
            first = roots.setdefault(storage, node)
            # Weights may be tied: pieces that write them are looked at one by one.
            if first is not node and node.op not in ("placeholder", "get_attr"):
                raise AliasError(
                    f"{first.name} and {node.name} share memory that the forward writes, and "
                    "neither is a view of the other",
                    got=node.format_node(),
                    expected="a view, or tensors of their own",
                    advice="let the operator return one tensor, and take views of it",
                )


def _is_several(node: fx.Node, of_tuples: set[fx.Node]) -> bool:
    """Whether a node stands for a tuple or list."""
    value = value_of(node)
    if value is not None:
        return isinstance(value, tuple | list)
    results = returns(node.target)
    return node in of_tuples or (results is not None and len(results) > 1)


def _says_so(node: fx.Node) -> bool:
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
    # As text: comparing symbolic sizes would decide something about them.
    return (value.dtype, str(tuple(value.shape)), str(value.stride()), str(value.storage_offset()))
