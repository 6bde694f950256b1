"""Advice in graphrt's errors for users of a library's model, who do not write its forward."""

from __future__ import annotations

from graphrt.errors import GraphRTError

_ADVICE = (
    "leave with_graphs() out for this model, which runs as before; or change its forward so that "
    "values stay on the device (torch.where, masked arithmetic)"
)


def advise(error: Exception) -> None:
    """Replace advice that names `eager_break` in an error: only the forward's author can use it."""
    advice = error.advice if isinstance(error, GraphRTError) else None
    if isinstance(error, GraphRTError) and advice is not None and "eager_break" in advice:
        error.advice = _ADVICE
        error.args = (str(error).replace(advice, _ADVICE),)
