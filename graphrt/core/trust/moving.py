"""What runs of a forward have moved in Python: numbers, and which tensor is where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from graphrt.core.trust.places.slots import Place, same_value
from graphrt.core.trust.snapshot import PythonState, changed, is_plain, put_at, refill, step_of
from graphrt.core.trust.watching.watch import Use, storage_key


class Moving:
    """`look` notes what is not what it was in `state`.

    Whether there was something else, which no walk finds (the state of an iterator, say), is not
    known.
    """

    def __init__(self, state: PythonState) -> None:
        self._state = state
        self._moved: dict[str, tuple[Place, Any, Any]] = {}
        self._changes: dict[str, list[Any]] = {}
        # Tensors that a run has given other memory, by where they are: what they had.
        self._moved_memory: dict[str, torch.Tensor] = {}
        self._moves_of_memory: dict[str, list[Any]] = {}
        self._replaced: list[tuple[Place, torch.Tensor, object]] = []
        # Of what is in a container or an array: how many runs have changed it, and what it is now.
        # Of a container those from the first eager run on that has: what captures alone change is
        # the platform's, or of a hook around a graph.
        self._contents: list[list[Any]] = [[0, was] for _, was, _ in state.contents()]
        self._arrays: list[list[Any]] = [[0, was] for _, was in state.arrays()]

    def note(self, moved: Mapping[str, tuple[Any, Any]]) -> None:
        """Note what steps before this run have moved: what it was, and what it is."""
        for place, _, now in self._state.now():
            if place.path in moved:
                self._moved[place.path] = (place, moved[place.path][0], now)
                self._changes[place.path] = [0, now]

    def begin(self) -> None:
        """Before an eager run: what is in containers by now, no run of the forward has changed."""
        for change, (_, _, items) in zip(self._contents, self._state.contents(), strict=True):
            change[1] = items

    def look(self) -> None:
        """Note what is not what it was."""
        for place, was, now in self._state.now():
            if place.path in self._changes or now is was:
                continue
            if isinstance(was, torch.Tensor):
                self._replaced.append((place, was, now))
            elif not same_value(was, now):
                self._moved[place.path] = (place, was, now)
            else:
                continue
            self._changes[place.path] = [0, was]
        for place, _, memory in self._state.elsewhere():
            self._moved_memory.setdefault(place.path, memory)
        self.look_at_moved()

    def look_at_moved(self, *, captured: bool = False) -> None:
        """Note which of what was moved has moved again; `captured` says that the run was one."""
        for place in [each[0] for each in (*self._moved.values(), *self._replaced)]:
            change, now = self._changes[place.path], place.get()
            if not (now is change[1] or same_value(change[1], now)):
                change[:] = change[0] + 1, now
        for place, held, memory in self._state.elsewhere():
            change = self._moves_of_memory.setdefault(place.path, [0, storage_key(memory)])
            if storage_key(held) != change[1]:
                change[:] = change[0] + 1, storage_key(held)
        for change, (_, _, items) in zip(self._contents, self._state.contents(), strict=True):
            if len(items) != len(change[1]) or not all(map(is_, items, change[1])):
                change[:] = change[0] + (change[0] > 0 or not captured), items
        for change, (array, _) in zip(self._arrays, self._state.arrays(), strict=True):
            if array.tobytes() != change[1].tobytes():
                change[:] = change[0] + 1, array.copy()

    def names(self) -> list[str]:
        """The paths of numbers that a run has moved and that can be moved further."""
        return [
            path
            for path, (place, was, now) in self._moved.items()
            if place.writable and step_of(was, now) is not None
        ]

    def described(self, names: Iterable[str]) -> str:
        """Numbers with what they were and what a run has made of them."""
        return changed({name: self._moved[name][1:] for name in names})

    def move(self, names: Iterable[str], steps: int) -> None:
        """Move numbers as many steps further as `steps` says, from where they were."""
        for name in names:
            place, was, now = self._moved[name]
            place.set(further(was, now, steps))

    def rebound(self, uses: Mapping[int, Use]) -> list[str]:
        """Where a run has put another tensor in the place of one that it had read."""
        # A normalized weight begins as the weight itself, which is read under its own name.
        stays = {
            storage_key(now)
            for _, was, now in self._state.now()
            if now is was and isinstance(now, torch.Tensor)
        }
        replaced = [(place.path, held) for place, held, _ in self._replaced]
        replaced += self._moved_memory.items()
        keys = ((path, storage_key(held)) for path, held in replaced)
        return [path for path, key in keys if key in uses and key not in stays]

    def restore_memory(self) -> None:
        """Give tensors the memory back that more than one run took from them (`set_`, `.data =`): a
        weight may be converted at the first call."""
        for place, held, memory in self._state.elsewhere():
            moves = self._moves_of_memory.get(place.path, [0, None])
            if moves[0] > 1:
                held.data = memory.detach()
                moves[1] = storage_key(memory)

    def anew(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The paths at which more than one run has put a tensor of its own, and the last one."""
        for place, _, _ in (*self._moved.values(), *self._replaced):
            now = place.get()
            if self._changes[place.path][0] > 1 and isinstance(now, torch.Tensor):
                yield place.path, now

    def settle(self, *, contents: bool) -> set[str]:
        """After several runs: put back what more than one of them has moved, and leave what was
        made once, such as a table that the first run builds. So do containers and objects with
        tensors, which graphs may read. `contents` says that eager parts may go by what is in a
        container; else it is left, as notes of the host. Returns where something was put back."""
        for change, (container, was, items) in zip(
            self._contents, self._state.contents(), strict=True
        ):
            if contents and change[0] > 1 and is_plain(items):
                refill(container, was)
        for change, (array, was) in zip(self._arrays, self._state.arrays(), strict=True):
            if change[0] > 1:
                array[...] = was
        moved = [(place, was) for place, was, _ in (*self._moved.values(), *self._replaced)]
        back = [each for each in moved if self._changes[each[0].path][0] > 1]
        for place, was in back:
            now = place.get()
            if place.writable and (is_plain(now) or isinstance(now, torch.Tensor)):
                put_at(place, was)
        return {place.path for place, was in back if place.get() is was}


def further(was: Any, now: Any, steps: int) -> Any:
    """A number that went from `was` to `now`, moved on by as many such steps."""
    return (not was) if isinstance(was, bool) else was + step_of(was, now) * steps
