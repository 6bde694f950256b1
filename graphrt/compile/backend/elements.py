"""Where Inductor (torch 2.13) takes a batch size for a constant: writes to what `unbind` gives."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphrt.compile.split.effects import name_of
from graphrt.compile.trace.sizes import value_of


def select_elements(graph: fx.Graph) -> None:
    """Let what takes an element of `x.unbind(dim)` select it, which is the same view."""
    for node in list(graph.nodes):
        if name_of(node) != "unbind" or node.op == "placeholder":
            continue
        given = _arguments(node)
        for user in list(node.users):
            index = user.args[1] if name_of(user) == "getitem" else None
            if given is None or not isinstance(index, int) or user.args[0] is not node:
                continue
            with graph.inserting_before(user):
                tensor, dim = given
                element = graph.call_method("select", (tensor, dim, index))
            element.meta = dict(user.meta)
            user.replace_all_uses_with(element)
            graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor and the dimension."""
    tensor: Any = node.args[0] if node.args else node.kwargs.get("input")
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(tensor, fx.Node) or value_of(tensor) is None or not isinstance(dim, int):
        return None
    return tensor, dim
