"""Errors of a trace in words of the forward: its line, and the line to write instead.

Dynamo's own text has paragraphs of hints about its settings; of these only the explanation and the
line of the forward are kept. Where the forward branches on a size that no trace knows, the slices
before that line tell which `torch._check` is missing.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence

from graphrt.compile.errors import TraceError
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.texts import error_text
from graphrt.core.capture.refusals import Source

_EXPRESSION = re.compile(r"data-dependent expression .*?\(unhinted: (.*?)\)\.")
_CONSTANT = re.compile(r"L\['(\w+)'\](.*?)\.size\(\)\[(\d+)\].*? constant \((\d+)\)")
_EXPLANATION = re.compile(r"^ *Explanation: (?:Dynamo failed to run .*: got )?(.*)$", re.MULTILINE)
_HIGHER_ORDER = re.compile(r"^ *Higher Order Operator: (.*)$", re.MULTILINE)
_INCOMPLETE = "This higher order operator doesn't work unless"
_FRAME = re.compile(r'File "([^<].*)", line (\d+), in (.*)')
_PLAIN = (ast.Name, ast.Attribute, ast.Subscript)


def explained(error: Exception, dynamic_shapes: str, *, any_size: bool) -> GraphRTError:
    """Dynamo's error as one about the forward. An error of graphrt that the traced code raised is
    returned itself. `any_size`: the code is to serve batches of any size."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GraphRTError):
            return cause
        cause = cause.__cause__ or cause.__context__
    error = getattr(error, "inner_exception", None) or error
    text, kind = error_text(error).strip(), type(error).__name__
    lines = lines_of(text.partition("from user code:")[2] or text)
    if "ConstraintViolation" in kind + text:
        return _constant_dimension(text, lines)
    if "data-dependent" in text:
        return decided_by_unknown(text, lines, unbacked=dynamic_shapes == "unbacked")
    advice = "take what cannot be traced into an opaque operator"
    if any_size and kind == "TorchRuntimeError":
        advice += ". The trace has other batch sizes than the call: if the forward works for that "
        advice += "one alone, as with a static cache, write dynamic_dims={}"
    return TraceError(
        f"the forward cannot be traced as one graph: {_reason(error, text)}",
        got=next(reversed(lines), None),
        advice=advice,
    )


def _reason(error: Exception, text: str) -> str:
    """The sentence in Dynamo's text that says why."""
    first = text.splitlines()[0] if text else type(error).__name__
    explanation, operator = _EXPLANATION.search(text), _HIGHER_ORDER.search(text)
    if explanation is not None:
        first = explanation[1].replace("this HOP", "it")
    elif first.startswith(_INCOMPLETE):
        first = "it does not become one graph"
    elif not type(error).__module__.startswith("torch."):
        first = f"{type(error).__name__}: {first}"
    return first if operator is None else f"{operator[1]}: {first}"


def _constant_dimension(text: str, lines: Sequence[Source]) -> TraceError:
    match = _CONSTANT.search(text)
    got = text.splitlines()[0]
    if match is not None:
        got = f"dimension {match[3]} of {match[1]}{match[2]} is {match[4]}"
    return TraceError(
        "a batch dimension is a constant in the forward",
        got=f"{got}, by {lines[-1]}" if lines else got,
        expected="a forward that works for every batch size",
        advice="remove the comparison with a number, or take the dimension out of "
        "dynamic_dims ({} for none): the code is then for the size of the first call alone",
    )


def decided_by_unknown(text: str, frames: Sequence[Source], *, unbacked: bool) -> TraceError:
    """The error for a branch on a number that Dynamo does not know. `text` is Dynamo's, `frames`
    are the forward's lines, the innermost last."""
    first = text.splitlines()[0]
    match = _EXPRESSION.search(first)
    by = match[1] if match else first
    advice = "compare tensors instead (torch.where), or read what data tell, as item() and "
    advice += "nonzero() do, in an opaque operator"
    if not all(map(_is_editable, frames)):
        advice += "; a model of transformers that counts by its cache takes what it would make of "
        advice += "that number: pass attention_mask= of the cache's length, and position_ids="
    what = f"the forward cannot be traced as one graph: it decides by what no trace knows, {by}"
    if unbacked:
        what = f"the forward decides by {by}, which dynamic_shapes='unbacked' refuses"
        advice = "add torch._check for what is always true, or use dynamic_shapes='backed'"
    # Advice to add a line is for the user's own files.
    editable = filter(_is_editable, reversed(frames))
    checks = next(filter(None, map(_checks, editable)), None)
    if checks is not None:
        line, calls = checks
        advice = f"a slice may be shorter than it says: write {' and '.join(calls)} before {line}; "
        advice += "where a size is read off data, take that into an opaque operator"
    return TraceError(what, got=frames[-1] if frames else first, advice=advice)


def _is_editable(frame: Source) -> bool:
    return "site-packages" not in frame.filename


def _checks(frame: Source) -> tuple[str, list[str]] | None:
    """The line of the last slices by a size before a frame's line, and the `torch._check` calls
    that it lacks; None if there are none."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except SyntaxError:  # lines of an interactive shell need not be Python
        return None
    enclosing = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _covers(n, frame.line)]
    function = max(
        (n for n in enclosing if isinstance(n, ast.FunctionDef)), key=_line, default=None
    )
    if function is None:
        return None
    statement = max(enclosing, key=_line)
    last = frame.line if hasattr(statement, "body") else statement.end_lineno or frame.line
    line, calls = max(_bounds_by_line(function, last).items(), default=(0, []))
    written = {ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Call)}
    missing = dict.fromkeys(each for each in calls if each not in written)
    return (f"{frame.filename}:{line}", list(missing)) if missing else None


def _bounds_by_line(function: ast.FunctionDef, last: int) -> dict[int, list[str]]:
    """The `torch._check` calls for slices by a size, by their lines up to `last`."""
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
