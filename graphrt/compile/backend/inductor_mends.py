"""Pieces that Inductor (torch 2.13) gets wrong: they are rewritten, or not compiled."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphrt.compile.split.effects import name_of, written
from graphrt.compile.trace.sizes import is_number, value_of


def select_elements(graph: fx.Graph) -> None:
    """Replace elements of `x.unbind(dim)` by `x.select(dim, index)`, the same views: if such an
    element is written, Inductor takes a batch size for a constant."""
    for node in list(graph.nodes):
        if name_of(node) != "unbind" or node.op == "placeholder":
            continue
        arguments = _arguments(node)
        for user in list(node.users):
            index = user.args[1] if name_of(user) == "getitem" else None
            if arguments is None or not isinstance(index, int) or user.args[0] is not node:
                continue
            with graph.inserting_before(user):
                tensor, dim = arguments
                element = graph.call_method("select", (tensor, dim, index))
            element.meta = dict(user.meta)
            user.replace_all_uses_with(element)
            graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor and dimension of an `unbind`; None if they are not known."""
    tensor: Any = node.args[0] if node.args else node.kwargs.get("input")
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(tensor, fx.Node) or value_of(tensor) is None or not isinstance(dim, int):
        return None
    return tensor, dim


def copies_between_written_inputs(piece: fx.GraphModule) -> bool:
    """Whether a piece copies one input into another and writes both: `x.copy_(y); y.neg_()`.

    Inductor writes inputs at the end of its code, one after the other. One of its passes reads `y`
    in place of the copy, and `y` may have its new value by then.
    """
    nodes = piece.graph.nodes
    changed = {root for node in nodes for n in written(node) for root in _sources(n)}
    if len(changed) < 2:
        return False
    for node in nodes:
        targets = {root for n in written(node) for root in _sources(n)}
        if targets and any(root in changed - targets for n in _read(node) for root in _sources(n)):
            return True
    return False


def _read(node: fx.Node) -> list[fx.Node]:
    targets = set(written(node))
    return [n for n in node.all_input_nodes if n not in targets]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The input that a node may be, or be a view or copy of; none if it is computed from several
    tensors."""
    while node.op != "placeholder":
        tensors = [n for n in node.all_input_nodes if not is_number(n)]
        if len(tensors) != 1:
            return []
        node = tensors[0]
    return [node]
