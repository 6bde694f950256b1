"""What the graphs of one forward read and write beside their inputs: by name, and kept alive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, repeat
from operator import and_, eq, is_
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch

from graphrt.core.base import StaleInputError, storage_use_count, tree
from graphrt.core.device import GraphRead
from graphrt.core.replay import is_spare
from graphrt.core.trust.places import Link, Places, SlotLink, TensorLink, places_of
from graphrt.core.trust.python_state import PythonState
from graphrt.core.trust.watching import Use, Watch


def call(function: Callable[[], object]) -> object:
    """As `operator.call`, which Python 3.10 has not."""
    return function()


call = getattr(operator, "call", call)


T = TypeVar("T")

_CODE = (type, FunctionType, MethodType, CodeType, property, staticmethod, classmethod)


class TensorUse(NamedTuple):
    """One piece of memory that graphs read, beside their inputs: a whole storage, in `bytes`.

    `name` is where the forward has it, "" where no name was found; `moved` says that another tensor
    is there by now, so that only graphs hold it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    written: bool
    moved: bool
    source: str


class Reads:
    """What watched runs used from outside, with strong references until `forget`.

    A graph goes on reading memory that its host has let go of; here it lives on. Memory that is
    gone by the end of a run was a temporary one, which compiled code does not show as such.
    """

    def __init__(self, forward: Any, *, has_full: bool = True) -> None:
        """With `has_full` there are graphs without eager parts."""
        self._has_full = has_full
        self.protected: list[str] = []
        """Memory too large to be saved, and which rows of it a warm-up wrote."""
        self.saw_compiled_code = False
        self._forward = forward
        self._held: dict[int, tuple[torch.UntypedStorage, Use]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._where: dict[str, tuple[object, ...]] = {}
        # Which of them operators are given does not show: all count as read.
        self._packed: dict[str, object] = {}
        self.links: tuple[Link, ...] = ()
        """All of them hold as long as nothing has moved."""
        self.remade: set[str] = set()
        """Where every eager run of the forward puts another tensor, computed of its weights."""
        self.values: PythonState | None = None
        """Python values as of the last capture; None without graphs."""

    def note(self, watch: Watch) -> None:
        """Keep what a run used; what an earlier run has made may be made anew at any time."""
        self.saw_compiled_code |= watch.saw_compiled_code
        for key, use in watch.uses.items():
            # What another runner has handed out to this forward, and has again by now, is a
            # temporary one, though it is still there.
            if key in self._kept or is_spare(key):
                continue
            if key in self._held:
                self._held[key][1].is_written |= use.is_written
                continue
            storage = use.storage()
            if storage is not None and storage_use_count(storage._cdata) > 1:
                self._held[key] = storage, use

    def add(self, tensor: torch.Tensor, use: Use) -> None:
        """Keep a tensor that graphs read though no operator did."""
        self._held.setdefault(use.ref.cdata, (tensor.untyped_storage(), use))

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that graphs may read, wherever the forward has it later."""
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage

    def settle(self) -> Places:
        """Find names for what is held, and note where it is; returns the walk."""
        places = places_of(self._forward)
        self.values = PythonState(places, baked=True)
        self._where = self._places_of_reads(places)
        self._packed = {place.path: value for place, value in places.packed}
        read = set(self._where)
        self.links = tuple(
            link for link in places.links if not isinstance(link, TensorLink) or link.path in read
        )
        return places

    def glances(self) -> Iterator[bool]:
        """Without end: whether one slot on the way to what is held has what it had, and whether one
        tensor is where it was; another one each time.

        Put together of what runs in C: a step takes one of them.
        """
        slots = [
            link
            for link in self.links
            # Code is replaced by hand alone, and takes longer to look at.
            if isinstance(link, SlotLink) and not isinstance(link.held, _CODE)
        ]
        tensors = [
            link for link in slots if isinstance(link, TensorLink) and link.where is not None
        ]
        found = map(call, cycle([link.place.getter() for link in slots]))
        same = map(is_, found, cycle([link.held for link in slots]))
        if not tensors:
            return same if slots else repeat(True)
        addresses = map(torch.Tensor.data_ptr, cycle([link.held for link in tensors]))
        there = map(eq, addresses, cycle([link.held.data_ptr() for link in tensors]))
        return map(and_, same, there)

    def forget(self) -> None:
        """Let go of everything: the graphs are destroyed."""
        self._held.clear()
        self._kept.clear()
        self._where.clear()
        self._packed.clear()
        self.links = ()
        self.values = None
        self.remade.clear()
        self.protected.clear()

    def moved(self) -> list[str]:
        """The paths at which another tensor is now than the one that graphs read, or the same one
        elsewhere, or other packed weights. Walks from the forward again, and looks through links
        that no longer hold."""
        places = places_of(self._forward)
        now = {place.path: tensor for place, tensor in places.tensors}
        packed = {place.path: value for place, value in places.packed}
        found = [path for path, held in self._packed.items() if packed.get(path) is not held]
        for path, where in self._where.items():
            tensor = now.get(path)
            if tensor is None or _where(tensor) != where:
                found.append(path)
        return found

    def stale(self, moved: Sequence[str]) -> StaleInputError:
        """The error for what `moved` returned."""
        return StaleInputError(
            "tensors are not where the graphs read them",
            got=", ".join(moved[:8]) + (f" and {len(moved) - 8} more" * (len(moved) > 8)),
            expected="every one where it was at capture",
            advice="write new values into the old tensors, as by copy_(), or call recapture()",
        )

    def reachable(self) -> list[torch.Tensor]:
        """The tensors that the forward reaches now: who looks there sees them move."""
        found = [tensor for _, tensor in places_of(self._forward).tensors]
        return [tensor for tensor in found if _where(tensor) is not None]

    def as_graph_reads(self) -> list[GraphRead]:
        """What is held, each as a tensor over its storage."""
        found = []
        for storage, use in self._held.values():
            offset, *stride = use.stride
            tensor = torch.empty(0, dtype=use.dtype, device=storage.device)
            tensor.set_(storage, offset, use.shape, stride)
            found.append(GraphRead(tensor, None if use.source is None else str(use.source)))
        return found

    def storages(self) -> dict[int, Use]:
        """What is held, by the addresses of the storages."""
        return {storage.data_ptr(): use for storage, use in self._held.values()}

    def addresses(self) -> set[int]:
        """Where the storages begin that are held."""
        held = {storage.data_ptr() for storage, _ in self._held.values()}
        return held | {storage.data_ptr() for storage in self._kept.values()}

    def table(self) -> tuple[TensorUse, ...]:
        """Everything that is held."""
        names, moved = self._names(), set(self.moved())
        found = []
        for key, (storage, use) in self._held.items():
            paths = names.get(key) or [p for p, w in self._where.items() if w[-1] == key]
            gone = bool(paths) and all(path in moved for path in paths)
            if not paths:
                gone = storage_use_count(key) <= 1
            found.append(
                TensorUse(
                    min(paths, key=len, default=""),
                    use.dtype,
                    use.shape,
                    storage.nbytes(),
                    use.is_written,
                    gone,
                    "" if use.source is None else str(use.source),
                )
            )
        return tuple(found)

    def _names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for path, where in self._where.items():
            names.setdefault(where[-1], []).append(path)  # type: ignore[arg-type]
        return names

    def _places_of_reads(self, places: Places) -> dict[str, tuple[object, ...]]:
        found = {}
        for place, tensor in places.tensors:
            where = _where(tensor)
            if where is None or where[-1] not in self._held or place.path in self.remade:
                continue
            # Eager parts look again at every replay.
            if self._has_full or not self._held[where[-1]][1].in_parts:
                found[place.path] = where
        return found


def _where(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Where and what a tensor is, its storage last; None for what has no memory of its own."""
    try:
        return *tree.identity(tensor), tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def each_call(function: Callable[[], T]) -> Iterator[T]:
    """What `function` returns, called anew for each."""
    return map(call, repeat(function))  # type: ignore[arg-type]
