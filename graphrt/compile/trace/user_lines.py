"""Errors of a trace in words of the forward, with its line.

Dynamo's own text has paragraphs of hints about its settings; of these only the explanation and the
line of the forward are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphrt.compile.errors import TraceError
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.texts import error_text
from graphrt.core.capture.refusals import Source

_EXPRESSION = re.compile(r"data-dependent expression .*?\(unhinted: (.*?)\)\.")
_EXPLANATION = re.compile(r"^ *Explanation: (?:Dynamo failed to run .*: got )?(.*)$", re.MULTILINE)
_HIGHER_ORDER = re.compile(r"^ *Higher Order Operator: (.*)$", re.MULTILINE)
_INCOMPLETE = "This higher order operator doesn't work unless"
_FRAME = re.compile(r'File "([^<].*)", line (\d+), in (.*)')


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
    # Torch: "... your code specialized it to be a constant (6)". The trace's sizes all differ.
    size = text.partition(" constant (")[2].partition(")")[0]
    got = f"always {size}" if size else text.splitlines()[0]
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
    advice += "nonzero() do, in an opaque operator; before a slice by a size, such as buffer[:n], "
    advice += "write torch._check(n <= buffer.shape[0])"
    if not all(map(_is_editable, frames)):
        advice += "; a model of transformers that counts by its cache takes what it would make of "
        advice += "that number: pass attention_mask= of the cache's length, and position_ids="
    what = f"the forward cannot be traced as one graph: it decides by what no trace knows, {by}"
    if unbacked:
        what = f"the forward decides by {by}, which dynamic_shapes='unbacked' refuses"
        advice = "add torch._check for what is always true, such as torch._check(n <= "
        advice += "buffer.shape[0]) before buffer[:n], or use dynamic_shapes='backed'"
    return TraceError(what, got=frames[-1] if frames else first, advice=advice)


def _is_editable(frame: Source) -> bool:
    return "site-packages" not in frame.filename


def innermost_line(stack: str) -> Source | None:
    """The last line of a stack as text; None where it has none of a file."""
    return next(reversed(lines_of(stack)), None)


def lines_of(stack: str) -> list[Source]:
    """The lines of files in a stack as text, the innermost last."""
    return [Source(file, int(line), function) for file, line, function in _FRAME.findall(stack)]
