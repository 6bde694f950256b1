"""One descriptor's capture as a transaction: all of its wrappers capture, or none has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrt.core.wrapper import GraphWrapper


class CaptureTransaction:
    """Allows wrappers to capture while it is in the context, and takes back what they did.

    `slot` is where their entries will be found; a context that captures has none itself, so that
    its calls take the path that looks twice.
    """

    def __init__(self, slot: int = -1) -> None:
        self.slot = slot
        self.wrappers: list[GraphWrapper] = []
        self._undo: list[Callable[[], None]] = []

    def add(self, wrapper: GraphWrapper, undo: Callable[[], None]) -> None:
        """Note that `wrapper` captured an entry, and how to take it back."""
        self.wrappers.append(wrapper)
        self._undo.append(undo)

    def rollback(self) -> None:
        """Take everything back, the last capture first."""
        self.wrappers.clear()
        while self._undo:
            self._undo.pop()()
