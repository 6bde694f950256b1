"""The rows that a piece writes by index: shown to watches by operators that change nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphrt.compile.split.effects import name_of, nodes_in, written
from graphrt.compile.split.graph import remember_lines, uncompiled, with_roots
from graphrt.compile.split.groups import Roles
from graphrt.compile.trace.sizes import placeholders, value_of

# A function that writes rows along a dimension -> (how to read these rows, how to write them).
_BY_DIM = {
    **dict.fromkeys(
        ("index_copy_", "index_add_", "index_fill_", "index_reduce_"),
        ("index_select", "index_copy_"),
    ),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), ("gather", "scatter_")),
}


def rows_written(piece: fx.GraphModule) -> Callable[..., Any] | None:
    """A function of the piece's inputs that reads each row which it writes by index, and writes it
    back; None if no index can be computed beforehand, from inputs that the piece does not write."""
    roles = Roles.of(piece.graph, lambda _: False)
    changed = {each for n in piece.graph.nodes for each in with_roots(written(n), roles)}
    inputs = {*placeholders(piece)}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    found = False
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
            continue
        dim, index = _index_of(node)
        chosen = [n for n in nodes_in(index) if isinstance(value_of(n), torch.Tensor)]
        if not chosen or not isinstance(target := node.args[0], fx.Node):
            continue
        needed = _needed([target, *nodes_in(index)])
        if (
            with_roots([target], roles).isdisjoint(inputs)
            or not _needed(nodes_in(index)).isdisjoint(inputs & changed)
            or any(written(n) for n in needed)
        ):
            continue
        for each in (n for n in piece.graph.nodes if n in needed and n not in copies):
            copies[each] = graph.node_copy(each, copies.__getitem__)
        found = True
        tensor, at = copies[target], fx.node.map_arg(index, copies.__getitem__)
        if dim is None:
            read = graph.call_function(operator.getitem, (tensor, at))
            write = graph.call_function(operator.setitem, (tensor, at, read))
        else:
            reads, writes = _BY_DIM[name_of(node)]
            read = graph.call_method(reads, (tensor, dim, at))
            write = graph.call_method(writes, (tensor, dim, at, read))
        read.meta, write.meta = dict(node.meta), dict(node.meta)
    graph.output(None)
    if not found:
        return None
    module = fx.GraphModule(piece, graph)
    remember_lines(module)
    # The bound method keeps the module, and so the lines.
    return uncompiled(module)


def _index_of(node: fx.Node) -> tuple[Any, Any]:
    """The dimension and the index of a write by index; None for the dimension of one that indexes
    like Python, and for the index of any other node."""
    name, args = name_of(node), node.args
    if node.op in ("call_function", "call_method") and len(args) > 2:
        if name in ("setitem", "__setitem__"):
            return None, args[1]
        if name == "index_put_":
            return None, tuple(slice(None) if i is None else i for i in args[1])  # type: ignore[union-attr]
        if name in _BY_DIM:
            return args[1], args[2]
    return None, None


def _needed(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    needed: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in needed:
            needed.add(node)
            nodes = [*nodes, *node.all_input_nodes]
    return needed
