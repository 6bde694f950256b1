"""Cutting a traced graph at its splitting operators."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphrt.compile.split.contexts import check_settings, drop_inference_mode
from graphrt.compile.split.effects import (
    check_metadata,
    check_roots,
    check_transforms,
    forward_updates,
    written,
)
from graphrt.compile.split.groups import NodeGroup, Roles, is_allocation, partition
from graphrt.compile.trace.sizes import is_number, placeholders, results_of
from graphrt.compile.trace.user_lines import innermost_line
from graphrt.core.capture.refusals import Source, stands_for


@dataclass(frozen=True)
class Piece:
    """A part of a traced graph, as a graph of its own: compiled and captured, or `splitting`.

    `inputs` and `outputs` are the nodes of the whole graph that it takes and gives. `graph` takes
    the inputs with the indices `taken`. It returns new tensors only, none of which is a view of
    another or of an input: one as it is, several as a tuple, no tensor as None. `written` are the
    indices of the arguments of `graph` that it may write. If `outputs` has views, the graph `views`
    makes all outputs from the inputs and the results of `graph`. With `returned`, the forward
    returns one of these results, or a view of one.
    """

    index: int
    """Its place among all pieces, splitting ones too."""
    splitting: bool
    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    taken: tuple[int, ...]
    written: tuple[int, ...] = ()
    views: fx.GraphModule | None = None
    returned: bool = False

    @property
    def name(self) -> str:
        return f"piece_{self.index}"

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing: its outputs are views of its inputs."""
        return all(n.op in ("placeholder", "output") for n in self.graph.graph.nodes)

    def with_views(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function from the inputs to the outputs, which runs `call` in place of `graph`."""
        if self.views is None:
            return call  # without views, `graph` takes all inputs
        make = uncompiled(self.views)
        taken, count = self.taken, returned_count(self.graph)

        def run(*args: Any) -> Any:
            results = call(*[args[index] for index in taken])
            if count is None:
                return make(*args)
            return make(*args, results) if count == 1 else make(*args, *results)

        return run


def split(whole: fx.GraphModule, is_splitting: Callable[[fx.Node], bool]) -> list[Piece]:
    """The pieces of a graph, in order.

    It changes the graph itself (`forward_updates`, for one). Raises `CompileError` and `AliasError`
    for a graph that would compute something else in pieces.
    """
    graph = whole.graph
    check_metadata(graph)
    check_transforms(graph)
    check_settings(graph, is_splitting)
    drop_inference_mode(graph)
    forward_updates(graph)
    roles = Roles.of(graph, is_splitting)
    check_roots(graph, roles.views)
    return _Cut(whole, partition(graph, is_splitting, roles), roles).pieces()


def written_between(
    whole: fx.GraphModule, is_splitting: Callable[[fx.Node], bool]
) -> tuple[int, ...]:
    """The indices of the inputs that are written by nodes other than splitting ones."""
    roles = Roles.of(whole.graph, is_splitting)
    changed = {
        root
        for node in whole.graph.nodes
        if not is_splitting(node)
        for root in with_roots(written(node), roles)
    }
    return tuple(index for index, node in enumerate(placeholders(whole)) if node in changed)


def written_after_read(
    whole: fx.GraphModule, is_splitting: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """The first node that writes memory which computations before it read; None if none does.
    Splitting operators read when they are called, and allocations read nothing."""
    roles = Roles.of(whole.graph, is_splitting)
    read: set[fx.Node] = set()
    nodes: list[fx.Node] = [*whole.graph.nodes]
    for node in nodes:
        if not read.isdisjoint(with_roots(written(node), roles)):
            return node
        if (
            node in roles.views
            or node in roles.numbers
            or is_splitting(node)
            or is_allocation(node)
        ):
            continue
        read |= {*node.all_input_nodes, *roles.roots([node])}
    return None


def with_roots(nodes: Sequence[fx.Node], roles: Roles) -> set[fx.Node]:
    """The nodes; of a view also the node of its base tensor."""
    return {*nodes, *roles.roots(n for n in nodes if n in roles.views)}


class _Cut:
    """Makes a piece of each group.

    A compiled piece takes no view from another piece. It takes the tensor behind the view and makes
    the view again, so that it sees all writes to the tensor and other pieces see its own. Splitting
    operators take the views themselves.
    """

    def __init__(self, whole: fx.GraphModule, groups: Sequence[NodeGroup], roles: Roles) -> None:
        self._whole = whole
        self._groups = groups
        self._roles = roles
        self._order = {node: index for index, node in enumerate(whole.graph.nodes)}
        self._group_of = {node: group for group in groups for node in group.nodes}
        # id of a group -> its nodes that a later piece takes or the forward returns.
        self._read_later: dict[int, set[fx.Node]] = {id(group): set() for group in groups}
        # The tensors that the forward returns, or returns a view of.
        self._returned: set[fx.Node] = set()

    def pieces(self) -> list[Piece]:
        output = next(iter(reversed(self._whole.graph.nodes)))
        self._note_reads(output.all_input_nodes)
        self._returned = self._roles.roots([output])
        numbered = list(enumerate(self._groups))
        # From the last to the first: a group's outputs are known once all their readers are.
        return [self._piece(index, group) for index, group in reversed(numbered)][::-1]

    def _note_reads(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node in self._group_of:
                self._read_later[id(self._group_of[node])].add(node)

    def _piece(self, index: int, group: NodeGroup) -> Piece:
        """The piece of a group, once the pieces behind it have noted what they read of it."""
        outputs = tuple(sorted(self._read_later[id(group)], key=self._order.__getitem__))
        steps = [node for node in group.nodes if node not in self._roles.views]
        graph_inputs, body = self._closure(steps, group)
        view_inputs: list[fx.Node] = []
        view_nodes: list[fx.Node] = []
        view_outputs = [node for node in outputs if node in self._roles.views]
        if view_outputs:
            view_inputs, view_nodes = self._closure(view_outputs, group)
        read = set(view_inputs) | set(outputs)
        results = [node for node in steps if node in read]
        inputs = tuple(
            dict.fromkeys([*graph_inputs, *(n for n in view_inputs if n not in set(steps))])
        )
        self._note_reads(inputs)
        name = f"Piece{index}"
        writes = {n for node in steps for n in with_roots(written(node), self._roles)}
        graph = _graph(self._whole, graph_inputs, body, results, name)
        views = None
        if view_outputs:
            taken = [*inputs, *results]
            views = _graph(self._whole, taken, view_nodes, outputs, f"{name}Views")
        return Piece(
            index,
            group.splitting,
            graph,
            inputs,
            outputs,
            taken=tuple(inputs.index(n) for n in graph_inputs),
            written=tuple(i for i, n in enumerate(graph_inputs) if n in writes),
            views=views,
            returned=not self._returned.isdisjoint(results),
        )

    def _closure(
        self, nodes: Sequence[fx.Node], group: NodeGroup
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """The inputs of a graph that computes `nodes` of a group; and the nodes that it runs, in
        order: `nodes` themselves with the numbers and views that they need."""
        wanted = set(nodes)
        taken: dict[fx.Node, None] = {}
        body: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            stack = [(node, False)]
            while stack:
                n, ready = stack.pop()
                if n in body:
                    continue
                if ready:
                    body[n] = None
                    continue
                stack.append((n, True))
                for each in reversed(n.all_input_nodes):
                    if each in wanted or self._is_recomputed(each, group):
                        stack.append((each, False))
                    elif not _is_submodule(self._whole, each):
                        taken[each] = None

        for node in nodes:
            visit(node)
        # Sizes first, as in Dynamo's graphs.
        return sorted(taken, key=lambda n: not is_number(n)), list(body)

    def _is_recomputed(self, node: fx.Node, group: NodeGroup) -> bool:
        """Whether a piece computes a node itself, and does not take its result from another piece:
        all numbers; all views, but in a splitting piece only those of its own group."""
        if node in self._roles.numbers:
            return True
        if node not in self._roles.views:
            return False
        return not group.splitting or self._group_of.get(node) is group


def _graph(
    whole: fx.GraphModule,
    inputs: Sequence[fx.Node],
    body: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    name: str,
) -> fx.GraphModule:
    """A graph of copies of the nodes `body` of `whole`, which takes `inputs` and returns `outputs`:
    one as it is, several as a tuple, none as None."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = _meta(node)
    submodules: dict[str, Any] = {}
    for node in body:
        for n in node.all_input_nodes:
            # The graphs of a higher-order operator come along; tensors are inputs, as weights are.
            if n not in copies and n.op == "get_attr":
                submodules[str(n.target)] = attribute_of(whole, str(n.target))
                copies[n] = graph.node_copy(n)
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = _meta(node)
    results = tuple(copies[n] for n in outputs)
    graph.output(results[0] if len(results) == 1 else results or None)
    piece = fx.GraphModule(submodules, graph, class_name=name)
    remember_lines(piece)
    return piece


def _is_submodule(whole: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(
        attribute_of(whole, str(node.target)), torch.nn.Module
    )


def _meta(node: fx.Node) -> dict[str, Any]:
    meta = copy(node.meta)
    meta.pop("grapharg", None)
    return meta


def attribute_of(graph: fx.GraphModule, target: str) -> Any:
    """The value that a `get_attr` node with this dotted `target` reads."""
    value: Any = graph
    for part in target.split("."):
        value = getattr(value, part)
    return value


def uncompiled(graph: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the operators of a graph one by one."""
    forward: Callable[..., Any] = graph.forward
    return forward


def returned_count(piece: fx.GraphModule) -> int | None:
    """How many values a piece returns; None for nothing."""
    returned = results_of(piece)
    if returned is None:
        return None
    return len(returned) if isinstance(returned, tuple) else 1


def remember_lines(piece: fx.GraphModule) -> None:
    """Let errors raised while `piece` runs uncompiled name the line of the forward."""
    # Weak: `line_of` is kept, and would keep the piece alive.
    graph = weakref.ref(piece)
    sources: dict[int, Source | None] = {}

    def line_of(line: int) -> Source | None:
        module = graph()
        if line not in sources and module is not None:
            first = module.forward.__code__.co_firstlineno
            sources.update({first + each: source for each, source in _lines(module).items()})
        return sources.get(line)

    forget = stands_for(piece.forward.__code__.co_filename, line_of)
    weakref.finalize(piece, forget)


def _lines(piece: fx.GraphModule) -> dict[int, Source | None]:
    """Number of a line after that of `def` -> the forward's line for it."""
    nodes = {node.name: node for node in piece.graph.nodes}
    function = next(n for n in ast.walk(ast.parse(piece.code)) if isinstance(n, ast.FunctionDef))
    sources: dict[int, Source | None] = {}
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            # The generated code assigns None to a name after its last use: skip that.
            node = nodes.pop(target.id, None) if isinstance(target, ast.Name) else None
            if node is not None:
                line = statement.lineno - function.lineno
                sources.setdefault(line, innermost_line(node.stack_trace or ""))
    return sources
