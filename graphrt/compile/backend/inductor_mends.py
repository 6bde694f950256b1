"""Pieces that Inductor (torch 2.13) gets wrong, and that are not compiled."""

from __future__ import annotations

from torch import fx

from graphrt.compile.split.effects import written
from graphrt.compile.trace.sizes import is_number


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
