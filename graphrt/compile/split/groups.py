"""Which nodes of a traced graph run together, and which operators split it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from graphrt.compile.private_torch.operators import operator_names, overload_name, overloads
from graphrt.compile.split.effects import elements, views, written
from graphrt.compile.trace.sizes import is_number, number_computations

_ALLOCATIONS = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "zeros", "zeros_like"),
        *("ones", "ones_like", "full", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)


@dataclass(eq=False)
class NodeGroup:
    """Nodes that run as one piece. With `splitting` they run eagerly, between captured graphs."""

    splitting: bool
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Roles:
    """The nodes that are bound to no piece: `numbers`, which each piece computes itself; `views`,
    which each can make again; `elements` of tuples, which belong to the node of the tuple."""

    numbers: frozenset[fx.Node]
    views: frozenset[fx.Node]
    elements: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, is_splitting: Callable[[fx.Node], bool]) -> Roles:
        taken = elements(graph)
        return cls(
            frozenset(number_computations(graph)),
            frozenset(views(graph, is_splitting, taken)),
            frozenset(taken),
        )

    def roots(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The inputs of `nodes`, each view replaced by the tensor behind it."""
        roots: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = [n for node in nodes for n in node.all_input_nodes]
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.views or n in self.numbers:
                stack += n.all_input_nodes
            else:
                roots.add(n)
        return roots


def partition(
    graph: fx.Graph, is_splitting: Callable[[fx.Node], bool], roles: Roles
) -> list[NodeGroup]:
    """The groups of nodes that run together, in order; numbers belong to none.

    Consecutive splitting operators share a group. An element of a tuple is in the group of the node
    that makes the tuple. A group of only allocations and views is appended to the captured group
    before it, if its inputs are computed by then. A group of only views is otherwise appended to
    the group before it, of whatever kind.
    """
    groups: list[NodeGroup] = []
    group_of: dict[fx.Node, NodeGroup] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in roles.numbers:
            continue
        if node in roles.elements and node.args[0] in group_of:
            group = group_of[node.args[0]]
        else:
            splitting = is_splitting(node)
            if not groups or groups[-1].splitting is not splitting:
                groups.append(NodeGroup(splitting))
            group = groups[-1]
        group.nodes.append(node)
        group_of[node] = group
    return _with_neighbours_joined(
        _with_views_moved(_with_allocations_moved(groups, group_of, roles), roles)
    )


def _with_allocations_moved(
    groups: Sequence[NodeGroup], group_of: dict[fx.Node, NodeGroup], roles: Roles
) -> list[NodeGroup]:
    """Move allocations between two splitting operators, such as an output's, to the captured group
    before: a graph of its own for each would cost a replay and compute nothing."""
    kept: list[NodeGroup] = []
    for group in groups:
        before = next((p for p in reversed(kept) if not p.splitting), None)
        allocates_only = all(node in roles.views or is_allocation(node) for node in group.nodes)
        if before is None or group.splitting or not allocates_only:
            kept.append(group)
            continue
        earlier = set(map(id, kept[: kept.index(before) + 1]))
        needed = [n for n in roles.roots(group.nodes) if n in group_of]
        if all(id(group_of[n]) in earlier or group_of[n] is group for n in needed):
            before.nodes += group.nodes
            group_of.update(dict.fromkeys(group.nodes, before))
        else:
            kept.append(group)
    return kept


def _with_views_moved(groups: Sequence[NodeGroup], roles: Roles) -> list[NodeGroup]:
    """Move groups of views alone to a neighbour: each would be captured as an empty graph."""
    kept: list[NodeGroup] = []
    leading: list[fx.Node] = []
    for group in groups:
        if not all(node in roles.views for node in group.nodes):
            kept.append(group)
        elif kept:
            kept[-1].nodes += group.nodes
        else:
            leading += group.nodes
    if leading and kept:
        kept[0].nodes[:0] = leading
    return kept or list(groups)


def _with_neighbours_joined(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Join groups of one kind that became neighbours because the group between them was moved."""
    joined: list[NodeGroup] = []
    for group in groups:
        if joined and joined[-1].splitting is group.splitting:
            joined[-1].nodes += group.nodes
        else:
            joined.append(group)
    return joined


def is_allocation(node: fx.Node) -> bool:
    """Whether a node only makes a tensor, and reads the data of none."""
    target = node.target
    operator = overload_name(target)
    if operator is not None:
        name = operator.removeprefix("aten::")
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        module = getattr(target, "__module__", None)
        if not (isinstance(target, str) or module is None or module.startswith("torch")):
            return False  # a function of the user's with such a name
    if name not in _ALLOCATIONS or written(node):
        return False
    # `empty_like(x)` reads only the shape of x; `full(shape, x)` reads the data of x.
    read = set(node.all_input_nodes)
    if name.startswith("new_") or name.endswith("_like"):
        read -= {node.args[0] if node.args else node.kwargs.get("input")}
    return all(map(is_number, read))


DEFAULT_SPLITTING_OPS = ("graphrt::paged_decode", "graphrt::attend")
"""Besides every operator with the tag `cudagraph_unsafe`, which `opaque` gives to its own."""


def splits_at(names: Collection[str] | None) -> Callable[[fx.Node], bool]:
    """A test for nodes of the operators `names`: "ns::op", or "ns::op.overload" for one overload.

    None stands for `DEFAULT_SPLITTING_OPS` and all operators tagged `cudagraph_unsafe`.
    """
    listed = frozenset(DEFAULT_SPLITTING_OPS if names is None else names)

    def is_splitting(node: fx.Node) -> bool:
        node_names = names_of(node)
        if not listed.isdisjoint(node_names):
            return True
        return names is None and bool(node_names) and _is_unsafe(node)

    return is_splitting


def splitting_names(graph: fx.Graph, names: Collection[str] | None) -> frozenset[str]:
    """The operators of a graph at which `names` split it."""
    is_splitting = splits_at(names)
    return frozenset(names_of(node)[0] for node in graph.nodes if is_splitting(node))


def names_of(node: fx.Node) -> tuple[str, ...]:
    """The names by which `splitting_ops` may list a node's operator; () if it calls none."""
    return operator_names(node.target)


def _is_unsafe(node: fx.Node) -> bool:
    return any(torch.Tag.cudagraph_unsafe in each.tags for each in overloads(node.target))
