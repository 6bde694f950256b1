"""A capture inside of another one."""

from __future__ import annotations

from graphrt.core.base import NestedCaptureError


def inside_capture() -> NestedCaptureError:
    """That something would be captured where something else is being captured."""
    return NestedCaptureError(
        "a capture was begun inside another one",
        expected="one open capture per thread",
        advice="capture it before, or mark its caller @eager_break",
    )
