"""Whether graphs may still be captured, and what becomes of steps that have none."""

from __future__ import annotations

from graphrt.core.base import CaptureSealedError
from graphrt.core.capture.options import GraphOptions


class Sealing:
    """What `lazy` and `strict` mean, for a wrapper as for a runner.

    Lazily, a graph is captured at the first step that asks for it, until it is sealed. Strictly, a
    step that has no graph though it should is an error once it is sealed.
    """

    __slots__ = ("_lazy", "_strict", "closed", "may_capture")

    def __init__(self, options: GraphOptions) -> None:
        self._lazy = options.lazy
        self._strict = options.strict
        self.open()

    def open(self) -> None:
        """Allow capturing."""
        self.closed = False
        # Whether a step may capture what it misses: read at every step.
        self.may_capture = self._lazy

    def close(self) -> None:
        """Capture nothing any more."""
        self.closed = True
        self.may_capture = False

    @property
    def refuses(self) -> bool:
        """Whether a step that should have a graph may not run eagerly."""
        return self._strict and self.closed

    def refuse(self, what: str, *, got: object, expected: str) -> None:
        """Raise `CaptureSealedError` if a step that should have a graph may not run eagerly."""
        if self.refuses:
            raise CaptureSealedError(
                what,
                got=got,
                expected=expected,
                advice="add the size to sizes=, or use strict=False to run it eagerly",
            )
