"""One descriptor's capture as a transaction: all of its wrappers capture, or none has."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from graphrt.core.batch.descriptor import BatchDescriptor

if TYPE_CHECKING:
    from graphrt.core.capture.wrapper import GraphWrapper


class CaptureTransaction:
    """Allows wrappers to capture while it is in the context, and takes back what they did.

    `slot` is where their entries will be found; a context that captures has none itself, so that
    its calls take the path that looks twice. `task_names` collects the tasks, and their groups,
    that the step has. `fixed` are the addresses of the storages in which every step of the graph
    finds its inputs.
    """

    def __init__(self, slot: int = -1, fixed: Collection[int] = ()) -> None:
        self.slot = slot
        self.fixed = frozenset(fixed)
        self.task_names: set[str] = set()
        self._captured: list[tuple[GraphWrapper, BatchDescriptor]] = []

    def add(self, wrapper: GraphWrapper, descriptor: BatchDescriptor) -> None:
        """Note that `wrapper` captured an entry."""
        self._captured.append((wrapper, descriptor))

    def commit(self) -> list[tuple[GraphWrapper, BatchDescriptor]]:
        """Keep what was captured; returns it."""
        captured, self._captured = self._captured, []
        return captured

    def rollback(self) -> None:
        """Take everything back, the last capture first."""
        while self._captured:
            wrapper, descriptor = self._captured.pop()
            wrapper.drop(descriptor)
