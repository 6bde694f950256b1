"""What allows a step to capture: a transaction in its context, or `lazy` until it is sealed.

In a transaction all wrappers of one descriptor capture, or none has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from graphrt.core.base.errors import CaptureSealedError, MissingGraphError
from graphrt.core.base.homes import public
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.figures import GraphWork
from graphrt.core.dispatch.reasons import Reason


@public("graphrt.lowlevel")
class GraphOwner(Protocol):
    """An object that captures graphs, such as a wrapper, as a transaction sees it."""

    def seal(self) -> None:
        """Capture nothing any more."""

    @property
    def eager_calls(self) -> Mapping[Reason, int]:
        """How many of its calls ran eagerly, by reason."""


@public("graphrt.lowlevel")
class Captured(NamedTuple):
    """What one owner captured for the descriptor of a transaction; `undo` destroys it."""

    owner: GraphOwner
    undo: Callable[[], None]


@public("graphrt.lowlevel")
class CaptureTransaction:
    """Allows wrappers to capture while it is in the context, and takes back what they did.

    The `slot` is here and not in the context: without a slot there, a wrapper looks by descriptor,
    and finds out that it has captured in this step already.
    See `AllowedCapture` for the attributes.
    """

    def __init__(
        self,
        slot: int = -1,
        fixed: Collection[int] = (),
        *,
        metadata_is_declared: bool = False,
        lifts_constants: bool = True,
        tells_pool: bool = True,
    ) -> None:
        self.slot = slot
        self.fixed = frozenset(fixed)
        self.metadata_is_declared = metadata_is_declared
        self.lifts_constants = lifts_constants
        self.tells_pool = tells_pool
        self.may_draw = True
        self.task_names: set[str] = set()
        self.work: GraphWork | None = None
        # What was captured so far.
        self.captured: list[Captured] = []

    def add(self, owner: GraphOwner, undo: Callable[[], None]) -> None:
        """Note that `owner` captures something; `undo` takes it back, however far that got."""
        self.captured.append(Captured(owner, undo))

    def rollback(self) -> None:
        """Take everything back, the last capture first; called again it goes on."""
        self.task_names.clear()
        while self.captured:
            self.captured[-1].undo()
            self.captured.pop()


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
        """A capture session has begun, or ended: with `lazy`, capturing is allowed in it, and not
        after it."""
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
