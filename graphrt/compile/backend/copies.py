"""Where Inductor (torch 2.13) would lose the old value of an input that a piece writes."""

from __future__ import annotations

from torch import fx

from graphrt.compile.split.effects import written
from graphrt.compile.trace.sizes import is_number


def copies_what_it_writes(piece: fx.GraphModule) -> bool:
    """Whether a piece copies one input into another and writes both: `x.copy_(y); y.neg_()`.

    Inputs are written at the end of the code, one after the other, and a pass takes the copy for
    the input itself, which may have its new value by then.
    """
    nodes = piece.graph.nodes
    changed = {root for node in nodes for n in written(node) for root in _sources(n)}
    if len(changed) < 2:
        return False
    for node in nodes:
        into = {root for n in written(node) for root in _sources(n)}
        if into and any(root in changed - into for n in _read(node) for root in _sources(n)):
            return True
    return False


def _read(node: fx.Node) -> list[fx.Node]:
    into = set(written(node))
    return [n for n in node.all_input_nodes if n not in into]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The input that a node may be, or be a view or a copy of: an operator of several tensors
    computes something new."""
    while node.op != "placeholder":
        tensors = [n for n in node.all_input_nodes if not is_number(n)]
        if len(tensors) != 1:
            return []
        node = tensors[0]
    return [node]
