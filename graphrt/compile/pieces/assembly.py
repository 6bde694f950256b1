"""From a call to compiled code: trace, split, compile, wrap, stitch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import CodeType
from typing import Any

import torch
from torch import fx

from graphrt.compile.backend.choice import Backend, backend_for
from graphrt.compile.cache.key.parts import Compilation
from graphrt.compile.errors import CompileError, ReassignedStateError
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.cached import CachedPieces
from graphrt.compile.pieces.compiler import Compiler
from graphrt.compile.pieces.figures import Figures, compiled_line, readable, traced_line
from graphrt.compile.pieces.partition import Partitioned, partitions
from graphrt.compile.pieces.stitch import Stitched, stitch
from graphrt.compile.pieces.wrapping import (
    RunnablePiece,
    Wrapping,
    nothing_to_wrap,
    wrapped_pieces,
)
from graphrt.compile.split.contexts import restoring_settings
from graphrt.compile.split.graph import Piece, split
from graphrt.compile.split.groups import DEFAULT_SPLITTING_OPS, splits_at, splitting_names
from graphrt.compile.split.identity import normalised
from graphrt.compile.trace.call import TracedCall, trace_call
from graphrt.compile.trace.check import CallChecker, Overlaps, SmallAxes
from graphrt.compile.trace.interface import Weight
from graphrt.compile.trace.outside import Outside
from graphrt.compile.trace.sizes import placeholders
from graphrt.compile.trace.subject import Subject
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.capture.guard import eager_break
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.replay.recording import frozen_gc


@dataclass(frozen=True)
class Built:
    """A compiled subject: the result of `build`. `run` is right for calls that `checker`, `outside`
    and `overlaps` do not refuse."""

    run: Callable[..., Any]
    """Takes a call's arguments and returns the forward's result."""
    checker: CallChecker
    outside: Outside
    overlaps: Overlaps
    small: Sequence[SmallAxes]
    """The axes that need code of their own at a size of 1."""
    stitched: Stitched
    """The function that calls all pieces; `run` calls it, perhaps in a wrapper or Dynamo's code."""
    pieces: tuple[Piece, ...]
    wrappers: tuple[GraphWrapper, ...]
    """The wrappers that capture pieces, or all of `run`; none without a pool."""
    codes: tuple[CodeType, ...]
    """The code objects that Dynamo inlined."""
    identity: Sequence[str] | None
    """See `_identity`."""
    computation_graph: str
    """The graph and its pieces as Python, for people."""
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
    traced_call = _traced(subject, bound, options, figures, graphs=graphs)
    traced, identity = traced_call.traced, _identity(subject, traced_call)
    backend, cache = _backend(subject, traced_call, options, figures)
    partitioned, figures.partition_reason = partitions(options, traced_call.device.type)
    split_at = _checked_operators(options.splitting_ops)
    operators = DEFAULT_SPLITTING_OPS if split_at is None else split_at
    pieces = split(traced.graph, _splits_nowhere if partitioned else splits_at(split_at))
    figures.trace_s = time.perf_counter() - started
    logger.info(traced_line(subject.module, figures, traced.graph.graph, pieces))

    started = time.perf_counter()
    compiler = Compiler(
        backend,
        figures,
        traced_call,
        cache=cache,
        sizes=() if subject.small else static_sizes,
        partition_at=operators if partitioned else None,
    )
    captures_nothing = nothing_to_wrap(pieces, whole_graph=options.whole_graph)
    captured = None if captures_nothing else wrapping
    stitched, wrappers, text = _stitched(compiler, traced_call, pieces, subject, options, captured)
    figures.compile_s = time.perf_counter() - started
    logger.info(compiled_line(figures))

    run = restoring_settings(stitched.function, traced.graph.graph)
    if captures_nothing and wrapping is not None:
        wrappers.append(wrapping.wrap(run, breakable=True))
        run = wrappers[-1]
    if traced_call.around is None:
        run = traced.forward_around(run)
    traced_call.check()
    return Built(
        run,
        traced_call.checker,
        traced_call.outside,
        traced_call.overlaps,
        traced_call.ones_needing_own_code(),
        stitched,
        tuple(pieces),
        tuple(wrappers),
        traced.codes,
        identity,
        text,
        figures,
    )


def accept_state(
    built: Built, subject: Subject, bound: inspect.BoundArguments, options: CompileOptions
) -> bool:
    """Trace a subject that has changed. If the code of `built` is right for it too, calls with its
    state as it is now pass the checks from here on. Returns whether they do."""
    try:
        traced_call = _traced(subject, bound, options, Figures(), graphs=True)
    except CompileError as error:
        logger.info("%s cannot be traced again: %s", type(subject.module).__name__, error)
        return False
    outside = traced_call.outside
    # `subject` has the defaults of the first trace: `holds` compares them.
    if built.identity is None or _identity(subject, traced_call) != built.identity:
        return False
    if not outside.holds(bound.arguments, bound.args, bound.kwargs):
        return False
    built.outside.accept(outside)
    return True


