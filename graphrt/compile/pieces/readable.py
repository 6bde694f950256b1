"""What a compiled module tells people: lines for the log, and the graph as Python to look into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from graphrt.compile.pieces.figures import Figures
from graphrt.compile.split.graph import Piece
from graphrt.compile.split.operators import names_of


def readable(graph: fx.GraphModule, pieces: Sequence[Piece], kept_as: Mapping[str, str]) -> str:
    """The traced graph and its pieces as Python; `kept_as` are the names of their code."""
    parts = ["# The whole graph.\n", graph.code.strip("\n")]
    for piece in pieces:
        kind = "a splitting piece"
        if not piece.splitting:
            kind = f"compiled as {kept_as[piece.name]}"
        parts += [f"\n\n# {piece.name}, {kind}.\n", piece.graph.code.strip("\n")]
        if piece.views is not None:
            parts += [f"\n# What {piece.name} gives.\n", piece.views.code.strip("\n")]
    return "\n".join(parts) + "\n"


def traced_line(
    module: Callable[..., Any], figures: Figures, graph: fx.Graph, pieces: Sequence[Piece]
) -> str:
    """How long tracing took, and where the graph is split."""
    found = f"traced {type(module).__name__} in {figures.trace_s:.2f} s"
    splitting = [piece for piece in pieces if piece.splitting]
    if not splitting:
        return f"{found}: a graph of {len(graph.nodes)} nodes, not split"
    nodes = (node for piece in splitting for node in piece.graph.graph.nodes)
    where = ", ".join(sorted({names_of(node)[0] for node in nodes if names_of(node)}))
    return f"{found}: {len(pieces) - len(splitting)} pieces around {len(splitting)} of {where}"


def compiled_line(figures: Figures) -> str:
    """What was compiled and what came from the cache, and why it is other than was asked for."""
    found = (
        f"{figures.distinct_pieces} distinct pieces in {figures.compile_s:.2f} s: "
        f"{figures.compilations} compiled by {figures.backend}, {figures.loads} from the cache"
    )
    if figures.partitions:
        found += f", {figures.partitions} partitions"
    reasons = (figures.backend_reason, figures.partition_reason, figures.call_reason)
    return "; ".join([found, *filter(None, reasons)])
