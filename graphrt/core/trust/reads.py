"""What the graphs of one forward read and write beside their inputs: by name, and kept alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from graphrt.core.base import storage_use_count, tree
from graphrt.core.trust.places import Link, Places, TensorLink, places_of
from graphrt.core.trust.watching import Use, Watch

Named = Callable[[], Mapping[str, torch.Tensor]]


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

    def __init__(self, forward: Any, more: Iterable[Named] = ()) -> None:
        self.protected: list[str] = []
        """Memory too large to be saved, and which rows of it a warm-up wrote."""
        self.saw_compiled_code = False
        self._forward = forward
        self._more = [*more]
        self._held: dict[int, tuple[torch.UntypedStorage, Use]] = {}
        self._where: dict[str, tuple[object, ...]] = {}
        self.links: tuple[Link, ...] = ()
        """What to look at for a quick answer: all of them hold as long as nothing has moved."""

    def note(self, watch: Watch) -> None:
        """Keep what a run used."""
        self.saw_compiled_code |= watch.saw_compiled_code
        for key, use in watch.uses.items():
            if key in self._held:
                self._held[key][1].is_written |= use.is_written
                continue
            storage = use.storage()
            if storage is not None and storage_use_count(storage._cdata) > 1:
                self._held[key] = storage, use

    def settle(self) -> Places:
        """Find names for what is held, and note where it is; returns the walk."""
        places = places_of(self._forward)
        self._where = self._places_of_reads(places)
        read = set(self._where)
        self.links = tuple(
            link for link in places.links if not isinstance(link, TensorLink) or link.path in read
        )
        return places

    def forget(self) -> None:
        """Let go of everything: the graphs are destroyed."""
        self._held.clear()
        self._where.clear()
        self.links = ()
        self.protected.clear()

    def moved(self) -> list[str]:
        """The paths at which another tensor is now than the one that graphs read, or the same one
        elsewhere. Walks from the forward again, and looks through links that no longer hold."""
        now = {place.path: tensor for place, tensor in places_of(self._forward).tensors}
        found = []
        for path, where in self._where.items():
            tensor = now.get(path)
            if tensor is None or _where(tensor) != where:
                found.append(path)
        return found

    def unknown(self, known: Iterable[torch.Tensor]) -> list[str]:
        """What graphs read and nobody can name; `known` are tensors that need no name."""
        starts = {each.untyped_storage().data_ptr() for each in known}
        for named in self._more:
            starts |= {each.untyped_storage().data_ptr() for each in named().values()}
        names = self._names()
        return [
            str(use)
            for key, (storage, use) in self._held.items()
            if key not in names and storage.data_ptr() not in starts
        ]

    def storages(self) -> dict[int, Use]:
        """What is held, by the addresses of the storages."""
        return {storage.data_ptr(): use for storage, use in self._held.values()}

    def addresses(self) -> set[int]:
        """Where the storages begin that are held, and those of what compiled modules name."""
        found = {storage.data_ptr() for storage, _ in self._held.values()}
        for named in self._more:
            found |= {each.untyped_storage().data_ptr() for each in named().values()}
        return found

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
            if where is not None and where[-1] in self._held:
                found[place.path] = where
        return found


def _where(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Where and what a tensor is, its storage last; None for what has no memory of its own."""
    try:
        return *tree.identity(tensor), tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
