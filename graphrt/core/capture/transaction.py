"""One descriptor's capture as a transaction: all of its wrappers capture, or none has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from graphrt.core.base.homes import public
from graphrt.core.device.figures import GraphWork
from graphrt.core.dispatch.reasons import Reason


@public("graphrt.lowlevel")
class GraphOwner(Protocol):
    """What captures graphs, such as a wrapper, as far as who allows it must know it."""

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

    A context that captures has no slot itself, so that its calls take the path that looks twice.
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
        self.task_names: set[str] = set()
        self.work: GraphWork | None = None
        self._captured: list[Captured] = []

    def add(self, owner: GraphOwner, undo: Callable[[], None]) -> None:
        """Note that `owner` captures something, which `undo` takes back, as far as it got."""
        self._captured.append(Captured(owner, undo))

    def commit(self) -> list[Captured]:
        """Keep what was captured; returns it."""
        captured, self._captured = self._captured, []
        return captured

    @property
    def captured(self) -> Sequence[Captured]:
        """What was captured so far."""
        return self._captured

    def rollback(self) -> None:
        """Take everything back, the last capture first; called again it goes on."""
        self.task_names.clear()
        while self._captured:
            self._captured[-1].undo()
            self._captured.pop()
