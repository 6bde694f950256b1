"""Compiles the pieces of a graph; pieces of equal structure are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from graphrt.compile.backend.as_operator import AsOperator, TellingRows, TellingUses
from graphrt.compile.backend.choice import Backend, backend_for
from graphrt.compile.backend.inductor_mends import copies_between_written_inputs
from graphrt.compile.errors import AliasError, CompileError
from graphrt.compile.pieces.by_size import (
    BySize,
    conditions_on,
    size_sources,
    static_inputs,
    varies_by,
)
from graphrt.compile.pieces.cached import CachedPieces
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.pieces.partition import Partitioned, collecting
from graphrt.compile.pieces.wrapping import RunnablePiece
from graphrt.compile.private_torch.inductor import compiler_caches_apart
from graphrt.compile.private_torch.operators import storage_identity
from graphrt.compile.private_torch.patches import lacks_order
from graphrt.compile.split.effects import written
from graphrt.compile.split.graph import (
    Piece,
    returned_count,
    uncompiled,
    written_after_read,
    written_between,
)
from graphrt.compile.split.groups import names_of, splits_at
from graphrt.compile.split.identity import fingerprint, normalised
from graphrt.compile.split.rows import rows_written
from graphrt.compile.trace.call import TracedCall
from graphrt.compile.trace.sizes import is_number, placeholders, value_of
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.log import logger
from graphrt.core.base.texts import error_text
from graphrt.core.replay.recording import current_capture

_KEY_LENGTH = 16
"""Hex digits of a piece's hash that name it among the pieces of one module."""