def _identity(subject: Subject, traced_call: TracedCall) -> list[str] | None:
    """Lines that are equal for two traces of a subject if one code is right for both. None if the
    code that calls the graph is Dynamo's: such code cannot be compared."""
    around, traced = traced_call.around, traced_call.traced
    if around is None:
        return None
    # A replaced weight keeps its name.
    names = {id(weight): name for name, weight in subject.weights().items()}
    texts = [
        names.get(id(each.tensor), repr(each)) if isinstance(each, Weight) else each
        for each in around.inputs
    ]
    # By their names, as a hook that is added moves an input to another place in Dynamo's order.
    inputs = dict(sorted(zip(placeholders(traced.graph), texts, strict=True), key=itemgetter(1)))
    nodes = [*inputs, *(n for n in traced.graph.graph.nodes if n not in inputs)]
    axes = sorted(f"{symbol} is {axis}" for symbol, axis in traced_call.axes.items())
    conditions = sorted(map(str, traced.conditions))
    result = repr(around.result)
    return [*inputs.values(), result, *conditions, *axes, *normalised(traced.graph, nodes)]


def _traced(
    subject: Subject,
    bound: inspect.BoundArguments,
    options: CompileOptions,
    figures: Figures,
    *,
    graphs: bool,
) -> TracedCall:
    with frozen_gc():
        traced_call = trace_call(subject, bound, options.dynamic_shapes)
    figures.traces, figures.call_reason = 1, traced_call.why_not_around
    if graphs and traced_call.traced.assigned:
        raise _reassigned(traced_call.traced.assigned)
    return traced_call


def _backend(
    subject: Subject, traced_call: TracedCall, options: CompileOptions, figures: Figures
) -> tuple[Backend, CachedPieces | None]:
    """The backend for the pieces of a traced call, and their entry in the cache."""
    cache, device = None, traced_call.device
    if options.backend != "eager":
        compilation = Compilation(options, traced_call.traced.graph, subject.small)
        cache = CachedPieces.open(compilation)
    backend, figures.backend_reason = backend_for(
        options.backend,
        device.type,
        autotune=options.autotune,
        compiles=cache is None or not cache.had_pieces,
    )
    figures.backend = backend.name
    return backend, None if backend.name == "eager" else cache


def _stitched(
    compiler: Compiler,
    traced_call: TracedCall,
    pieces: Sequence[Piece],
    subject: Subject,
    options: CompileOptions,
    wrapping: Wrapping | None,
) -> tuple[Stitched, list[GraphWrapper], str]:
    """Compile the pieces, and generate the function that calls them all. Also returns the wrappers
    that capture them, and the graph as Python."""
    graph = traced_call.traced.graph
    cache = compiler.cache
    compiled = [compiler.compile(piece) for piece in pieces]
    calls, wrappers = _captured(
        compiled,
        wrapping,
        compiler.partitioned,
        splitting_names(graph.graph, options.splitting_ops),
        whole_graph=options.whole_graph,
    )
    stitched = stitch(traced_call.around, graph, pieces, calls, subject)
    text = readable(graph, compiled)
    if cache is not None:
        cache.entry.write_text("computation_graph.py", text)
        cache.entry.write_text("transformed_code.py", stitched.source)
    return stitched, wrappers, text


def _captured(
    pieces: Sequence[RunnablePiece],
    wrapping: Wrapping | None,
    partitioned: Sequence[Partitioned],
    splitting: frozenset[str],
    *,
    whole_graph: bool,
) -> tuple[list[Callable[..., Any]], list[GraphWrapper]]:
    """The function that runs each piece, and the wrappers; none without `wrapping`."""
    wrappers: list[GraphWrapper] = []
    if wrapping is None:
        # A runner that captures the whole forward breaks at the splitting pieces.
        calls = [eager_break(each.run) if each.piece.splitting else each.run for each in pieces]
    elif partitioned or whole_graph:
        calls = [each.run for each in pieces]
        for code in partitioned:
            wrappers += code.capture_in(wrapping, splitting)
    else:
        return wrapped_pieces(pieces, wrapping)
    return [each.piece.with_views(call) for each, call in zip(pieces, calls, strict=True)], wrappers


def _checked_operators(splitting_ops: Sequence[str] | None) -> Sequence[str] | None:
    """Return `splitting_ops`; raise `InvalidOptionError` for an unknown operator, at which nothing
    would split."""
    for name in splitting_ops or ():
        namespace, _, operator = name.partition(".")[0].partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            raise InvalidOptionError(
                "splitting_ops names an operator that is not registered",
                got=name,
                expected='"namespace::name" or "namespace::name.overload"',
                advice="import the module that registers it before the first call",
            )
    return splitting_ops


def _splits_nowhere(_: fx.Node) -> bool:
    return False


def _reassigned(names: tuple[str, ...]) -> ReassignedStateError:
    return ReassignedStateError(
        f"compiled code assigns to {', '.join(names)}, which a graph cannot repeat",
        names=names,
        got=", ".join(names),
        expected="in-place updates, such as self.count.add_(1) or self.buffer.copy_(new)",
        advice="write into a tensor that is there before the first call and has room for all that "
        "comes, a count too; a cache of transformers does so with Cache(layers=[StaticLayer("
        "max_cache_len=...) for each layer]), see examples/compiled_transformers.py. Or compile "
        "with graphs=False, for calls that no graph replays",
    )
