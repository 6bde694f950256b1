"""Rows of state that padding writes, and whether live rows use them.

The address of padding is a constant, such as slot -1. With a spare row nobody else has it; without
one it is a row of a request, which the next padded replay overwrites while that request rests.

1. A warm-up has padding alone. A row that several of its rows write is an address of padding.
2. A trial of a padded step shows whether padding writes there: masked kernels leave the row alone.
3. A row is live if a step without padding, or the host, writes something else there, or if results
   of live rows depend on whether padding has written it. A write does not count where the host has
   sent live tokens to nobody: by a negative padding value, or several tokens to one row.

A row that padding writes and that is live is a `conflict`. Rows that padding takes by its position
in the batch are no addresses: `cache[arange(n)]` is right where requests move up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch

from graphrt.core.base import tree
from graphrt.core.base.thread_mode import unseen
from graphrt.trust.compare import difference, rounding_of
from graphrt.trust.watching.rows import Rows
from graphrt.trust.watching.writes import Region, SavedWrites

_NO_PADS: Mapping[str, int] = MappingProxyType({})
IndexValues: TypeAlias = Mapping[str, tuple[torch.Tensor, frozenset[int]]]
"""Index input -> its live values in a step, and the addresses of its buffers in graphs."""
_NO_VALUES: IndexValues = MappingProxyType({})
_SPOILT = (
    "\n    padding of earlier steps has written there: unless its request has written the whole "
    "row since, the row is spoilt already, and the request has to start again"
)


class PaddingRow:
    """Rows of one tensor that have the address of padding."""

    def __init__(self, region: Region, name: str, source: tuple[int, ...]) -> None:
        self.region = region
        self.name = name
        self.source = source
        """The addresses of the integer tensors that the writing operator was given."""
        self.value = region.was
        """The contents that padding left last."""
        self.replaced: torch.Tensor | None = None
        """The contents that a served step's padding wrote over; None before."""
        self.last: torch.Tensor | None = None
        """The contents after the last run that was looked at; None if others ran since."""
        # Which elements padding of a step has changed, and which live rows use; None: none.
        self.written: torch.Tensor | None = None
        self.live: torch.Tensor | None = None
        self.is_carried = bool(getattr(region.use, "exposed", True))
        """Whether the contents reach the next step: scratch memory is overwritten before."""
        # Whether the warm-up has changed the contents; None before these are put back.
        self.warmed_up: bool | None = None
        # Whether padding of a served step, whose effects stay, has changed the contents.
        self.is_overwritten = False
        self.is_nobodys = False
        """Whether the host sends live tokens there that belong to nobody, such as rejected ones."""

    def is_spoilt(self) -> bool:
        """Whether padding writes elements that live rows use."""
        written, live = self.written, self.live
        if written is None or live is None or not self.is_carried:
            return False
        return bool((written & live).any())

    def other(self) -> torch.Tensor | None:
        """Contents that padding would leave there, or has replaced; None if none are known that
        differ from those now."""
        if self.written is None and not self.warmed_up:
            return None
        known = (self.value, self.replaced)
        return next((v for v in known if v is not None and _apart(v, self.region.was)), None)


