"""Naming operators: which nodes of a graph split it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from graphrt.compile.private_torch.operators import operator_names, overloads

DEFAULT_SPLITTING_OPS = ("graphrt::paged_decode", "graphrt::attend")
"""Besides every operator with the tag `cudagraph_unsafe`, which `opaque` gives to its own."""


def splits_at(names: Collection[str] | None) -> Callable[[fx.Node], bool]:
    """Whether a node is one of the operators `names`: "ns::op", or "ns::op.overload" for one.

    None stands for `DEFAULT_SPLITTING_OPS` and all operators tagged `cudagraph_unsafe`.
    """
    listed = frozenset(DEFAULT_SPLITTING_OPS if names is None else names)

    def is_splitting(node: fx.Node) -> bool:
        found = names_of(node)
        if not listed.isdisjoint(found):
            return True
        return names is None and bool(found) and _is_unsafe(node)

    return is_splitting


def splitting_names(graph: fx.Graph, names: Collection[str] | None) -> frozenset[str]:
    """The operators of a graph at which `names` split it."""
    is_splitting = splits_at(names)
    return frozenset(names_of(node)[0] for node in graph.nodes if is_splitting(node))


def names_of(node: fx.Node) -> tuple[str, ...]:
    """How an operator may be called in a list; empty for what is none of the dispatcher's."""
    return operator_names(node.target)


def _is_unsafe(node: fx.Node) -> bool:
    return any(torch.Tag.cudagraph_unsafe in each.tags for each in overloads(node.target))
