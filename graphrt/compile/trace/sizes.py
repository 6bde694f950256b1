"""Numbers in a traced graph: all are computed from the sizes that the graph is given."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.traces import computed, expressions

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def value_of(node: fx.Node) -> Any:
    """The fake tensor, or the number, that the trace had for a node; None where it kept none."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def is_number(node: fx.Node) -> bool:
    """Whether a node stands for a Python number, symbolic or not."""
    return isinstance(value_of(node), NUMBERS)


def floating(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute numbers from numbers only: every piece can compute them itself."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not is_number(node):
            continue
        if all(
            n in found or (n.op == "placeholder" and is_number(n)) for n in node.all_input_nodes
        ):
            found.add(node)
    return found


def resolve_sizes(graph: fx.Graph) -> None:
    """Rewrite what asks tensors for their sizes into the sizes that the graph is given.

    `x.size()` becomes a tuple of numbers and its elements those numbers, so that no piece takes a
    tensor only to ask for its size. Static sizes become constants. What depends on data stays.
    """
    known = _size_placeholders(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    made: dict[Any, Any] = dict(known)
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        found = _resolved(graph, node, made, first)
        if found is not None:
            _replace(node, found)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and _asks_only(node):
            graph.erase_node(node)
    graph.lint()


def _resolved(graph: fx.Graph, node: fx.Node, made: dict[Any, Any], before: fx.Node) -> Any:
    """The number, or the tuple of numbers, that takes the place of a node; None if it stays."""
    value = value_of(node)
    if isinstance(value, torch.Size) or _are_numbers(value):
        numbers = tuple(_number(graph, v, made, before) for v in value)
        return numbers if all(n is not None for n in numbers) else None
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        return None
    number = _number(graph, value, made, before)
    return None if number is node else number


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, NUMBERS) for v in value)


def _size_placeholders(graph: fx.Graph) -> dict[Any, fx.Node]:
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value_of(node), torch.SymInt):
            found.setdefault(expressions(value_of(node))[0], node)
    return found


def _number(graph: fx.Graph, value: Any, made: dict[Any, Any], before: fx.Node) -> Any:
    """`value` as a constant or a node that computes it from sizes; None if that is impossible."""
    if not isinstance(value, torch.SymInt):
        return value
    expression, _ = expressions(value)
    if expression.is_number:
        return int(expression)
    if expression in made:
        return made[expression]
    if not all(symbol in made for symbol in expression.free_symbols):
        return None
    with graph.inserting_before(before):
        made[expression] = _computed(graph, expression, made, value)
    return made[expression]


def _computed(graph: fx.Graph, expression: Any, made: dict[Any, Any], value: Any) -> fx.Node:
    tracer = fx.proxy.GraphAppendingTracer(graph)
    symbols = {s: fx.Proxy(made[s], tracer) for s in expression.free_symbols}
    before = set(graph.nodes)
    node = computed(expression, symbols).node
    for new in graph.nodes:
        if new not in before:
            # Of the steps on the way only this is known: they are integers.
            new.meta.setdefault("example_value", value)
    node.meta["example_value"] = value
    return node


def _replace(node: fx.Node, value: Any) -> None:
    """Let every user of `node` take `value`, a number, a node or a tuple of them, instead."""
    for user in list(node.users):
        if isinstance(value, tuple) and _is_element_of(user, node):
            continue  # it is replaced as a number itself
        user.args = fx.node.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda n: value if n is node else n)


def _is_element_of(user: fx.Node, node: fx.Node) -> bool:
    return user.target is operator.getitem and user.args[0] is node


def _asks_only(node: fx.Node) -> bool:
    """Whether a node has no effect besides telling a number."""
    value = value_of(node)
    return isinstance(value, NUMBERS) or _are_numbers(value)
