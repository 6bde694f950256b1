"""`SizeClasses`: memories of a pool for graphs that come and go, by their size."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from graphrt.core.device.platform import Platform

MOST = 4
"""The most memories of one pool."""
POOL = 0
"""In place of a class: the pool's own memory."""


class SizeClasses:
    """Graphs of one memory share their blocks, so that it comes back with the last of them alone.
    Those under a limit are in memories by size: one for sizes of as many binary digits, and for
    further ones the nearest of `MOST`.

    Each has a stream to capture on: a scratch block that belongs to a stream, such as cuBLAS's
    workspace, is in the memory of the first capture on it, and goes with that.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        # Binary digits of its sizes -> memory, and stream.
        self._each: dict[int, tuple[Any, Any]] = {}
        # Who has graphs here -> in which of them.
        self._users: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()

    def of(self, tokens: int) -> int:
        """The class of graphs of so many tokens."""
        digits = tokens.bit_length()
        if digits in self._each or len(self._each) < MOST:
            return digits
        return min(self._each, key=lambda each: abs(each - digits))

    def memory(self, size_class: int) -> tuple[Any, Any]:
        """The memory and the stream of a class, on the current device."""
        if size_class not in self._each:
            made = self._platform.new_memory(), self._platform.new_stream()
            self._each[size_class] = made
        return self._each[size_class]

    def find(self, size_class: int) -> Any:
        """The memory of a class; None where there is none."""
        return self._each.get(size_class, (None,))[0]

    def memories(self) -> list[Any]:
        """Those that there are."""
        return [memory for memory, _ in list(self._each.values())]

    def keep(self, user: object, classes: set[int]) -> list[Any]:
        """Note in which classes a user has graphs now; returns the memories that nobody uses any
        more, for the caller to give back."""
        self._users[user] = classes
        used = set[int]().union(*self._users.values())
        return [self._each.pop(each)[0] for each in self._each.keys() - used]

    def keep_none(self) -> list[Any]:
        """As `keep`, of a pool that ends: nobody has graphs any more."""
        self._users.clear()
        return self.keep(self, set())
