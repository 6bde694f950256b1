"""From a call to compiled code: trace, split, compile, wrap, stitch."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from graphrt.core.base.texts import error_text
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import eager_break
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.replay.recording import frozen_gc


@dataclass(frozen=True)
class Code:
    """The code of one traced forward: of the whole graph, or of its pieces in order."""

    run: Callable[..., Any]
    """Takes a call's arguments and returns the forward's result."""
    stitched: Stitched
    """The function that calls all pieces; `run` calls it, perhaps in a wrapper or Dynamo's code."""
    pieces: tuple[Piece, ...]
    wrappers: tuple[GraphWrapper, ...]
    """The wrappers that capture pieces, or all of `run`; none without a pool."""
    computation_graph: str
    """The graph and its pieces as Python, for people."""


@dataclass
class Built:
    """A traced subject and its code: the result of `build`. It is right for calls that `checker`,
    `outside` and `overlaps` do not refuse.

    FULL graphs run `whole`, PIECEWISE ones `in_pieces`; each is None until it was asked for. They
    are the same code where nothing splits the graph, or one compilation serves both.
    """

    checker: CallChecker
    outside: Outside
    overlaps: Overlaps
    small: Sequence[SmallAxes]
    """The axes that need code of their own at a size of 1."""
    codes: tuple[CodeType, ...]
    """The code objects that Dynamo inlined."""
    identity: Sequence[str] | None
    """See `_identity`."""
    figures: Figures
    whole: Code | None = None
    in_pieces: Code | None = None

    def all_code(self) -> list[Code]:
        """Its code, each once."""
        return list({id(code): code for code in (self.in_pieces, self.whole) if code}.values())

    def lacking(self, modes: Collection[GraphMode]) -> set[GraphMode]:
        """Those of the modes for whose graphs nothing was compiled."""
        code = {GraphMode.FULL: self.whole, GraphMode.PIECEWISE: self.in_pieces}
        return {mode for mode in modes if code[mode] is None}

    def code_of(self, mode: GraphMode) -> Code:
        """The code for steps of a graph of this mode; NONE: of no graph, which run pieces if there
        are any. For PIECEWISE it must be there."""
        of_full = self.whole or self.in_pieces
        code = of_full if mode is GraphMode.FULL else self.in_pieces or self.whole
        assert code is not None
        return code

    def take(self, more: Built) -> None:
        """Take the code that another trace of the same subject has in addition."""
        if self.whole is None:
            is_one = more.whole is more.in_pieces
            self.whole = (is_one and self.in_pieces) or more.whole
            self.figures.full_reason = more.figures.full_reason
        if self.in_pieces is None:
            self.in_pieces = more.in_pieces
            self.figures.count_pieces(more.figures)
        self.figures.add(more.figures)


def build(
    subject: Subject,
    bound: inspect.BoundArguments,
    options: CompileOptions,
    *,
    modes: Collection[GraphMode],
    static_sizes: Callable[[Collection[GraphMode]], Sequence[int]],
    wrapping: Wrapping | None,
    graphs: bool,
) -> Built:
    """Compile a subject for calls like `bound`, and for graphs of these `modes`; nothing of it is
    run. Where the whole graph cannot be compiled FULL graphs run the code of the pieces. Without
    modes pieces are compiled, which serve all.

    Raises `CompileError` and its kinds.
    """
    make = partial(_Assembler, subject, bound, static_sizes, wrapping, graphs=graphs)
    assembler = make(options)
    pieces = whole = why_not = None
    if GraphMode.PIECEWISE in modes:
        assembler.check_regions()
    # First the pieces, which are right whatever the compiler does with the whole.
    if GraphMode.FULL not in modes or GraphMode.PIECEWISE in modes or not assembler.is_split:
        pieces = whole = assembler.assemble(whole=False)
    if GraphMode.FULL not in modes:
        whole = whole if not assembler.is_split else None
    elif assembler.is_split:
        try:
            whole = assembler.assemble(whole=True)
        except CompileError as error:
            why_not = error
    if why_not is not None and pieces is None:
        # By another trace: a compiler that fails may have changed the sizes of the first.
        assembler = make(replace(options, full="pieces"))
        pieces = whole = assembler.assemble(whole=False)
    if why_not is not None:
        name, why = type(subject.module).__name__, error_text(why_not).partition("\n")[0]
        assembler.figures.full_reason = why
        logger.warning("FULL graphs of %s run the code of its pieces: %s", name, why)
    traced_call = assembler.traced_call
    return Built(
        traced_call.checker,
        traced_call.outside,
        traced_call.overlaps,
        traced_call.ones_needing_own_code(),
        traced_call.traced.codes,
        assembler.identity,
        assembler.figures,
        whole,
        pieces,
    )


