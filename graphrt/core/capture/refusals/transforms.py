"""An eager part inside of a transform of `torch.func`, such as `torch.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.core.base import CaptureError, transform_under_way
from graphrt.core.capture.refusals.source import user_source
from graphrt.core.replay import name_of


def refuse_transform(function: Callable[..., Any]) -> None:
    """Raise `CaptureError` inside of a transform: a replay calls the eager part outside of it, and
    what the transform hands it is no tensor with memory."""
    if not transform_under_way or transform_under_way() is None:
        return
    source = user_source()
    raise CaptureError(
        f"eager break {name_of(function)} is called inside of a transform (torch.vmap, or another "
        "of torch.func), which replays do not enter",
        source=None if source is None else str(source),
        got="an eager part of a transformed function",
        expected="eager parts that contain their transforms, or none",
        advice="mark the function that calls torch.vmap @eager_break",
    )
