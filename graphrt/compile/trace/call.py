"""One call of a subject: traced with examples in place of its tensors, and how it uses them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch import expressions
from graphrt.compile.trace.check import CallChecker
from graphrt.compile.trace.dims import DEFAULT_AXIS, DynamicDims, examples, sizes_of, telling_sizes
from graphrt.compile.trace.dynamo import Traced, trace
from graphrt.compile.trace.interface import Interface, Probe, argument_paths, interface
from graphrt.compile.trace.parameters import Leaf, leaves, substitute
from graphrt.compile.trace.sizes import resolve_sizes, value_of
from graphrt.compile.trace.subject import Subject


@dataclass(frozen=True)
class TracedCall:
    """A traced call, in whose graph all sizes are computed from those that it is given.

    `around` is what the forward does around its graph, None where only Dynamo's code can do it, for
    the reason `why_not_around`. `symbol` is the size of the batch axis that counts tokens, else of
    the first one; None where the graph has no such symbol. `checker` lets calls pass that the trace
    is right for.
    """

    traced: Traced
    around: Interface | None
    why_not_around: str
    checker: CallChecker
    symbol: Any
    _given: Sequence[Leaf]

    @property
    def device(self) -> torch.device:
        """Where the graph runs."""
        nodes = self.traced.graph.graph.nodes
        values = (value_of(node) for node in nodes if node.op == "placeholder")
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    def check(self) -> None:
        """Raise `RetraceError` if the trace is not right for the very call that it was made of."""
        self.checker.check(self._given)


def trace_call(subject: Subject, bound: inspect.BoundArguments, dynamic_shapes: str) -> TracedCall:
    """Trace a call like `bound`; nothing of it is run. Raises `CompileError` and its kinds."""
    given = leaves(bound)
    sizes = _sizes(subject, given)
    probes = [_probe(subject, bound, given, sizes, step) for step in (0, 1)]
    arguments, example_leaves = probes[0]
    traced = trace(
        subject.call,
        subject.parameters,
        arguments,
        example_leaves,
        subject.dims,
        dynamic_shapes,
    )
    calls: list[Probe] = [(found, b.args, dict(b.kwargs)) for b, found in probes]
    around, why_not = interface(traced, calls)
    symbols = _symbols(argument_paths(traced, calls[0]), example_leaves, subject.dims)
    resolve_sizes(traced.graph.graph)
    # Capture sizes are numbers of tokens, whatever the first argument counts.
    axis = DEFAULT_AXIS if DEFAULT_AXIS in sizes else next(iter(sizes))
    first = next((s for s, place in symbols.items() if place == (axis, 0)), None)
    checker = CallChecker(given, subject.dims, traced.conditions, symbols)
    return TracedCall(traced, around, why_not, checker, first, given)


def _sizes(subject: Subject, given: Sequence[Leaf]) -> dict[str, int]:
    sizes = sizes_of(subject.dims, given)
    if not sizes:
        raise CompileError(
            "no argument of the call has a batch dimension",
            got=", ".join(leaf.path for leaf in given),
            expected="a tensor that dynamic_dims names",
            advice='dynamic_dims={"ids": 0}',
        )
    return sizes


def _probe(
    subject: Subject,
    bound: inspect.BoundArguments,
    given: Sequence[Leaf],
    sizes: Mapping[str, int],
    step: int,
) -> tuple[inspect.BoundArguments, list[Leaf]]:
    """The call with example tensors, of sizes that tell the axes apart; those of each step too."""
    static = {n for weight in subject.weights().values() for n in weight.shape}
    for leaf in given:
        if isinstance(leaf.value, torch.Tensor):
            batch = subject.dims.of(leaf)
            static.update(n for dim, n in enumerate(leaf.value.shape) if dim not in batch)
    found = telling_sizes(sizes, static)
    if step:
        found = telling_sizes(
            {name: size + 3 * step for name, size in found.items()}, static | {*found.values()}
        )
    example = substitute(bound, examples(subject.dims, given, found))
    return example, leaves(example)


def _symbols(
    paths: Mapping[fx.Node, str], given: Sequence[Leaf], dims: DynamicDims
) -> dict[Any, tuple[str, int]]:
    """The axis, and the offset from it, that each symbol of the trace stands for."""
    axes = {leaf.path: dims.of(leaf) for leaf in given}
    found: dict[Any, tuple[str, int]] = {}
    for node, path in paths.items():
        for dim, axis in axes[path].items():
            size = value_of(node).shape[dim]
            if not isinstance(size, torch.SymInt):
                continue
            for expression in expressions(size):
                if expression.is_symbol:
                    found.setdefault(expression, (axis.name, axis.extra))
    return found