class PaddingRows:
    """All rows that padding writes, for one runner."""

    def __init__(self, pads: Mapping[str, int] = _NO_PADS, *, sees_all: bool = False) -> None:
        """`pads` are the padding values of inputs that may be addresses, by name. `sees_all` says
        that every step with a graph is tried."""
        self._pads = pads
        self._sees_all = sees_all
        self.clear()

    def clear(self) -> None:
        """Forget everything: there are no graphs."""
        self.rows: list[PaddingRow] = []
        # (tensor, row numbers) of each of `rows`.
        self._known: set[object] = set()
        # (index operand, row numbers) -> the first of the rows that it wrote: layers write alike.
        self._first_of: dict[object, PaddingRow] = {}
        # Whether no padded step ran unseen since the capture.
        self._is_observed = True
        self.has_new = False
        """Whether rows have become live of which no trial has shown whether padding writes them."""

    @property
    def first_rows(self) -> list[PaddingRow]:
        """One of the rows for each index that wrote them."""
        return [*self._first_of.values()]

    def lengths(self) -> set[int]:
        """How many rows there are where padding writes."""
        regions = [row.region for row in self.rows]
        return {size for each in regions for size, _ in each.numbers_of(each.rows)}

    def note_warm_up(self, memory: SavedWrites) -> None:
        """After a run of padding alone, before its writes are taken back: note its addresses."""
        unseen(lambda: self._note((each, each.addressed_by_padding()) for each in memory.regions))

    def note_protected(self, memory: SavedWrites) -> None:
        """Note the rows that such runs wrote of memory too large to be saved."""
        unseen(lambda: self._note((each, each.rows) for each in memory.protected_rows))

    def _note(self, written: Iterable[tuple[Region, Rows | None]]) -> None:
        for region, rows in written:
            tensor = region.tensor()
            if rows is None or tensor is None:
                continue
            numbers = region.numbers_of(rows)
            place = (region.key, *region.place, str(numbers))
            if place not in self._known:
                self._known.add(place)
                used_by = [
                    f"{name}={pad}"
                    for name, pad in self._pads.items()
                    if any(pad % size in held for size, held in numbers)
                ] or [f"{name}={pad}" for name, pad in self._pads.items()]
                shown = [held[0] if len(held) == 1 else held for _, held in numbers]
                name = (
                    f"padding ({', '.join(used_by) or 'of no integer input'}) writes row "
                    f"{', '.join(map(str, shown))} of {region.use}"
                )
                row = PaddingRow(Region(tensor, rows, region.use), name, region.source)
                self.rows.append(row)
                self._first_of.setdefault((region.source, str(numbers)), row)

    def begin(self) -> None:
        """Before the runs of a trial. A row that has changed since the last look, at which no
        padded step was replayed, was written by an eager step or by the host."""
        unseen(self._begin)

    def _begin(self) -> None:
        self.rows = [row for row in self.rows if row.region.tensor() is not None]
        for row in self.rows:
            now = row.region.was = row.region.read()
            last, row.last = row.last, None
            # All equal: the host has reset the tensor.
            is_known = last is not None and self._is_observed and not row.is_nobodys
            if last is not None and is_known and not _is_uniform(now):
                self._note_used(row, last, now)

    def end(self, *, padded: bool, stays: bool = False) -> None:
        """After the runs of a trial, or of a capture: note the contents that stay. `stays` says
        that these are of the step as it was asked for, with its padding."""
        self._is_observed &= self._sees_all or not padded
        for row in self.rows:
            row.is_overwritten |= stays and row.replaced is not None
        unseen(self._end)

    def _end(self) -> None:
        for row in self.rows:
            if row.last is None:
                row.last = row.region.read()
            if row.warmed_up is None:
                row.warmed_up = _apart(row.value, row.last)

    def forget_contents(self) -> None:
        """Padded rows run unseen: changes until the next look show nothing."""
        for row in self.rows:
            row.last = None

    def read(self, rows: Sequence[PaddingRow]) -> list[torch.Tensor]:
        """Copies of the contents now."""
        return unseen(lambda: [row.region.read() for row in rows])

    def note_used(
        self,
        rows: Sequence[PaddingRow],
        before: Sequence[torch.Tensor],
        after: Sequence[torch.Tensor],
        indices: IndexValues = _NO_VALUES,
    ) -> None:
        """Note that a run without padding has found these contents, and left those, with these
        values of its index inputs."""

        def note() -> None:
            for row, was, now in zip(rows, before, after, strict=True):
                if not row.is_nobodys and self._sends_to_nobody(row, indices):
                    for each in self.rows:
                        each.is_nobodys |= each.source == row.source
                if not row.is_nobodys:
                    self._note_used(row, was, now)

        unseen(note)

    def _sends_to_nobody(self, row: PaddingRow, indices: IndexValues) -> bool:
        """Whether live tokens have the address of padding where no request can have it: the host
        sends them to nobody. A position or a block table, from which the forward computes slots,
        does not say it."""
        for name, (values, addresses) in indices.items():
            pad = self._pads.get(name)
            if pad is not None and values.dim() == 1 and not addresses.isdisjoint(row.source):
                sent = int((values == pad).sum())
                if sent > 1 or (sent and pad < 0):
                    return True
        return False

    def _note_used(self, row: PaddingRow, before: torch.Tensor, after: torch.Tensor) -> None:
        # An idle rank steps a row of padding: it writes what padding does.
        if after.shape == before.shape and torch.equal(tree.octets(after), tree.octets(before)):
            return
        changed = _unlike(after, before)
        if changed is not None and _apart(after, row.value):
            self.note_live(row, changed)

    def note_padded(
        self, alone: Sequence[torch.Tensor], padded: Sequence[torch.Tensor], *, served: bool
    ) -> None:
        """Note the contents that a step has left without padding and with it."""

        def note() -> None:
            for row, without, contents in zip(self.rows, alone, padded, strict=True):
                changed = _unlike(contents, without) if _apart(contents, without) else None
                if changed is not None:
                    row.written = changed if row.written is None else changed | row.written
                    row.value, row.replaced = contents, without if served else row.replaced

        unseen(note)

    def note_carried(
        self,
        swapped: Iterable[tuple[PaddingRow, torch.Tensor]],
        after: Sequence[torch.Tensor],
        usual: Sequence[torch.Tensor],
    ) -> None:
        """Note that a run without padding has found these contents, and has left `after` in all
        rows; with the contents as they are it leaves `usual`."""

        def note() -> None:
            for row, value in swapped:
                at = self.rows.index(row)
                stays = _unlike(after[at], value) is None
                row.is_carried |= stays and _unlike(usual[at], value) is not None

        unseen(note)

    def note_live(self, row: PaddingRow, elements: torch.Tensor) -> None:
        """Note that live rows use these elements."""
        self.has_new |= row.live is None
        row.live = elements if row.live is None else elements | row.live

    def note_read(self, row: PaddingRow, value: torch.Tensor) -> None:
        """Note that results of live rows were others with this value there."""
        elements = unseen(partial(_unlike, row.region.was, value))
        if elements is not None:
            self.note_live(row, elements)

    def conflict(self) -> str | None:
        """The first row that padding writes and live rows use, in words."""
        row = unseen(lambda: next((row for row in self.rows if row.is_spoilt()), None))
        return None if row is None else row.name + _SPOILT * row.is_overwritten


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether contents differ by more than rounding; False once the memory of one is gone."""
    if ours.shape != theirs.shape:
        return False
    apart = difference(ours, theirs)
    return apart is not None and apart.relative > rounding_of([ours.dtype], (), lambda _: "ieee")


def _unlike(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor | None:
    """Which elements have other bits; None if none have, or once the memory of one is gone."""
    if ours.shape != theirs.shape:
        return None
    unlike = (tree.octets(ours) != tree.octets(theirs)).view(-1, ours.element_size()).any(1)
    return unlike if bool(unlike.any()) else None


def _is_uniform(value: torch.Tensor) -> bool:
    """Whether all elements are the same."""
    elements = tree.octets(value).view(-1, value.element_size())
    return bool((elements == elements[:1]).all())
