"""Cutting a traced graph at its splitting operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch import overload_name
from graphrt.compile.trace import floating

_ALLOCATIONS = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "zeros", "zeros_like"),
        *("ones", "ones_like", "full", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)


@dataclass
class NodeGroup:
    """Consecutive nodes that run as one piece; `splitting` ones stay out of graphs."""

    splitting: bool
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """One group as a graph of its own.

    `inputs` and `outputs` are the nodes of the whole graph that it takes and gives. It returns one
    tensor as it is, several as a tuple, and None where there is nothing to return.
    """

    index: int
    splitting: bool
    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        return f"piece_{self.index}"


def split(whole: fx.GraphModule, is_splitting: Callable[[fx.Node], bool]) -> list[Piece]:
    """The pieces of a graph, in order; the graph itself stays as it is."""
    graph = whole.graph
    numbers = floating(graph)
    groups = partition(graph, is_splitting, numbers)
    return [_extract(whole, index, group, numbers) for index, group in enumerate(groups)]


def partition(
    graph: fx.Graph, is_splitting: Callable[[fx.Node], bool], numbers: set[fx.Node]
) -> list[NodeGroup]:
    """Which nodes run together.

    Splitting operators that follow each other share a group. An element of a tuple belongs to what
    makes the tuple. A group of nothing but allocations becomes the end of the captured group before
    it, if what it needs is there by then. Floating `numbers` belong to no group.
    """
    groups: list[NodeGroup] = []
    home: dict[fx.Node, NodeGroup] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in numbers:
            continue
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, fx.Node) and producer in home:
            group = home[producer]
        else:
            splitting = is_splitting(node)
            if not groups or groups[-1].splitting is not splitting:
                groups.append(NodeGroup(splitting))
            group = groups[-1]
        group.nodes.append(node)
        home[node] = group
    return _joined(_with_allocations_moved(groups, home))


def _with_allocations_moved(
    groups: list[NodeGroup], home: dict[fx.Node, NodeGroup]
) -> list[NodeGroup]:
    kept: list[NodeGroup] = []
    for group in groups:
        before = next((p for p in reversed(kept) if not p.splitting), None)
        if before is None or group.splitting or not all(map(is_allocation, group.nodes)):
            kept.append(group)
            continue
        there = set(map(id, kept[: kept.index(before) + 1]))
        needed = {n for node in group.nodes for n in node.all_input_nodes if n in home}
        if all(id(home[n]) in there or home[n] is group for n in needed):
            before.nodes += group.nodes
            home.update(dict.fromkeys(group.nodes, before))
        else:
            kept.append(group)
    return kept


def _joined(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    joined: list[NodeGroup] = []
    for group in groups:
        if joined and joined[-1].splitting is group.splitting:
            joined[-1].nodes += group.nodes
        else:
            joined.append(group)
    return joined


def is_allocation(node: fx.Node) -> bool:
    """Whether a node only makes a tensor that something else will fill."""
    target = node.target
    operator = overload_name(target)
    if operator is not None:
        return operator.removeprefix("aten::") in _ALLOCATIONS
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = getattr(target, "__module__", None)
    known = isinstance(target, str) or module is None or module.startswith("torch")
    return known and name in _ALLOCATIONS


def _extract(whole: fx.GraphModule, index: int, group: NodeGroup, numbers: set[fx.Node]) -> Piece:
    inside = set(group.nodes)
    nodes = _with_numbers(whole.graph, group, numbers)
    attributes = {
        n: getattr(whole, str(n.target), None)
        for node in nodes
        for n in node.all_input_nodes
        if n.op == "get_attr"
    }
    # A submodule of a higher-order operator comes along; a tensor is an input like a weight.
    submodules = {n: m for n, m in attributes.items() if isinstance(m, torch.nn.Module)}
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for n in node.all_input_nodes:
            if n not in inside and n not in numbers and n not in submodules:
                inputs[n] = None
    outputs = tuple(n for n in group.nodes if any(user not in inside for user in n.users))

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = _meta(node)
    for node in submodules:
        copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = _meta(node)
    results = tuple(copies[n] for n in outputs)
    graph.output(results[0] if len(results) == 1 else results or None)
    root: Any = {str(n.target): module for n, module in submodules.items()}
    module = fx.GraphModule(root, graph, class_name=f"Piece{index}")
    return Piece(index, group.splitting, module, tuple(inputs), outputs)


def _with_numbers(graph: fx.Graph, group: NodeGroup, numbers: set[fx.Node]) -> list[fx.Node]:
    """The nodes of a group, after what computes the numbers that they use."""
    wanted = set(group.nodes)
    stack = list(group.nodes)
    while stack:
        for n in stack.pop().all_input_nodes:
            if n in numbers and n not in wanted:
                wanted.add(n)
                stack.append(n)
    return [n for n in graph.nodes if n in wanted and n in numbers] + group.nodes


def _meta(node: fx.Node) -> dict[str, Any]:
    meta = copy(node.meta)
    meta.pop("grapharg", None)
    return meta


def attribute_of(graph: fx.GraphModule, target: str) -> Any:
    """What a node `get_attr` of this dotted `target` stands for."""
    found: Any = graph
    for part in target.split("."):
        found = getattr(found, part)
    return found


def returned_count(piece: fx.GraphModule) -> int | None:
    """How many values a piece returns; None for nothing."""
    returned = next(iter(reversed(piece.graph.nodes))).args[0]
    if returned is None:
        return None
    return len(returned) if isinstance(returned, tuple) else 1
