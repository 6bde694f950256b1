"""Which line of the forward each line of a piece's code stands for."""

from __future__ import annotations

import ast
import weakref

from torch import fx

from graphrt.compile.trace._user_lines import innermost_line
from graphrt.core.capture.source import Source, stands_for


def remember_lines(piece: fx.GraphModule) -> None:
    """Let errors that are raised while `piece` runs as it is name the line of the forward."""
    # Not the piece itself, which the function that is kept would keep alive.
    graph = weakref.ref(piece)
    found: dict[int, Source | None] = {}

    def line_of(line: int) -> Source | None:
        there = graph()
        if line not in found and there is not None:
            first = there.forward.__code__.co_firstlineno
            found.update({first + each: source for each, source in _lines(there).items()})
        return found.get(line)

    forget = stands_for(piece.forward.__code__.co_filename, line_of)
    weakref.finalize(piece, forget)


def _lines(piece: fx.GraphModule) -> dict[int, Source | None]:
    """By the number of a line behind that of `def`."""
    nodes = {node.name: node for node in piece.graph.nodes}
    function = next(n for n in ast.walk(ast.parse(piece.code)) if isinstance(n, ast.FunctionDef))
    found: dict[int, Source | None] = {}
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            # A name is assigned once more where it is let go: None.
            node = nodes.pop(target.id, None) if isinstance(target, ast.Name) else None
            if node is not None:
                line = statement.lineno - function.lineno
                found.setdefault(line, innermost_line(node.stack_trace or ""))
    return found
