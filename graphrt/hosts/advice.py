"""What graphrt's errors advise one who has a model of others, and writes no step of their own."""

from __future__ import annotations

from graphrt.errors import GraphRTError

_ADVICE = (
    "leave with_graphs() out for this model, which runs as before; or change its forward so that "
    "values stay on the device (torch.where, masked arithmetic)"
)


def advise(error: Exception) -> None:
    """Take advice that names `eager_break` out of an error: with it steps are written."""
    advice = error.advice if isinstance(error, GraphRTError) else None
    if isinstance(error, GraphRTError) and advice is not None and "eager_break" in advice:
        error.advice = _ADVICE
        error.args = (str(error).replace(advice, _ADVICE),)
