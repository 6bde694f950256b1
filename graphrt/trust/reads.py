"""What the graphs of one forward read and write beside their inputs: by name, and kept alive.

A graph goes on reading the memory of its capture, even after its host has put another tensor in a
weight's place. What is read is known from two sources:

- Named tensors are those of modules (`NamedWeights` of core).
- Tensors that watched warm-ups have used: `note` keeps their memory. `settle` walks through the
  Python objects of the forward (places/) and finds where it has them.

`check` compares both with now. `glances` are for steps: each compares a few places, and one tensor.
What a host changes in Python is told by `host` (host_watch.py). Nothing is known of reads of code
that torch shows no operators of, unless a node of a graph points to memory that the forward holds
(`keep_touched`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import chain, repeat
from threading import get_ident
from typing import Any, TypeVar

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import UntrackedWeightsError
from graphrt.core.base.texts import listed
from graphrt.core.base.torch_names import storage_use_count
from graphrt.core.replay.entry import Entry, graphs_of
from graphrt.core.replay.handout import is_spare
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.findings import TensorUse, UnknownMemory
from graphrt.core.runner.weights import NamedWeights, refuse_moved
from graphrt.trust.glances import Read
from graphrt.trust.host_watch import HostWatch
from graphrt.trust.places.slots import Place, call
from graphrt.trust.places.walk import Places, places_of, where_is
from graphrt.trust.watching.pointers import address_of, unknown_memory
from graphrt.trust.watching.watch import Use, Watch
from graphrt.trust.watching.writes import storage_of

T = TypeVar("T")


class ReadSet:
    """The memory that graphs use beside their inputs, kept alive until `forget`: a graph would go
    on reading memory that its host has freed.

    Memory that is freed by the end of a watched run was a temporary. Compiled code does not show
    which memory is.
    """

    def __init__(
        self,
        forward: Any,
        *,
        watched: bool = True,
        has_full: bool = True,
    ) -> None:
        """With `has_full` there are graphs without eager parts. Unless runs are `watched` nothing
        is known."""
        self.watched = watched
        self._forward = forward
        self._has_full = has_full
        self._read_nothing()

    def _read_nothing(self) -> None:
        # What graphs read at places that the last walk found: what the glances of steps look at.
        self._read: list[Read] = []
        # key of a storage -> the storage, kept alive, and how a watched run used it. Without a use
        # nothing was seen to read it.
        self._held: dict[int, tuple[torch.UntypedStorage, Use | None]] = {}
        self.drawn: dict[int, torch.Generator] = {}
        """Generators that watched runs gave to operators."""
        self.protected: list[str] = []
        """Memory too large to be saved, and which rows of it a warm-up wrote."""
        self.remade: set[str] = set()
        """Where every eager run of the forward puts another tensor, computed of its weights."""
        self.left_behind: list[str] = []
        """Where the last `settle` found other tensors than graphs captured before it read."""
        self.needs_copies = False
        """Whether eager steps need copies: a run has written, reshaped or kept an input."""
        self.host = HostWatch()
        # The walk that `host` goes by, and its thread: a `threading.local` has a dict for each.
        self._settled: tuple[Places, int] | None = None
        self.rounds = 0
        """How many steps it takes until their glances, a few slots each, have looked at all."""

    # What is read --------------------------------------------------------------------------------

    def note(self, watch: Watch, kind: Hashable = None, result: Any = None) -> None:
        """Keep the memory that a run for graphs of a `kind` used and somebody else still holds; the
        rest was temporary, as is that of its `result`, which kernels of compiled code have made.
        With None graphs of any kind may use it."""
        temporary = watch.uses.keys() & tree.storage_keys(result)
        if temporary:
            temporary -= {key for _, _, key in self.walk().keyed}
        self.needs_copies |= watch.changes_inputs
        self.drawn |= watch.drawn
        for key, use in watch.uses.items():
            # An output of another runner that this forward calls, and no longer holds: a temporary,
            # though that runner keeps its storage.
            if is_spare(key) or key in temporary:
                continue
            _, use_before = self._held.get(key, (None, None))
            if kind is not None and (use_before is None or use_before.kinds):
                (use_before or use).kinds.add(kind)
            if use_before is not None:
                use_before.is_written |= use.is_written
                use_before.is_unsure |= not use.is_scratch
                continue
            # A warm-up has made it, without its inputs.
            use.is_table = key in self._held
            storage = storage_of(use.ref)
            if storage is not None and storage_use_count(storage._cdata) > 1:
                self._held[key] = storage, use

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that graphs may read, wherever the forward has it later."""
        storage = tensor.untyped_storage()
        self._held.setdefault(storage._cdata, (storage, None))

    def keep_touched(self, unknown: UnknownMemory | None) -> bool:
        """Count as read what nodes of graphs point to, `unknown` until now, and the forward holds;
        returns whether there was any."""
        if unknown is None or not unknown.blocks:
            return False
        touched = {block.address for block in unknown.blocks}
        for _, tensor in self.walk().tensors:
            if where_is(tensor) is not None and address_of(tensor) in touched:
                use = Use(tensor, "a kernel that is no operator of torch's")
                _, use_before = self._held.get(use.ref.cdata, (None, None))
                if use_before is None:
                    self._held[use.ref.cdata] = tensor.untyped_storage(), use
        self.settle()
        return True

    def settle(self, places: Places | None = None) -> Places:
        """Find names for what is held, and note where it is now; returns the walk."""
        places, reads = places or self.places(), []
        self.left_behind = self.stale_paths(places)
        for place, tensor, key in places.keyed:
            _, use = self._held.get(key, (None, None))
            # An eager part looks its tensors up at every replay, so they may move.
            is_read = use is not None and (self._has_full or not use.in_parts)
            if is_read and not (self.remade and place.path in self.remade):
                reads.append(Read(place, tensor, where_is(tensor), key))
        # Packed weights are invisible to operators, so all of them count as read.
        self._read = reads + [Read(*each, id(each[1])) for each in places.packed]
        self.host.aim(places)
        self._settled = places, get_ident()
        return places

    def forget_kind(self, kind: Hashable) -> None:
        """Let go of what only graphs of a kind have read: they are destroyed."""
        for key, (_, use) in [*self._held.items()]:
            if use is not None and kind in use.kinds:
                use.kinds.discard(kind)
                if not use.kinds:
                    del self._held[key]
                    self._read = [each for each in self._read if each.key != key]

    def forget(self) -> None:
        """Let go of everything: the graphs are destroyed."""
        self.host.stop()
        self._read_nothing()

    # Whether it has moved ------------------------------------------------------------------------

    def glances(self, settings: Iterator[bool]) -> Iterator[bool]:
        """`glances` over the answers of `settings`."""
        answers, self.rounds = self.host.glances(self._read, settings)
        return answers

    def walk(self) -> Places:
        """A new walk from the forward."""
        return places_of(self._forward)

    def places(self) -> Places:
        """The last walk, if nothing has changed since; else a new one."""
        places, thread = self._settled or (Places(), -1)
        is_same = thread == get_ident() and self.host.is_as_aimed()
        return places if is_same else places_of(self._forward)

    @property
    def written(self) -> set[int]:
        """The keys of the storages that watched runs have written."""
        return {key for key, (_, use) in self._held.items() if use and use.is_written}

    @property
    def held(self) -> Collection[int]:
        """The keys of the storages that graphs use."""
        return self._held.keys()

    def moved(self, places: Places) -> list[Read]:
        """What was read at paths at which another tensor is now, by a new walk, or the same one
        elsewhere, or other packed weights."""
        now: dict[str, list[object]] = {}
        for place, held in (*places.tensors, *places.packed):
            now.setdefault(place.path, []).append(_memory_of(held))
        return [each for each in self._read if each.was not in now.get(each.place.path, ())]

    def stale_kinds(self) -> set[Hashable] | None:
        """The kinds of graphs that read what has moved; None if it may be any."""
        kinds = set[Hashable]()
        for each in self._stale(self.walk()):
            _, use = self._held.get(each.key or 0, (None, None))
            if use is None or not use.kinds:
                return None
            kinds |= use.kinds
        return kinds

    def stale_paths(self, places: Places) -> list[str]:
        """The paths of what has moved, and with which graphs may not go on."""
        return [each.place.path for each in self._stale(places)]

    def _stale(self, places: Places) -> list[Read]:
        stale = [each for each in self.moved(places) if not self.may_stay(each.key)]
        if stale:
            # A layer that is wrapped, as for an adapter, keeps its tensors one name deeper. Trials
            # show whether graphs may go on.
            homes: dict[object, list[Place]] = {}
            for place, held in (*places.tensors, *places.packed):
                homes.setdefault(_memory_of(held), []).append(place)
            taken = {place.path for each in homes.values() for place in each}
            stale = [
                each
                for each in stale
                if each.place.path in taken
                or not any(_wraps(each.place, home) for home in homes.get(each.was, ()))
            ]
        return stale

    def is_scratch(self, key: int | None) -> bool:
        """Whether graphs fill this memory before they read it."""
        _, use = self._held.get(key or 0, (None, None))
        return use is not None and use.is_scratch

    def may_stay(self, key: int | None) -> bool:
        """Whether graphs may go on with this memory, if trials pass, when the forward has another
        one: it is scratch memory, or a table that the forward computes and never writes."""
        storage, use = self._held.get(key or 0, (None, None))
        if storage is None or use is None:
            return False
        is_table = use.is_table and not use.is_written
        # `resize_()` would have freed it.
        return (is_table or self.is_scratch(key)) and storage.data_ptr() == use.span[0]

    def paths_of(self, keys: Collection[int]) -> list[str]:
        """Where the forward has this memory now, by one path each."""
        paths: dict[int, str] = {}
        for place, _, key in self.walk().keyed:
            if key in keys:
                paths.setdefault(key, place.path)
        return [*paths.values()]

    def is_unread(self, key: int | None) -> bool:
        """Whether watched runs have shown that graphs do not read what is in this memory."""
        if key is None or not self._held:
            return False
        _, use = self._held.get(key, (None, None))
        return use is None or (use.in_parts and not self._has_full) or self.may_stay(key)

    def check(
        self, weights: NamedWeights, entries: Iterable[Entry], of_runner: Iterable[torch.Tensor]
    ) -> None:
        """Raise `StaleInputError` if any tensor has moved, and `UntrackedWeightsError` if graphs
        read tensors that nothing compares: no `weights`, and none `of_runner`."""
        places = self.walk()
        refuse_moved(self.stale_paths(places))
        named = {address_of(tensor) for _, tensor in places.tensors}
        named.update(_addresses(entries, of_runner))
        named.update(map(address_of, weights.now().values()))
        unknown = [
            str(use)
            for storage, use in self._uses()
            if storage.data_ptr() not in named and not self.may_stay(storage._cdata)
        ]
        if unknown:
            raise UntrackedWeightsError(
                f"whether weights moved cannot be told of {len(unknown)} tensors that graphs read",
                got=listed(unknown),
                expected="tensors that the forward's attributes, closures or globals lead to",
                advice="hold them there, or call recapture() after they moved",
            )

    # What is told --------------------------------------------------------------------------------

    def unknown_memory(
        self, entries: Iterable[Entry], pool: GraphPool, of_runner: Iterable[torch.Tensor]
    ) -> UnknownMemory | None:
        """The memory outside of graph pools that nodes of the graphs point to and that is neither
        `of_runner`, a result, nor what a watched warm-up used: what is read by kernels
        outside of torch's operators, and by compiled code.

        Each graph takes milliseconds. Blocks are named by where the forward has them. None if
        nothing was watched, or the platform cannot tell.
        """
        if not self.watched:
            return None
        entries = [*entries]
        graphs = [graph for entry in entries for graph in graphs_of(entry.parts)]
        kept = (storage.data_ptr() for storage, _ in self._held.values())
        addresses = chain(kept, _addresses(entries, of_runner))
        unknown = unknown_memory(pool.platform, graphs, addresses)
        if unknown is None or not unknown.blocks:
            return unknown
        names: dict[int, str] = {}
        for place, tensor in self.walk().tensors:
            at = address_of(tensor)
            names[at] = min(names.get(at, place.path), place.path, key=len)
        blocks = [each._replace(name=names.get(each.address, "")) for each in unknown.blocks]
        return unknown._replace(blocks=tuple(blocks))

    def table(self) -> tuple[TensorUse, ...]:
        """Everything that graphs read."""
        moved, rows = {each.place.path for each in self.moved(self.walk())}, []
        places: dict[int | None, list[str]] = {}
        for each in self._read:
            places.setdefault(each.key, []).append(each.place.path)
        for storage, use in self._uses():
            paths = places.get(storage._cdata, [])
            is_last = storage_use_count(storage._cdata) <= 1
            has_moved = moved.issuperset(paths) if paths else is_last
            name, source = min(paths, key=len, default=""), str(use.source or "")
            rows.append(
                TensorUse(
                    name, use.dtype, use.shape, storage.nbytes(), use.is_written, has_moved, source
                )
            )
        return tuple(rows)

    def are_on_host(self) -> bool:
        """Whether a warm-up has read memory of the host: where one operand is a number there, its
        value is an argument of the kernel."""
        return any(storage.device.type == "cpu" for storage, _ in self._uses())

    def _uses(self) -> list[tuple[torch.UntypedStorage, Use]]:
        return [(storage, use) for storage, use in self._held.values() if use is not None]


def keys_at(places: Places | None, paths: Collection[str]) -> dict[str, int]:
    """path -> the key of the memory that a walk has found there."""
    keyed = () if places is None else places.keyed
    return {place.path: key for place, _, key in keyed if place.path in paths}


def _wraps(one: Place, other: Place) -> bool:
    """Whether one of two places is the same attribute of an object below the other's."""
    outer, inner = sorted((one.path, other.path), key=len)
    return one.label == other.label and inner.startswith(outer.removesuffix(one.label))


def _memory_of(held: Any) -> object:
    """Where a tensor is, or which packed weights these are."""
    return where_is(held) if issubclass(type(held), torch.Tensor) else id(held)


def each_call(function: Callable[[], T]) -> Iterator[T]:
    """What `function` returns, called anew for each."""
    return map(call, repeat(function))


def _addresses(entries: Iterable[Entry], of_runner: Iterable[torch.Tensor]) -> Iterator[int]:
    """Where tensors of a runner, and the results of its graphs, begin."""
    yield from map(address_of, of_runner)
    for entry in entries:
        yield from map(address_of, entry.results())
