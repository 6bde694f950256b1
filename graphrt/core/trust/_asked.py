"""Whether a forward asks for gradients or inference mode, by which it may take another way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_NOBODYS = ("torch", "graphrt")
"""Who asks, of which a forward knows nothing: entering `no_grad` does. Where torch's own layers
take another way for it, they differ by rounding."""


def asked_in(function: Callable[[], T]) -> tuple[T, bool]:
    """Call `function`; returns its result, and whether code called by it asked. Under a profiler of
    the host's nobody can tell, so it counts as asked."""
    if sys.getprofile() is not None:
        return function(), True
    found = False

    def look(frame: FrameType, event: str, called: Any) -> None:
        nonlocal found
        if called is torch.is_grad_enabled or called is torch.is_inference_mode_enabled:
            name: str = frame.f_globals.get("__name__", "")
            found |= name.partition(".")[0] not in _NOBODYS

    try:
        sys.setprofile(look)
        result = function()
    finally:
        sys.setprofile(None)
    return result, found