class Compiler:
    """Compiles the pieces of one traced call, those of equal structure once.

    Each of `sizes` of the call's symbol gets code of its own in addition. With `partition_at`
    Inductor partitions its code at these operators, and `partitioned` is all such code. Splitting
    operators for which `stays` is true are part of the code. Compiled code is stored in `cache`,
    and loaded from it.
    """

    def __init__(
        self,
        backend: Backend,
        figures: Figures,
        traced_call: TracedCall,
        *,
        cache: CachedPieces | None,
        sizes: Sequence[int],
        partition_at: Sequence[str] | None = None,
        stays: Callable[[fx.Node], bool] | None = None,
    ) -> None:
        self._backend = backend
        self._figures = figures
        self._device_type = traced_call.device.type
        self._symbol = traced_call.symbol
        self._axes = traced_call.axes
        self._sizes = sizes
        self._partition_at = partition_at
        self._stays = stays
        self.partitioned: list[Partitioned] = []
        # Fingerprint of a piece's graph -> its code, for all pieces of equal structure.
        self._code_of: dict[str, Callable[..., Any]] = {}
        self.cache = cache

    def compile(self, piece: Piece) -> RunnablePiece:
        """A piece and its code; a splitting one runs uncompiled."""
        if piece.splitting:
            self._figures.splitting_pieces += 1
            return RunnablePiece(piece, uncompiled(piece.graph))
        if piece.is_empty:
            return RunnablePiece(piece, uncompiled(piece.graph), "nothing")
        self._figures.pieces += 1
        if self._backend.name != "eager" and (why_not := self._why_uncompiled(piece)):
            logger.warning("%s %s: it runs uncompiled", piece.name, why_not)
            return RunnablePiece(piece, uncompiled(piece.graph), "nothing, it runs as it is")
        key = fingerprint(piece.graph)
        if key not in self._code_of:
            self._figures.distinct_pieces += 1
            call = self._compile_for_all_sizes(piece.graph, key)
            call, rows = self._with_visible_uses(call, piece), None
            if self._backend.name != "eager":
                rows = rows_written(piece.graph)
            self._code_of[key] = call if rows is None else TellingRows(call, rows)
        return RunnablePiece(piece, self._code_of[key], self._name(key))

    def _with_visible_uses(self, call: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
        """`call` as an operator, or with a note of its uses: watches and captures see operators and
        not kernels."""
        if self._backend.name == "eager":
            return call
        if self._partition_at is not None:
            # Splitting operators report their own writes, row by row.
            listed, unsafe = splits_at(self._partition_at), splits_at(None)
            own_writes = written_between(piece.graph, lambda node: listed(node) or unsafe(node))
            return TellingUses(call, own_writes, by_operators=piece.written)
        # A capture on the CPU records operators, and would miss compiled code.
        on_cpu = self._device_type == "cpu"
        operator = AsOperator(call, returned_count(piece.graph), piece.written, always=on_cpu)
        if self._stays is None:
            return operator
        own_writes = written_between(piece.graph, self._stays)
        if own_writes == piece.written:
            return operator
        captured = operator if on_cpu else None
        return TellingUses(call, own_writes, captured, by_operators=piece.written)

    def _why_uncompiled(self, piece: Piece) -> str:
        """Why a piece runs uncompiled, as Inductor would get it wrong; "" if it would not.

        Raises `AliasError`, and `CompileError` where the compiler makes the partitions.
        """
        _check_inputs(piece)
        if self._stays is not None:
            _check_operators(piece, self._stays)
            _check_order(piece, self._stays)
        copies = copies_between_written_inputs(piece.graph)
        if copies and self._partition_at is not None:
            raise CompileError(
                f"{piece.name} copies one input into another and writes both, which Inductor gets "
                "wrong",
                got="use_inductor_graph_partition=True",
                expected="a new tensor, or one written input",
                advice="leave use_inductor_graph_partition out: such a piece then runs uncompiled",
            )
        why_not = ""
        if copies:
            why_not = "copies one input into another and writes both, of which Inductor loses one"
        elif self._partition_at is None and _passes_numbers_on(piece):
            why_not = "passes on numbers of tensors"
        if why_not and self._stays is not None:
            # Its pieces may compile.
            raise CompileError(
                f"the whole graph {why_not}",
                got=piece.name,
                expected="a graph that Inductor gets right as one",
                advice="CompileOptions(full='pieces')",
            )
        return why_not

    def _compile_for_all_sizes(self, graph: fx.GraphModule, key: str) -> Callable[..., Any]:
        """The code of a graph: one for all sizes; a `BySize` if some sizes have their own, or if
        the general code is wrong for some."""
        inputs = [value_of(node) for node in placeholders(graph)]
        name, symbol = self._name(key), self._symbol
        sources = size_sources(graph)
        general = self._compile_graph(graph, inputs, name, static=False)
        conditions = conditions_on(getattr(general, "conditions", ()), sources)
        static: dict[int, Callable[..., Any]] = {}
        if self._sizes and varies_by(graph, symbol, sources):
            static = {
                size: self._compile_graph(
                    graph, static_inputs(graph, symbol, size), f"{name}_{size}", static=True
                )
                for size in self._sizes
            }
        if not (conditions or static):
            return general
        return BySize(
            general,
            uncompiled(graph) if self._partition_at is None else uncaptured(graph),
            conditions,
            sources,
            name,
            self._axes,
            symbol=str(symbol),
            static=static,
        )

    def _name(self, key: str) -> str:
        kind = "piece" if self._partition_at is None else "partitioned"
        kind = kind if self._stays is None else "whole"
        return f"{kind}_{key[:_KEY_LENGTH]}"

    def _compile_graph(
        self, graph: fx.GraphModule, inputs: Sequence[Any], name: str, *, static: bool
    ) -> Callable[..., Any]:
        if self._partition_at is None:
            return self._loaded_or_compiled(graph, inputs, name, static=static)
        with collecting(self._partition_at) as partitions:
            code = self._loaded_or_compiled(graph, inputs, name, static=static)
        self.partitioned.append(Partitioned(code, partitions))
        self._figures.partitions = len(self.partitioned[0].partitions)
        return self.partitioned[-1]

    def _loaded_or_compiled(
        self, graph: fx.GraphModule, inputs: Sequence[Any], name: str, *, static: bool
    ) -> Callable[..., Any]:
        """Code from the cache under `name`, else compiled now and stored there."""
        if self.cache is not None:
            loaded = self.cache.load(name, returned_count(graph))
            if loaded is not None:
                self._figures.loads += 1
                return loaded
        backend, why_eager = self._backend, ""
        if self.cache is not None and self.cache.had_pieces:
            # The cache had pieces, so nobody asked whether the backend can compile here (it may
            # lack a C++ compiler). This piece is missing from the cache: ask now.
            other, why_eager = backend_for(backend.name, self._device_type, compiles=True)
            if why_eager:
                backend, self._figures.backend_reason = other, why_eager
        own_caches = nullcontext() if self.cache is None else compiler_caches_apart(self.cache.tag)
        try:
            with torch.no_grad(), own_caches:
                more = {} if self._stays is None else {"in_order": True}
                compiled: Any = backend.compile(graph, inputs, static=static, **more)
        except GraphRTError:
            raise
        except Exception as error:
            raise _not_compiled(backend.name, name, error) from error
        self._figures.compilations += 1
        self._figures.static_compilations += static
        if self.cache is not None and not why_eager:
            self.cache.store(name, compiled, normalised(graph))
        code: Callable[..., Any] = compiled
        return code


def uncaptured(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph that Inductor partitions, uncompiled: for steps alone, as a capture of it would have
    no partitions. There it raises `CompileError`."""
    run = uncompiled(graph)

    def call(*args: Any) -> Any:
        if current_capture() is None:
            return run(*args)
        raise CompileError(
            "Inductor's code of the whole graph is not right for a batch of this size",
            got="a planned size, which the warning above names",
            expected="sizes at which the compiler decides as it did for the example",
            advice="add the size to compile_sizes, or leave use_inductor_graph_partition out: "
            "pieces then run uncompiled there",
        )

    return call


def _check_inputs(piece: Piece) -> None:
    """Raise `AliasError` if a compiled piece writes an input that shares memory with another: a
    compiler takes them for two tensors, or gives up."""
    storages: dict[int, list[int]] = {}
    nodes = placeholders(piece.graph)
    for index, node in enumerate(nodes):
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storages.setdefault(storage_identity(value), []).append(index)
    for same in storages.values():
        if len(same) > 1 and not set(same).isdisjoint(piece.written):
            names = ", ".join(nodes[index].name for index in same)
            raise AliasError(
                f"a compiled piece writes a tensor of which it is given two: {names}",
                got=f"inputs that share memory in {piece.name}",
                expected="one tensor, and views of it made in the forward",
                advice="keep one of them in the module, or use backend='eager'",
            )


def _check_operators(piece: Piece, stays: Callable[[fx.Node], bool]) -> None:
    """Raise `CompileError` for an operator of the whole graph that Inductor would leave out, as
    nothing uses its results and it writes no argument: it has effects that it does not declare."""
    used: set[fx.Node] = set()
    for node in reversed(piece.graph.graph.nodes):
        if node.op == "output" or written(node) or not used.isdisjoint(node.users):
            used.add(node)
        elif stays(node):
            raise CompileError(
                f"Inductor leaves {names_of(node)[0]} out of the whole graph",
                got="no result that is used, and no argument that is written",
                expected="an operator that says what it does",
                advice="name in mutates= what it writes, and pass that as an argument",
            )


def _check_order(piece: Piece, stays: Callable[[fx.Node], bool]) -> None:
    """Raise `CompileError` if Inductor may change the order of operators in the whole graph, or
    computes from memory after an operator has written it (torch 2.13), as in `y = x * 2; op(x)`."""
    node = written_after_read(piece.graph, stays)
    if node is not None:
        raise CompileError(
            "the whole graph writes memory in place that it has read before, which Inductor may "
            "get wrong beside splitting operators",
            got=node.format_node(),
            expected="operators that write new tensors, or memory that nothing else reads",
            advice="CompileOptions(full='pieces')",
        )
    if lacks_order():
        raise CompileError(
            "Inductor cannot be kept from changing the order of splitting operators",
            got=f"torch {torch.__version__}",
            expected="a torch of constraints.txt",
            advice="CompileOptions(full='pieces')",
        )


def _passes_numbers_on(piece: Piece) -> bool:
    """Whether a piece returns a number, or takes one that is no size. The operator that stands for
    compiled code (`AsOperator`) can do neither."""
    returned = next(iter(reversed(piece.graph.graph.nodes))).all_input_nodes
    inputs = map(value_of, placeholders(piece.graph))
    return any(map(is_number, returned)) or any(
        isinstance(value, float | torch.SymFloat | torch.SymBool) for value in inputs
    )


def _not_compiled(backend: str, name: str, error: Exception) -> CompileError:
    first = next(iter(error_text(error).strip().splitlines()), "")
    return CompileError(
        f"{backend} cannot compile {name}",
        got=f"{type(error).__name__}: {first}",
        expected="code for the piece, which computation_graph shows",
        advice="take what cannot be compiled into an opaque operator, or use backend='eager'",
    )
