"""The Python state that runs of a forward move: numbers, and which tensor is where."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any, TypeGuard

import torch

from graphrt.core.base import told, unseen
from graphrt.core.trust.places import MISSING, LengthLink, Link, Place, Places, same_value
from graphrt.core.trust.watching import Use, storage_key


class Moving:
    """What is at the places that a forward reaches, as it was; `look` notes what a run has moved.

    `restore` puts all of that back. Whether there was something else, which no walk finds (the
    state of an iterator, say), is not known.
    """

    def __init__(self, places: Places) -> None:
        self._numbers = places.numbers
        self._tensors = [place for place, _ in places.tensors]
        self._values = places.values()
        self._held = [place.get() for place in self._tensors]
        memory = [_memory_of(held) for held in self._held]
        self._memory = [
            (place, held, had, storage_key(had))
            for place, held, had in zip(self._tensors, self._held, memory, strict=True)
            if had is not None and isinstance(held, torch.Tensor)
        ]
        self._moved: dict[str, tuple[Place, Any, Any]] = {}
        self._changes: dict[str, list[Any]] = {}
        self._containers = [
            _Contents(link) for link in (*places.links, *places.number_links) if _contained(link)
        ]
        # Tensors that a run has given other memory, by where they are: what they had.
        self._moved_memory: dict[str, torch.Tensor] = {}
        self._moves_of_memory: dict[str, list[Any]] = {}
        self._replaced: list[tuple[Place, torch.Tensor, object]] = []

    def look(self) -> None:
        """Note what is not what it was."""
        now = [place.get() for place in self._numbers]
        for place, was, value in zip(self._numbers, self._values, now, strict=True):
            if place.path not in self._moved and not same_value(was, value):
                self._moved[place.path] = (place, was, value)
                self._changes[place.path] = [0, was]
        for place, held in zip(self._tensors, self._held, strict=True):
            found = place.get()
            is_news = found is not held and place.path not in self._changes
            if isinstance(held, torch.Tensor) and is_news:
                self._replaced.append((place, held, found))
                self._changes[place.path] = [0, held]
        for place, _, memory in self._elsewhere():
            self._moved_memory.setdefault(place.path, memory)
        self.look_at_moved()

    def look_at_moved(self) -> None:
        """Note which of what was moved has moved again."""
        for place in [each[0] for each in (*self._moved.values(), *self._replaced)]:
            change, now = self._changes[place.path], place.get()
            if not (now is change[1] or same_value(change[1], now)):
                change[:] = change[0] + 1, now
        for place, held, memory in self._elsewhere():
            change = self._moves_of_memory.setdefault(place.path, [0, storage_key(memory)])
            if storage_key(held) != change[1]:
                change[:] = change[0] + 1, storage_key(held)

    def names(self) -> list[str]:
        """The paths of numbers that a run has moved and that can be moved further."""
        return [
            path
            for path, (place, was, now) in self._moved.items()
            if place.writable and _step(was, now) is not None
        ]

    def described(self, names: Iterable[str]) -> str:
        """Numbers with what they were and what a run has made of them."""
        moved = [(name, *self._moved[name][1:]) for name in names]
        return ", ".join(f"{name} = {told(was)}, then {told(now)}" for name, was, now in moved)

    def move(self, names: Iterable[str], steps: int) -> None:
        """Move numbers as many steps further as `steps` says, from where they were."""
        for name in names:
            place, was, now = self._moved[name]
            step = _step(was, now)
            assert step is not None
            place.set((not was) if isinstance(was, bool) else was + step * steps)

    def rebound(self, uses: Mapping[int, Use]) -> list[str]:
        """Where a run has put another tensor in the place of one that it had read."""
        replaced = [(place.path, held) for place, held, _ in self._replaced]
        replaced += self._moved_memory.items()
        return [path for path, held in replaced if storage_key(held) in uses]

    def restore_memory(self, *, once: bool = True) -> None:
        """Give tensors the memory back that runs took from them (`set_`, `.data =`); without
        `once` only where more than one has: a weight may be converted at the first call."""
        for place, held, memory in self._elsewhere():
            moves = self._moves_of_memory.get(place.path, [0, None])
            if once or moves[0] > 1:
                held.data = memory.detach()
                moves[1] = storage_key(memory)

    def _elsewhere(self) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
        for place, held, memory, key in self._memory:
            if not _is_in(held, key) and place.get() is held:
                yield place, held, memory

    def anew(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The paths at which more than one run has put a tensor of its own, and the last one."""
        for place, _, _ in (*self._moved.values(), *self._replaced):
            now = place.get()
            if self._changes[place.path][0] > 1 and isinstance(now, torch.Tensor):
                yield place.path, now

    def settle(self) -> set[str]:
        """After several runs: put back what more than one of them has moved, and leave what was
        made once, such as a table that the first run builds. Containers stay as they are: what is
        in them may be the host's own notes. Returns where something was put back."""
        moved = [(place, was) for place, was, _ in (*self._moved.values(), *self._replaced)]
        back = [each for each in moved if self._changes[each[0].path][0] > 1]
        for place, was in back:
            if place.writable:
                _set(place, was)
        return {place.path for place, was in back if place.get() is was}

    def restore(self) -> None:
        """Put back what was there at first."""
        for place, was in zip(self._numbers, self._values, strict=True):
            if place.writable and was is not MISSING and not same_value(was, place.get()):
                _set(place, was)
        for place, held in zip(self._tensors, self._held, strict=True):
            if place.writable and held is not MISSING and place.get() is not held:
                _set(place, held)
        self.restore_memory()
        for own in self._containers:
            own.restore()


def _memory_of(held: object) -> torch.Tensor | None:
    if not isinstance(held, torch.Tensor) or storage_key(held) is None:
        return None
    # A subclass may have no detach() of the ordinary kind.
    plain = type(held) in (torch.Tensor, torch.nn.Parameter)
    return unseen(held.detach) if plain else None


def _is_in(tensor: torch.Tensor, key: int | None) -> bool:
    """Whether its memory is known by `key`. Asked of all, several times a graph."""
    try:
        return bool(tensor.untyped_storage()._cdata == key)
    except (NotImplementedError, RuntimeError):
        return False


def _set(place: Place, value: object) -> None:
    # What cannot be set any more is gone, or read-only: no run of the forward has moved it.
    with contextlib.suppress(TypeError, IndexError, AttributeError):
        place.set(value)


def _step(was: Any, now: Any) -> Any:
    """By how much a number was moved; None for what is none."""
    if isinstance(was, bool) and isinstance(now, bool):
        return 1
    if type(was) is not type(now) or not isinstance(was, int | float):
        return None
    return now - was


_MOST = 4096
"""Containers of more items are not put back."""


def _contained(link: Link) -> TypeGuard[LengthLink]:
    """Whether it is of a plain list, deque, dict or set that is not large."""
    if not isinstance(link, LengthLink) or type(link.container) not in (list, deque, dict, set):
        return False
    return len(link.container) <= _MOST


class _Contents:
    """One container as it was. What is in its items is not looked at."""

    def __init__(self, link: LengthLink) -> None:
        self._container: Any = link.container
        self._was = self._items()

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
