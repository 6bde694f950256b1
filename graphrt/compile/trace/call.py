"""One call of a subject: traced with examples in place of its tensors, and how it uses them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.operators import was_written
from graphrt.compile.private_torch.traces import expressions
from graphrt.compile.trace.check import CallChecker, Overlaps, SmallAxes
from graphrt.compile.trace.dims import DEFAULT_AXIS, DynamicDims, distinct_sizes, examples, sizes_of
from graphrt.compile.trace.dynamo import Traced, trace
from graphrt.compile.trace.interface import Interface, Probe, argument_paths, interface
from graphrt.compile.trace.outside import Outside
from graphrt.compile.trace.parameters import Leaf, leaves, substitute
from graphrt.compile.trace.sizes import does_the_same, placeholders, resolve_sizes, value_of
from graphrt.compile.trace.subject import Subject


@dataclass(frozen=True)
class TracedCall:
    """One trace of a forward: its graph, and the checks that tell which calls it is right for.

    `around` is what the forward does around its graph, None where only Dynamo's code can do it, for
    the reason `why_not_around`. `symbol` is the size of the batch axis that counts tokens, else of
    the first one; None where the graph has no such symbol. `axes` maps the name of each symbol to
    its axis and the offset from that. `checker` checks a call's arguments, `outside` all other
    state; `overlaps` says which arguments the graph writes.
    """

    traced: Traced
    around: Interface | None
    why_not_around: str
    checker: CallChecker
    outside: Outside
    overlaps: Overlaps
    symbol: Any
    axes: Mapping[str, tuple[str, int]]
    _leaves: Sequence[Leaf]
    """The arguments of the call that was traced, not of its examples."""

    @property
    def device(self) -> torch.device:
        """The device on which the graph runs."""
        return _device(self.traced)

    def check(self) -> None:
        """Raise `RetraceError` if the trace is not right for the very call that it was made of,
        apart from sizes of 0 and 1."""
        self.checker.check(self._leaves)

    def ones_needing_own_code(self) -> list[SmallAxes]:
        """Axes that need code of their own at a size of 1."""
        return self.checker.ones_needing_own_code(self._leaves)


def trace_call(subject: Subject, bound: inspect.BoundArguments, dynamic_shapes: str) -> TracedCall:
    """Trace a call like `bound`; nothing of it is run. Raises `CompileError` and its kinds."""
    call = leaves(bound)
    sizes = _sizes(subject, call)
    probes = [_probe(subject, bound, call, sizes, step) for step in (0, 1)]
    arguments, example_leaves = probes[0]
    traced = trace(
        subject.call,
        subject.parameters,
        arguments,
        example_leaves,
        subject.dims,
        dynamic_shapes,
    )
    calls: list[Probe] = [(each, b.args, dict(b.kwargs)) for b, each in probes]
    around, why_not = interface(traced, calls)
    paths = argument_paths(traced, calls[0])
    symbols = {
        **_symbols(paths, example_leaves, subject.dims),
        **_named_symbols(traced.size_places, arguments, example_leaves, subject.dims),
    }
    example_sizes = sizes_of(subject.dims, example_leaves)
    traced_at = {s: example_sizes[axis] + off for s, (axis, off) in symbols.items()}

    def does_same(small: Mapping[str, int]) -> bool:
        other = {s: small[axis] + off for s, (axis, off) in symbols.items() if axis in small}
        return does_the_same(traced.graph, {**traced_at, **other})

    resolve_sizes(traced.graph.graph)
    # Capture sizes are numbers of tokens, whatever the first argument counts.
    axis = DEFAULT_AXIS if DEFAULT_AXIS in sizes else next(iter(sizes), None)
    first = next((s for s, of_axis in symbols.items() if of_axis == (axis, 0)), None)
    checker = CallChecker(
        call,
        subject.dims,
        traced.conditions,
        symbols,
        does_same,
        asks_for_gradients=_names_used(traced, "requires_grad"),
        asks_for_strides=_names_used(traced, "stride"),
    )
    outside = _outside(subject, traced, calls[0], set(paths.values()), around is not None)
    return TracedCall(
        traced,
        around,
        why_not,
        checker,
        outside,
        _overlaps(paths, traced),
        first,
        {symbol.name: of_axis for symbol, of_axis in symbols.items()},
        call,
    )


def _sizes(subject: Subject, call: Sequence[Leaf]) -> dict[str, int]:
    sizes = sizes_of(subject.dims, call)
    if not sizes and subject.dims and not subject.small:
        raise CompileError(
            "no argument of the call has a batch dimension",
            got=", ".join(leaf.path for leaf in call),
            expected="a tensor that dynamic_dims names",
            advice='dynamic_dims={"ids": 0}',
        )
    return sizes


def _probe(
    subject: Subject,
    bound: inspect.BoundArguments,
    call: Sequence[Leaf],
    sizes: Mapping[str, int],
    step: int,
) -> tuple[inspect.BoundArguments, list[Leaf]]:
    """The call with example tensors, whose sizes differ from axis to axis and from step to step."""
    static = {n for weight in subject.weights().values() for n in weight.shape}
    for leaf in call:
        if isinstance(leaf.value, torch.Tensor):
            batch = subject.dims.of(leaf)
            static.update(n for dim, n in enumerate(leaf.value.shape) if dim not in batch)
    probe_sizes = distinct_sizes(sizes, static)
    if step:
        probe_sizes = distinct_sizes(
            {name: size + 3 * step for name, size in probe_sizes.items()},
            static | {*probe_sizes.values()},
        )
    example = substitute(bound, examples(subject.dims, call, probe_sizes))
    return example, leaves(example)


def at_size(
    subject: Subject, bound: inspect.BoundArguments, small: SmallAxes
) -> inspect.BoundArguments:
    """The call with example tensors of its own sizes, except those of `small`."""
    call = leaves(bound)
    sizes = {**sizes_of(subject.dims, call), **dict(small)}
    return substitute(bound, examples(subject.dims, call, sizes))


def _outside(
    subject: Subject, traced: Traced, call: Probe, arguments: set[str], stitched: bool
) -> Outside:
    example, args, kwargs = call
    named = {id(weight) for weight in subject.weights().values()} if stitched else set()
    named |= {id(leaf.value) for leaf in example}
    unnamed = {
        index: value
        for index, value in enumerate(traced.inputs_of(*args, **kwargs))
        if isinstance(value, torch.Tensor) and id(value) not in named
    }
    methods = subject.methods(traced.codes, traced.guards.kinds)
    return Outside(
        traced.guards,
        traced.rewritten,
        subject.parameters,
        _device(traced).type,
        methods,
        traced.inputs_of,
        unnamed,
        gathered_each_call=not stitched,
    )


def _names_used(traced: Traced, name: str) -> bool:
    return any(name in code.co_names for code in traced.codes)


def _device(traced: Traced) -> torch.device:
    values = map(value_of, placeholders(traced.graph))
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _overlaps(paths: Mapping[fx.Node, str], traced: Traced) -> Overlaps:
    written, writes_weights = set(), False
    for node in placeholders(traced.graph):
        value = value_of(node)
        # The trace ran in-place operators on these fake tensors, which count their writes.
        if isinstance(value, torch.Tensor) and was_written(value):
            if node in paths:
                written.add(paths[node])
            else:
                writes_weights = True
    return Overlaps(written, writes_weights=writes_weights)


def _named_symbols(
    places: Mapping[Any, tuple[str, int]],
    arguments: inspect.BoundArguments,
    call: Sequence[Leaf],
    dims: DynamicDims,
) -> dict[Any, tuple[str, int]]:
    """As `_symbols`, for tensors that are no inputs of the graph: Dynamo names them (`L['x']`)."""
    axes = {id(leaf.value): dims.of(leaf) for leaf in call}
    symbols: dict[Any, tuple[str, int]] = {}
    for symbol, (name, dim) in places.items():
        if not name.startswith("L["):
            continue
        tensor = eval(name, {"__builtins__": {}}, {"L": dict(arguments.arguments)})
        axis = axes.get(id(tensor), {}).get(dim)
        if axis is not None:
            symbols[symbol] = (axis.name, axis.extra)
    return symbols


def _symbols(
    paths: Mapping[fx.Node, str], call: Sequence[Leaf], dims: DynamicDims
) -> dict[Any, tuple[str, int]]:
    """The axis, and the offset from it, that each symbol of the trace stands for."""
    axes = {leaf.path: dims.of(leaf) for leaf in call}
    symbols: dict[Any, tuple[str, int]] = {}
    for node, path in paths.items():
        for dim, axis in axes[path].items():
            size = value_of(node).shape[dim]
            if not isinstance(size, torch.SymInt):
                continue
            for expression in expressions(size):
                if expression.is_symbol:
                    symbols.setdefault(expression, (axis.name, axis.extra))
    return symbols
