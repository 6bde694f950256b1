"""A report of compiling a module: figures, lines for the log, and its pieces as Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphrt.compile.pieces.wrapping import RunnablePiece
from graphrt.compile.split.graph import Piece
from graphrt.compile.split.groups import names_of


@dataclass
class Figures:
    """Counts and seconds of one compiled module, from its first trace on."""

    traces: int = 0
    """Dynamo traces: one, and one more for each size of 0 or 1 that needs code of its own."""
    pieces: int = 0
    """Pieces between the splitting operators."""
    splitting_pieces: int = 0
    distinct_pieces: int = 0
    """Pieces that differ in structure, each of which is compiled once."""
    compilations: int = 0
    """Calls of the backend's compiler, with those for single sizes."""
    static_compilations: int = 0
    """Of these, for single sizes."""
    loads: int = 0
    """Pieces taken from the cache instead of being compiled."""
    trace_s: float = 0.0
    compile_s: float = 0.0
    whole_s: float = 0.0
    """The part of `compile_s` that the whole graph took, whose code FULL graphs run."""
    full_reason: str = ""
    """Why FULL graphs run the code of pieces, although the whole graph was asked for."""
    backend: str = ""
    """The backend that compiled."""
    backend_reason: str = ""
    """Why it is not the backend that was asked for."""
    partitions: int = 0
    """Parts that Inductor itself split its code into."""
    partition_reason: str = ""
    """Why Inductor did not, although that was asked for."""
    call_reason: str = ""
    """Why Dynamo's code stays around every call, which makes it slower."""

    def add(self, more: Figures) -> None:
        """Add another trace of the same module; its pieces are not among `pieces`."""
        self.traces += more.traces
        self.compilations += more.compilations
        self.loads += more.loads
        self.trace_s += more.trace_s
        self.compile_s += more.compile_s
        self.whole_s += more.whole_s

    def count_pieces(self, more: Figures) -> None:
        """Take the counts of pieces of another trace of the same module."""
        self.pieces, self.splitting_pieces = more.pieces, more.splitting_pieces
        self.distinct_pieces = more.distinct_pieces

    def add_whole(self, whole: Figures) -> None:
        """Add the compilation of the whole graph, which is none of the `pieces`."""
        whole.whole_s = whole.compile_s
        self.add(whole)
        self.static_compilations += whole.static_compilations
        self.backend_reason = self.backend_reason or whole.backend_reason


def readable(graph: fx.GraphModule, pieces: Sequence[RunnablePiece]) -> str:
    """The traced graph and its pieces as Python, with the names of their code."""
    parts = ["# The whole graph.\n", graph.code.strip("\n")]
    for each in pieces:
        piece = each.piece
        kind = f"compiled as {each.code}" if each.code else "a splitting piece"
        parts += [f"\n\n# {piece.name}, {kind}.\n", piece.graph.code.strip("\n")]
        if piece.views is not None:
            parts += [f"\n# What {piece.name} gives.\n", piece.views.code.strip("\n")]
    return "\n".join(parts) + "\n"


def traced_line(
    module: Callable[..., Any], figures: Figures, graph: fx.Graph, pieces: Sequence[Piece]
) -> str:
    """How long tracing took, and where the graph is split."""
    line = f"traced {type(module).__name__} in {figures.trace_s:.2f} s"
    splitting = [piece for piece in pieces if piece.splitting]
    if not splitting:
        return f"{line}: a graph of {len(graph.nodes)} nodes, not split"
    nodes = (node for piece in splitting for node in piece.graph.graph.nodes)
    where = ", ".join(sorted({names_of(node)[0] for node in nodes if names_of(node)}))
    return f"{line}: {len(pieces) - len(splitting)} pieces around {len(splitting)} of {where}"


def compiled_line(figures: Figures, *, whole: bool) -> str:
    """How many pieces were compiled or loaded, and why something asked for was not done."""
    what = "the whole graph" if whole else f"{figures.distinct_pieces} distinct pieces"
    line = (
        f"{what} in {figures.compile_s:.2f} s: "
        f"{figures.compilations} compiled by {figures.backend}, {figures.loads} from the cache"
    )
    if figures.partitions:
        line += f", {figures.partitions} partitions"
    reasons = (figures.backend_reason, figures.partition_reason, figures.call_reason)
    return "; ".join([line, *filter(None, reasons)])
