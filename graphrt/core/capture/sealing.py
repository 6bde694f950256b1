"""Whether graphs may still be captured, and what becomes of steps that have none."""

from __future__ import annotations

from collections.abc import Collection

from graphrt.core.base.errors import CaptureSealedError, MissingGraphError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.options import GraphOptions
from graphrt.core.dispatch.reasons import Reason


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

    def in_session(self, begun: bool) -> None:
        """A capture session has begun, or ended: what captures lazily may meanwhile, and then no
        more."""
        if self._lazy:
            (self.open if begun else self.close)()

    def close(self) -> None:
        """Capture nothing any more."""
        self.closed = True
        self.may_capture = False

    @property
    def refuses(self) -> bool:
        """Whether a step that should have a graph may not run eagerly."""
        return self._strict and self.closed

    def miss(self, context: ForwardContext, held: Collection[BatchDescriptor]) -> Reason:
        """Why a wrapper that has the graphs `held` runs a step of its own mode eagerly.

        What announced the step is told. Strictly, raises `CaptureSealedError` for a descriptor that
        nobody found a graph for, and `MissingGraphError` for a graph that must be here.
        """
        known = ", ".join(map(str, held)) or "a graph of the wrapper, which has none yet"
        if context.dispatcher is not None:
            context.dispatcher.not_replayed(context)
        if self.closed and not context.announced:
            self.refuse(
                "a graph would have to be captured after seal()",
                got=context.descriptor,
                expected=known,
            )
            return Reason.SEALED
        if self._strict:
            raise MissingGraphError(
                "a wrapper has no graph for the step that its context announces",
                got=f"{context.mode.name} [{context.descriptor}], slot {context.slot}",
                expected=known,
                advice="capture before publish(), allow GraphOptions(lazy=True), or use "
                "strict=False to run it eagerly",
            )
        return Reason.MISSING_GRAPH

    def refuse(self, what: str, *, got: object, expected: str) -> None:
        """Raise `CaptureSealedError` if a step that should have a graph may not run eagerly."""
        if self.refuses:
            raise CaptureSealedError(
                what,
                got=got,
                expected=expected,
                advice="add the size to sizes=, or use strict=False to run it eagerly",
            )