class _Assembler:
    """Makes the code of one traced call: of its whole graph, and of its pieces."""

    def __init__(
        self,
        subject: Subject,
        bound: inspect.BoundArguments,
        static_sizes: Callable[[Collection[GraphMode]], Sequence[int]],
        wrapping: Wrapping | None,
        options: CompileOptions,
        *,
        graphs: bool,
    ) -> None:
        self.subject, self.figures = subject, Figures()
        self._options, self._wrapping = options, wrapping
        self._static_sizes = static_sizes
        started = time.perf_counter()
        self.traced_call = _traced(subject, bound, options, self.figures, graphs=graphs)
        self.identity = _identity(subject, self.traced_call)
        self._backend, self._cache = _backend(subject, self.traced_call, options, self.figures)
        device_type = self.traced_call.device.type
        self._partitioned, self.figures.partition_reason = partitions(options, device_type)
        split_at = _checked_operators(options.splitting_ops)
        self._operators = DEFAULT_SPLITTING_OPS if split_at is None else split_at
        self._is_splitting = splits_at(split_at)
        nodes = self.traced_call.traced.graph.graph.nodes
        self.is_split = (
            options.full == "whole"
            and not self._partitioned
            and any(map(self._is_splitting, nodes))
        )
        """Whether FULL graphs have code of their own."""
        self.figures.trace_s = time.perf_counter() - started

    def check_regions(self) -> None:
        """Raise `CompileError` for a splitting operator in a graph inside of the graph, such as of
        `nested_compile_region`: nothing splits that, and a piece would capture the operator."""
        for name, region in self.traced_call.traced.graph.named_modules():
            nodes = region.graph.nodes if name and isinstance(region, fx.GraphModule) else ()
            for node in filter(self._is_splitting, nodes):
                raise CompileError(
                    f"a splitting operator is in a region, which PIECEWISE cannot split: {name}",
                    got=node.format_node(),
                    expected="splitting operators in the forward itself",
                    advice="mode='FULL', or leave nested_compile_region out",
                )

    def assemble(self, *, whole: bool) -> Code:
        """The code of the graph: of the `whole`, in which splitting operators stay, or of its
        pieces. Raises `CompileError` and its kinds."""
        figures = Figures(backend=self._backend.name) if whole else self.figures
        options, traced_call, traced = self._options, self.traced_call, self.traced_call.traced
        started = time.perf_counter()
        graph = traced.graph
        if self.is_split:
            # `split` changes its graph, and the trace is split twice: for pieces and as a whole.
            graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        in_one = whole or self._partitioned
        pieces = split(graph, _splits_nowhere if in_one else self._is_splitting)
        if not whole:
            figures.trace_s += time.perf_counter() - started
        logger.info(traced_line(self.subject.module, self.figures, graph.graph, pieces))

        started = time.perf_counter()
        modes = {GraphMode.FULL} if whole else {GraphMode.PIECEWISE}
        if not self.is_split:
            modes = {GraphMode.FULL, GraphMode.PIECEWISE}
        compiler = Compiler(
            self._backend,
            figures,
            traced_call,
            cache=self._cache,
            sizes=() if self.subject.small else self._static_sizes(modes),
            partition_at=self._operators if self._partitioned else None,
            stays=self._is_splitting if whole else None,
        )
        in_one = whole or options.whole_graph
        captures_nothing = nothing_to_wrap(pieces, whole_graph=in_one)
        captured = None if whole or captures_nothing else self._wrapping
        stitched, wrappers, text = self._stitched(compiler, graph, pieces, captured, whole=whole)
        figures.compile_s = time.perf_counter() - started
        logger.info(compiled_line(figures, whole=whole))
        if whole:
            self.figures.add_whole(figures)

        run = restoring_settings(stitched.function, graph.graph)
        if captures_nothing and self._wrapping is not None:
            wrappers.append(self._wrapping.wrap(run, breakable=True))
            run = wrappers[-1]
        if traced_call.around is None:
            run = traced.forward_around(run)
        traced_call.check()
        return Code(run, stitched, tuple(pieces), tuple(wrappers), text)

    def _stitched(
        self,
        compiler: Compiler,
        graph: fx.GraphModule,
        pieces: Sequence[Piece],
        wrapping: Wrapping | None,
        *,
        whole: bool,
    ) -> tuple[Stitched, list[GraphWrapper], str]:
        """Compile the pieces of `graph`, and generate the function that calls them all. Also
        returns the wrappers that capture them, and the graph as Python."""
        options, cache = self._options, compiler.cache
        compiled = [compiler.compile(piece) for piece in pieces]
        calls, wrappers = _captured(
            compiled,
            wrapping,
            compiler.partitioned,
            splitting_names(graph.graph, options.splitting_ops),
            whole_graph=options.whole_graph,
        )
        stitched = stitch(self.traced_call.around, graph, pieces, calls, self.subject)
        text = readable(graph, compiled)
        if cache is not None:
            names = ("whole_graph", "whole_code") if whole else _TEXTS
            for name, content in zip(names, (text, stitched.source), strict=True):
                cache.entry.write_text(f"{name}.py", content)
        return stitched, wrappers, text


_TEXTS = "computation_graph", "transformed_code"
"""Names of files for people in the cache's entry: the graph with its pieces, and their calls."""


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
        "with graphs=False, for calls that no graph replays: it serves new tensors of the same "
        "shape, not numbers that change",
    )
