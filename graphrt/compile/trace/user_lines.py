"""The lines of the forward that Dynamo speaks of, and what to write there where one decides by a
size that is not known while it is traced."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence

from graphrt.compile.errors import TraceError
from graphrt.core.capture.source import Source

_EXPRESSION = re.compile(r"data-dependent expression .*?\(unhinted: (.*?)\)\.")
_FRAME = re.compile(r'File "([^<].*)", line (\d+), in (.*)')
_PLAIN = (ast.Name, ast.Attribute, ast.Subscript)


def decided_by_unknown(said: str, frames: Sequence[Source], *, unbacked: bool) -> TraceError:
    """Of what Dynamo says of a number that it does not know; `frames` are the forward's lines, the
    innermost last."""
    first = said.splitlines()[0]
    found = _EXPRESSION.search(first)
    by = found[1] if found else first
    advice = "compare tensors instead (torch.where), or read what data tell, as item() and "
    advice += "nonzero() do, in an opaque operator"
    if not all(map(_is_own, frames)):
        advice += "; a model of transformers that counts by its cache takes what it would make of "
        advice += "that number: pass attention_mask= of the cache's length, and position_ids="
    what = f"the forward cannot be traced as one graph: it decides by what no trace knows, {by}"
    if unbacked:
        what = f"the forward decides by {by}, which dynamic_shapes='unbacked' refuses"
        advice = "add torch._check for what is always true, or use dynamic_shapes='backed'"
    # Nobody writes a line into a library that is installed.
    own = filter(_is_own, reversed(frames))
    checks = next(filter(None, map(_checks, own)), None)
    if checks is not None:
        line, calls = checks
        advice = f"a slice may be shorter than it says: write {' and '.join(calls)} before {line}; "
        advice += "where a size is read off data, take that into an opaque operator"
    return TraceError(what, got=frames[-1] if frames else first, advice=advice)


def _is_own(frame: Source) -> bool:
    return "site-packages" not in frame.filename


def _checks(frame: Source) -> tuple[str, list[str]] | None:
    """What has to hold of the slices by sizes that are the last ones up to a line, as calls, and
    where they are; None where there are none, or it is checked already."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except SyntaxError:  # what an interactive shell takes is not all Python
        return None
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _covers(n, frame.line)]
    function = max((n for n in around if isinstance(n, ast.FunctionDef)), key=_line, default=None)
    if function is None:
        return None
    statement = max(around, key=_line)
    last = frame.line if hasattr(statement, "body") else statement.end_lineno or frame.line
    line, calls = max(_bounds_by_line(function, last).items(), default=(0, []))
    written = {ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Call)}
    missing = dict.fromkeys(each for each in calls if each not in written)
    return (f"{frame.filename}:{line}", list(missing)) if missing else None


def _bounds_by_line(function: ast.FunctionDef, last: int) -> dict[int, list[str]]:
    """What has to hold of the slices by sizes in the lines up to `last`."""
    lines: dict[int, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and node.lineno <= last:
            for call in _bounds(node):
                lines.setdefault(node.lineno, []).append(call)
    return lines


def _bounds(node: ast.Subscript) -> Iterator[str]:
    if not isinstance(node.value, _PLAIN):
        return
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for dim, part in enumerate(parts):
        if isinstance(part, ast.Constant) and part.value in (None, Ellipsis):
            return  # dimensions have other numbers from here on
        if not isinstance(part, ast.Slice):
            continue
        bound = part.upper or part.lower
        if bound is not None and any(isinstance(n, ast.Name) for n in ast.walk(bound)):
            yield f"torch._check({ast.unparse(bound)} <= {ast.unparse(node.value)}.shape[{dim}])"


def _line(node: ast.stmt) -> int:
    return node.lineno


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def innermost_line(stack: str) -> Source | None:
    """The last line of a stack as text; None where it has none of a file."""
    return next(reversed(lines_of(stack)), None)


def lines_of(stack: str) -> list[Source]:
    """The lines of files in a stack as text, the innermost last."""
    return [Source(file, int(line), function) for file, line, function in _FRAME.findall(stack)]
