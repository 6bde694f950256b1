"""From a call to compiled code: trace, split, compile, wrap, stitch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx

from graphrt.compile.backend.backends import backend_for
from graphrt.compile.errors import CompileError, ReassignedStateError
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.artifacts import KeptPieces
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.pieces.partition import partitions
from graphrt.compile.pieces.pieces import Compiler, Wrapping, wrapped_pieces
from graphrt.compile.pieces.readable import compiled_line, readable, traced_line
from graphrt.compile.pieces.stitch import Stitched, stitch
from graphrt.compile.split.operators import DEFAULT_SPLITTING_OPS, splits_at, splitting_names
from graphrt.compile.split.split import Piece, split
from graphrt.compile.trace.check import CallChecker
from graphrt.compile.trace.dims import DEFAULT_AXIS, DynamicDims, examples, sizes_of, telling_sizes
from graphrt.compile.trace.interface import Interface, Probe, argument_paths, interface
from graphrt.compile.trace.parameters import Leaf, leaves, substitute
from graphrt.compile.trace.sizes import resolve_sizes, value_of
from graphrt.compile.trace.subject import Subject
from graphrt.compile.trace.trace import Traced, trace
from graphrt.core.base.garbage import frozen_gc
from graphrt.core.base.log import logger
from graphrt.core.capture.breaks import eager_break
from graphrt.core.capture.wrapper import GraphWrapper


@dataclass(frozen=True)
class Built:
    """A compiled subject. `run` takes the calls that `checker` lets pass."""

    run: Callable[..., Any]
    checker: CallChecker
    stitched: Stitched
    pieces: tuple[Piece, ...]
    wrappers: tuple[GraphWrapper, ...]
    codes: tuple[CodeType, ...]
    computation_graph: str
    figures: Figures = field(default_factory=Figures)


def build(
    subject: Subject,
    bound: inspect.BoundArguments,
    options: CompileOptions,
    *,
    static_sizes: Sequence[int],
    wrapping: Wrapping | None,
    graphs: bool,
) -> Built:
    """Compile a subject for calls like `bound`; nothing of it is run.

    Raises `CompileError` and its kinds.
    """
    figures = Figures()
    started = time.perf_counter()
    with frozen_gc():
        seen = _seen(subject, bound, options, figures)
    traced = seen.traced
    if graphs and traced.assigned:
        raise _reassigned(traced.assigned)
    device = _device(traced.graph)
    kept = None if options.backend == "eager" else KeptPieces.open(options, traced.codes, device)
    backend, figures.backend_reason = backend_for(
        options.backend,
        device.type,
        autotune=options.autotune,
        compiles=kept is None or not kept.found,
    )
    figures.backend = backend.name
    partitioned, figures.partition_reason = partitions(options, device.type)
    at = options.splitting_ops
    pieces = split(traced.graph, _nothing if partitioned else splits_at(at))
    figures.trace_s = time.perf_counter() - started
    logger.info(traced_line(subject.module, figures, traced.graph.graph, pieces))

    started = time.perf_counter()
    with Compiler(
        backend,
        figures,
        device,
        kept=None if backend.name == "eager" else kept,
        symbol=seen.symbol,
        sizes=static_sizes,
        partition_at=(DEFAULT_SPLITTING_OPS if at is None else at) if partitioned else None,
    ) as compiler:
        calls = [compiler.call_of(piece) for piece in pieces]
        text = readable(traced.graph, pieces, compiler.kept_as)
        if partitioned:
            figures.partitions = len(compiler.partitioned[0].partitions)
        if wrapping is None:
            # A runner that captures around all of this finds its breaks there.
            both = zip(pieces, calls, strict=True)
            calls = [eager_break(call) if piece.splitting else call for piece, call in both]
        elif partitioned:
            for code in compiler.partitioned:
                code.capture_in(wrapping, splitting_names(traced.graph.graph, at))
        elif not options.whole_graph:
            output = next(iter(reversed(traced.graph.graph.nodes)))
            calls = wrapped_pieces(pieces, calls, wrapping, output.all_input_nodes)
        stitched = stitch(
            traced.graph,
            pieces,
            calls,
            interface=seen.around,
            parameters=subject.parameters,
            weights=subject.weights(),
            label=f"<graphrt {type(subject.module).__name__} {id(subject.module)}>",
        )
        compiler.finish({"computation_graph.py": text, "transformed_code.py": stitched.source})
    figures.compile_s = time.perf_counter() - started
    logger.info(compiled_line(figures))

    run: Callable[..., Any] = stitched.function
    if seen.around is None:
        run = traced.forward_around(stitched.function)
    checker = CallChecker(seen.given, subject.dims, traced.conditions, seen.symbols)
    checker.check(seen.given)
    wrappers = [call for call in calls if isinstance(call, GraphWrapper)]
    wrappers += [wrapper for code in compiler.partitioned for wrapper in code.wrappers]
    return Built(
        run,
        checker,
        stitched,
        tuple(pieces),
        tuple(wrappers),
        traced.codes,
        text,
        figures,
    )


@dataclass(frozen=True)
class _Seen:
    """A traced call. `symbol` is the size of the first batch axis, of all `symbols`."""

    traced: Traced
    around: Interface | None
    given: list[Leaf]
    symbols: Mapping[Any, tuple[str, int]]
    symbol: Any


def _seen(
    subject: Subject, bound: inspect.BoundArguments, options: CompileOptions, figures: Figures
) -> _Seen:
    """Trace a call with examples in place of its tensors, and find out how it uses them."""
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
        options.dynamic_shapes,
    )
    figures.traces += 1
    calls: list[Probe] = [(found, b.args, dict(b.kwargs)) for b, found in probes]
    around, figures.call_reason = interface(traced, calls)
    symbols = _symbols(argument_paths(traced, calls[0]), example_leaves, subject.dims)
    resolve_sizes(traced.graph.graph)
    # Capture sizes are numbers of tokens, whatever the first argument counts.
    axis = DEFAULT_AXIS if DEFAULT_AXIS in sizes else next(iter(sizes))
    first = next((s for s, place in symbols.items() if place == (axis, 0)), None)
    return _Seen(traced, around, given, symbols, first)


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
            for expression in (size.node.expr, size.node._expr):
                if expression.is_symbol:
                    found.setdefault(expression, (axis.name, axis.offset))
    return found


def _device(graph: fx.GraphModule) -> torch.device:
    values = (value_of(node) for node in graph.graph.nodes if node.op == "placeholder")
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _nothing(_: fx.Node) -> bool:
    return False


def _reassigned(names: tuple[str, ...]) -> ReassignedStateError:
    return ReassignedStateError(
        f"compiled code assigns to {', '.join(names)}, which a graph cannot repeat",
        names=names,
        got=", ".join(names),
        expected="in-place updates, such as self.count.add_(1) or self.buffer.copy_(new)",
        advice="update the tensor in place and declare it as state, or compile with graphs=False",
    )
