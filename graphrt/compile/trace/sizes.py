"""Numbers in a traced graph: all are computed from the sizes that the graph is given. Also whether
a graph is right for a size of 1.

The trace takes each size to be above 1: no operator broadcasts or squeezes it. A branch of Python
on a size of 1 is a condition of the trace. Whether operators do something else at 1 shows in the
shapes of their results, when the graph is run again at that size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.traces import (
    computed,
    errors_told_once,
    expressions,
    fake_tensors,
)
from graphrt.core.base.log import logger
from graphrt.core.base.texts import error_line

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def value_of(node: fx.Node) -> Any:
    """The fake tensor, or the number, that the trace had for a node; None where it kept none."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def results_of(graph: fx.GraphModule) -> Any:
    """The value that a graph returns."""
    return next(iter(reversed(graph.graph.nodes))).args[0]


def sized(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A number of the trace at these sizes of its symbols; for a tensor, an uninitialised one of
    that shape. Raises `LookupError` where it depends on data."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            [sized(size, sizes) for size in value.shape],
            [sized(stride, sizes) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    if not isinstance(value, torch.SymInt):
        return value
    expression = expressions(value)[0].subs(sizes)
    if expression.free_symbols:
        raise LookupError(f"{value} depends on data")
    return int(expression)


def is_number(node: fx.Node) -> bool:
    """Whether a node stands for a Python number, symbolic or not."""
    return isinstance(value_of(node), NUMBERS)


def number_computations(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute a number from numbers alone: each piece that needs one computes it."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not is_number(node):
            continue
        if all(
            n in numbers or (n.op == "placeholder" and is_number(n)) for n in node.all_input_nodes
        ):
            numbers.add(node)
    return numbers


def resolve_sizes(graph: fx.Graph) -> None:
    """Replace calls that ask tensors for their sizes by the sizes that the graph is given.

    `x.size()` becomes a tuple of numbers and its elements those numbers, so that no piece takes a
    tensor only to ask for its size. Static sizes become constants. What depends on data stays.
    """
    sizes = _size_placeholders(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    by_expression: dict[Any, Any] = dict(sizes)
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        number = _resolved(graph, node, by_expression, first)
        if number is not None:
            _replace(node, number)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and _asks_only(node):
            graph.erase_node(node)
    graph.lint()


def _resolved(
    graph: fx.Graph, node: fx.Node, by_expression: dict[Any, Any], before: fx.Node
) -> Any:
    """The number, or the tuple of numbers, that takes the place of a node; None if it stays.

    `by_expression` has the node that gives each size so far. New nodes go `before` that node."""
    value = value_of(node)
    if isinstance(value, torch.Size) or _are_numbers(value):
        numbers = tuple(_number(graph, v, by_expression, before) for v in value)
        return numbers if all(n is not None for n in numbers) else None
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        return None
    number = _number(graph, value, by_expression, before)
    return None if number is node else number


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, NUMBERS) for v in value)


def _size_placeholders(graph: fx.Graph) -> dict[Any, fx.Node]:
    by_size: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value_of(node), torch.SymInt):
            by_size.setdefault(expressions(value_of(node))[0], node)
    return by_size


def _number(graph: fx.Graph, value: Any, by_expression: dict[Any, Any], before: fx.Node) -> Any:
    """`value` as a constant or a node that computes it from sizes; None if that is impossible."""
    if not isinstance(value, torch.SymInt):
        return value
    expression, _ = expressions(value)
    if expression.is_number:
        return int(expression)
    if expression in by_expression:
        return by_expression[expression]
    if not all(symbol in by_expression for symbol in expression.free_symbols):
        return None
    with graph.inserting_before(before):
        by_expression[expression] = _computed(graph, expression, by_expression, value)
    return by_expression[expression]


def _computed(
    graph: fx.Graph, expression: Any, by_expression: dict[Any, Any], value: Any
) -> fx.Node:
    tracer = fx.proxy.GraphAppendingTracer(graph)
    symbols = {s: fx.Proxy(by_expression[s], tracer) for s in expression.free_symbols}
    before = set(graph.nodes)
    node = computed(expression, symbols).node
    for new in graph.nodes:
        if new not in before:
            # Nodes for intermediate results get this value too, to mark them as integers.
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
    """Whether a node only gives numbers, and has no other effect."""
    value = value_of(node)
    return isinstance(value, NUMBERS) or _are_numbers(value)


# At sizes of 1 ---------------------------------------------------------------------------------


def does_the_same(graph: fx.GraphModule, sizes: Mapping[Any, int]) -> bool:
    """Whether each result has the shape and dtype, or the number its value, that the trace predicts
    for these `sizes` of its symbols. Runs on tensors without memory; False if that raises."""
    try:
        with errors_told_once(), fake_tensors(), torch.no_grad():
            _Rerun(graph, sizes).run()
    except Exception as error:
        # Any error counts, as there was none at the sizes of the trace. It costs one more trace.
        at = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        logger.info(f"not served by the general code: {at}: {error_line(error)}")
        return False
    return True


class _OtherResult(Exception):
    """A result has another shape."""


class _Rerun(fx.Interpreter):
    """Runs a graph with `sizes` of its symbols; raises `_OtherResult` if a result is not as the
    trace predicts."""

    def __init__(self, graph: fx.GraphModule, sizes: Mapping[Any, int]) -> None:
        super().__init__(graph)
        self._sizes = dict(sizes)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return sized(value_of(n), self._sizes)
        result = super().run_node(n)
        if n.op == "get_attr":
            return sized(result, self._sizes)
        if n.op != "output":
            self._compare(result, value_of(n))
        return result

    def _compare(self, got: Any, traced: Any) -> None:
        if isinstance(traced, tuple | list):
            if len(got) != len(traced):
                raise _OtherResult(f"{len(got)} results, {len(traced)} in the trace")
            for one, other in zip(got, traced, strict=True):
                self._compare(one, other)
        elif isinstance(traced, torch.Tensor):
            shape = tuple(sized(size, self._sizes) for size in traced.shape)
            if tuple(got.shape) != shape or got.dtype is not traced.dtype:
                ours = f"{got.dtype} {tuple(got.shape)}"
                raise _OtherResult(f"{ours}, {traced.dtype} {shape} by the trace")
        elif isinstance(traced, torch.SymInt | int) and got != sized(traced, self._sizes):
            raise _OtherResult(f"{got}, {sized(traced, self._sizes)} by the trace")
