"""The way from a call's arguments to a graph's inputs, and from its outputs to the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.traces import expressions
from graphrt.compile.trace.dynamo import Traced
from graphrt.compile.trace.parameters import Leaf
from graphrt.compile.trace.sizes import placeholders, results_of, value_of

Probe = tuple[Sequence[Leaf], tuple[Any, ...], dict[str, Any]]
"""A call with example tensors: its leaves, its positional and its keyword arguments."""


@dataclass(frozen=True)
class Interface:
    """What the forward does around its graph, in a form that generated code can repeat.

    `inputs` has one entry for each placeholder: Python text that reads it from the parameters, or
    a weight. `result` is what the forward returns, with an `Output` for each tensor of the graph.
    """

    inputs: tuple[str | Weight, ...]
    result: Any


@dataclass(frozen=True)
class Output:
    """The graph's output of this index."""

    index: int


@dataclass(frozen=True)
class Argument:
    """An argument that the forward returns as it is."""

    path: str


@dataclass(frozen=True)
class Weight:
    """A tensor of the module. Its `repr` is unique, as `interface` compares by `repr`."""

    tensor: torch.Tensor

    def __repr__(self) -> str:
        return f"weight {id(self.tensor)}"


class _Unclear(Exception):
    """Generated code cannot do what the forward does around its graph."""


def argument_paths(traced: Traced, probe: Probe) -> dict[fx.Node, str]:
    """The placeholders that are arguments, with the path of each in the call."""
    leaves, args, kwargs = probe
    inputs = traced.inputs_of(*args, **kwargs)
    paths = _paths(leaves)
    nodes = placeholders(traced.graph)
    return {n: paths[id(v)] for n, v in zip(nodes, inputs, strict=True) if id(v) in paths}


def interface(traced: Traced, probes: Sequence[Probe]) -> tuple[Interface | None, str]:
    """How the forward calls its graph; None, and why, where only Dynamo's code can do it.

    Dynamo's code is run once for each probe, with a function in place of the graph that notes its
    inputs. Where the results differ between two probes, the code depends on their sizes.
    """
    if traced.assigned:
        return None, f"the forward assigns to {', '.join(traced.assigned)}"
    try:
        interfaces = [_probe(traced, *probe) for probe in probes]
    except Exception as error:
        # `Output` supports nothing that a forward may do with the results of its graph.
        return None, f"the forward computes with what its graph returns ({error!r})"
    # Compared by `repr`, as True == 1 and a comparison of tensors is a tensor.
    if len(set(map(repr, interfaces))) == 1:
        return interfaces[0], ""
    return None, "two example batches do not tell how the forward calls its graph"


def _probe(
    traced: Traced, leaves: Sequence[Leaf], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Interface:
    graph_inputs: list[Any] = []
    nodes, results = placeholders(traced.graph), results_of(traced.graph)

    def note_inputs(*inputs: Any) -> tuple[Any, ...]:
        graph_inputs.extend(inputs)
        given = dict(zip(nodes, inputs, strict=True))
        return tuple(given.get(node, Output(index)) for index, node in enumerate(results))

    with torch.no_grad():
        returned = traced.forward_around(note_inputs)(*args, **kwargs)
    paths = _paths(leaves)
    sizes = _size_texts(nodes, graph_inputs, paths)
    inputs = tuple(
        _source(node, value, paths, sizes) for node, value in zip(nodes, graph_inputs, strict=True)
    )
    weights = {id(value.tensor): value for value in inputs if isinstance(value, Weight)}
    return Interface(inputs, _described(returned, paths, weights))


def _paths(leaves: Sequence[Leaf]) -> dict[int, str]:
    return {id(leaf.value): leaf.path for leaf in leaves if isinstance(leaf.value, torch.Tensor)}


def _size_texts(
    nodes: Sequence[fx.Node], values: Sequence[Any], paths: dict[int, str]
) -> dict[Any, str]:
    """Symbol -> text that reads it from the arguments: "ids.size(0)"."""
    texts: dict[Any, str] = {}
    for node, tensor in zip(nodes, values, strict=True):
        fake, path = value_of(node), paths.get(id(tensor))
        if path is None or not isinstance(fake, torch.Tensor):
            continue
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                texts.setdefault(expressions(size)[0], f"{path}.size({dim})")
    return texts


def _source(
    node: fx.Node, value: Any, paths: dict[int, str], sizes: dict[Any, str]
) -> str | Weight:
    if isinstance(value, torch.Tensor):
        return paths.get(id(value)) or Weight(value)
    symbolic = value_of(node)
    if isinstance(symbolic, torch.SymInt) and (expression := expressions(symbolic)[0]) in sizes:
        return sizes[expression]
    raise _Unclear(node.name)


def _described(value: Any, paths: dict[int, str], weights: dict[int, Weight]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_described(v, paths, weights) for v in value)
    if type(value) is dict:
        return {key: _described(v, paths, weights) for key, v in value.items()}
    if isinstance(value, torch.Tensor):
        if id(value) in paths:
            return Argument(paths[id(value)])
        if id(value) in weights:
            return weights[id(value)]
        raise _Unclear("a tensor from elsewhere")
    if isinstance(value, Output) or value is None or type(value) in (int, float, str, bool):
        return value
    raise _Unclear(type(value).__name__)
