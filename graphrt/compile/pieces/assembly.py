"""From a call to compiled code: trace, split, compile, wrap, stitch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import fx

from graphrt.compile.backend.choice import backend_for
from graphrt.compile.cache.key.parts import Compilation
from graphrt.compile.errors import ReassignedStateError
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.cached import KeptPieces
from graphrt.compile.pieces.compiler import Compiler
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.pieces.partition import partitions
from graphrt.compile.pieces.readable import compiled_line, readable, traced_line
from graphrt.compile.pieces.stitch import Stitched, stitch
from graphrt.compile.pieces.wrapping import Wrapping, nothing_to_wrap, wrapped_pieces
from graphrt.compile.split.contexts import restoring_settings
from graphrt.compile.split.graph import Piece, split
from graphrt.compile.split.operators import DEFAULT_SPLITTING_OPS, splits_at, splitting_names
from graphrt.compile.trace.call import trace_call
from graphrt.compile.trace.check import CallChecker, Small
from graphrt.compile.trace.outside import Outside
from graphrt.compile.trace.overlaps import Overlaps
from graphrt.compile.trace.subject import Subject
from graphrt.core.base.garbage import frozen_gc
from graphrt.core.base.log import logger
from graphrt.core.capture.breaks import eager_break
from graphrt.core.capture.wrapper import GraphWrapper


@dataclass(frozen=True)
class Built:
    """A compiled subject. `run` takes the calls that `checker` lets pass, as long as `outside` has
    not changed. `small` are sizes of 1 that need code of their own."""

    run: Callable[..., Any]
    checker: CallChecker
    outside: Outside
    overlaps: Overlaps
    small: Sequence[Small]
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
        seen = trace_call(subject, bound, options.dynamic_shapes)
    traced = seen.traced
    figures.traces, figures.call_reason = 1, seen.why_not_around
    if graphs and traced.assigned:
        raise _reassigned(traced.assigned)
    device = seen.device
    kept = None
    if options.backend != "eager":
        compilation = Compilation(options, traced.codes, traced.graph, device, subject.small)
        kept = KeptPieces.open(compilation)
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
        axes=seen.axes,
        sizes=() if subject.small else static_sizes,
        partition_at=(DEFAULT_SPLITTING_OPS if at is None else at) if partitioned else None,
    ) as compiler:
        calls = [compiler.call_of(piece) for piece in pieces]
        text = readable(traced.graph, pieces, compiler.kept_as)
        if partitioned:
            figures.partitions = len(compiler.partitioned[0].partitions)
        wrappers: list[GraphWrapper] = []
        around = None
        if wrapping is None or nothing_to_wrap(pieces, whole_graph=options.whole_graph):
            # A runner that captures around all of this finds its breaks there.
            both = zip(pieces, calls, strict=True)
            calls = [
                piece.with_views(eager_break(call) if piece.splitting else call)
                for piece, call in both
            ]
            around = wrapping
        elif partitioned:
            for code in compiler.partitioned:
                code.capture_in(wrapping, splitting_names(traced.graph.graph, at))
                wrappers += code.wrappers
            calls = [piece.with_views(call) for piece, call in zip(pieces, calls, strict=True)]
        elif not options.whole_graph:
            calls, wrappers = wrapped_pieces(pieces, calls, wrapping)
        else:
            calls = [piece.with_views(call) for piece, call in zip(pieces, calls, strict=True)]
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

    run = restoring_settings(stitched.function, traced.graph.graph)
    if around is not None:
        wrappers.append(around.wrap(run, breakable=True))
        run = wrappers[-1]
    if seen.around is None:
        run = traced.forward_around(run)
    seen.check()
    small = seen.ones_needing_own()
    return Built(
        run,
        seen.checker,
        seen.outside,
        seen.overlaps,
        small,
        stitched,
        tuple(pieces),
        tuple(wrappers),
        traced.codes,
        text,
        figures,
    )


def _nothing(_: fx.Node) -> bool:
    return False


def _reassigned(names: tuple[str, ...]) -> ReassignedStateError:
    return ReassignedStateError(
        f"compiled code assigns to {', '.join(names)}, which a graph cannot repeat",
        names=names,
        got=", ".join(names),
        expected="in-place updates, such as self.count.add_(1) or self.buffer.copy_(new)",
        advice="write into a tensor that is there before the first call and has room for all that "
        "comes, a count too; a cache of transformers does so with Cache(layers=[StaticLayer("
        "max_cache_len=...) for each layer]), see docs/compile.md. Or compile with graphs=False, "
        "for calls that no graph replays",
    )
