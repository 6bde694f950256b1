"""What is in Python's own containers that a forward reaches, so that it can be put back."""

from __future__ import annotations

from collections import deque
from operator import is_
from typing import Any, TypeGuard

from graphrt.core.trust.places import LengthLink, Link

_MOST = 4096


def contained(link: Link) -> TypeGuard[LengthLink]:
    """Whether it is of a plain list, deque, dict or set that is not large."""
    if not isinstance(link, LengthLink) or type(link.container) not in (list, deque, dict, set):
        return False
    return len(link.container) <= _MOST


class Contents:
    """One container as it was. What is in its items is not looked at."""

    def __init__(self, link: LengthLink) -> None:
        self._container: Any = link.container
        self._was = self._items()
        self._last = self._was
        self._changes = 0

    def look(self) -> None:
        """Note whether it is another one than when this was called last."""
        now = self._items()
        if not _same(self._last, now):
            self._last = now
            self._changes += 1

    @property
    def moves(self) -> bool:
        """Whether more than one run has changed it, other than by entries of a dict that were not
        there: a table of tables is made once for each of them."""
        return self._changes > 1 and type(self._container) is not dict

    def restore(self) -> None:
        """Put back what was in it."""
        if _same(self._was, self._items()):
            return
        self._container.clear()
        if isinstance(self._container, list | deque):
            self._container.extend(self._was)
        elif isinstance(self._container, set):
            self._container.update(self._was)
        else:
            half = len(self._was) // 2
            self._container.update(zip(self._was[:half], self._was[half:], strict=True))

    def _items(self) -> list[Any]:
        # A set by its members: theirs is the hash, which is not asked here.
        held = self._container
        return [*held, *held.values()] if type(held) is dict else [*held]


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))
