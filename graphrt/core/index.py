"""Tables that find the least compatible graph: constant time for ladders, bisection otherwise."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.modes import GraphMode

if TYPE_CHECKING:
    from graphrt.core.dispatcher import Dispatch

_INF = float("inf")
BEST_FIRST = (GraphMode.FULL, GraphMode.PIECEWISE)
_DENSE_LIMIT = 1 << 16
"""Above so many tokens a table of one row per token count would be larger than it is worth."""


class Candidate(NamedTuple):
    """A graph that may serve a batch."""

    descriptor: BatchDescriptor
    mode: GraphMode
    result: Dispatch

    @property
    def reqs(self) -> float:
        return _INF if self.descriptor.num_reqs is None else self.descriptor.num_reqs

    def bound(self, axis: int) -> float:
        bounds = self.descriptor.bounds
        return bounds[axis] if axis < len(bounds) else _INF

    def order(self, axes: int) -> tuple[object, ...]:
        """Within one mode and token count: the least of the compatible ones is the best."""
        descriptor = self.descriptor
        return (
            descriptor.num_tokens,
            descriptor.lora_capacity,
            not descriptor.uniform,
            tuple(self.bound(axis) for axis in range(axes)),
            self.reqs,
        )

    def serves(
        self,
        tokens: int,
        reqs: int | None,
        query_len: int | None,
        bounds: Sequence[int],
        loras: int,
        variant: Hashable,
    ) -> bool:
        """Whether the graph is compatible with a batch of these numbers."""
        descriptor = self.descriptor
        return (
            descriptor.num_tokens >= tokens
            and (reqs is None or self.reqs >= reqs)
            and (not descriptor.uniform or descriptor.query_len == query_len)
            and descriptor.lora_capacity >= loras
            and descriptor.variant == variant
            and all(
                self.bound(axis) == _INF
                or (axis < len(bounds) and self.bound(axis) >= bounds[axis])
                for axis in range(len(descriptor.bounds))
            )
        )


class Front:
    """Graphs in order of preference, each serving more requests than all before it."""

    __slots__ = ("limits", "results")

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.limits: list[float] = []
        self.results: list[Dispatch] = []
        for candidate in candidates:
            if not self.limits or candidate.reqs > self.limits[-1]:
                self.limits.append(candidate.reqs)
                self.results.append(candidate.result)

    def find(self, reqs: int | None) -> Dispatch | None:
        if reqs is None:
            return self.results[0] if self.results else None
        place = bisect_left(self.limits, reqs)
        return self.results[place] if place < len(self.results) else None


Row = tuple[float, "Dispatch", Front]


class _Sparse:
    """A table over so many token counts that rows are found by bisection."""

    def __init__(self, sizes: list[int], rows: list[Row]) -> None:
        self._sizes = sizes
        self._rows = rows

    def __getitem__(self, tokens: int) -> Row:
        return self._rows[bisect_left(self._sizes, tokens)]


Table = list[Row] | _Sparse


class GraphIndex:
    """An immutable index over captured graphs; the tables are built when first asked for."""

    def __init__(self, candidates: Collection[Candidate]) -> None:
        self._candidates = candidates
        self._axes = max((len(c.descriptor.bounds) for c in candidates), default=0)
        self._bound_steps = [
            sorted({c.bound(axis) for c in candidates} - {_INF}) for axis in range(self._axes)
        ]
        self._lora_steps = sorted({c.descriptor.lora_capacity for c in candidates})
        self._query_lens = {c.descriptor.query_len for c in candidates if c.descriptor.uniform}
        self._variants = {c.descriptor.variant for c in candidates}
        self._tables: dict[object, Table] = {}

    def plain(self) -> dict[int | None, Table]:
        """Tables for batches without LoRAs, bounds or variant, by query length (None: any)."""
        unknown = (_INF,) * self._axes
        return {
            query_len: self._table(BEST_FIRST, query_len, 0, unknown, None)
            for query_len in (None, *self._query_lens)
        }

    def find(
        self,
        mode: GraphMode,
        tokens: int,
        reqs: int | None,
        query_len: int | None,
        bounds: Sequence[int],
        loras: int,
        variant: Hashable,
    ) -> Dispatch | None:
        """The best graph of `mode` for a batch of these numbers, or None."""
        if variant not in self._variants:
            return None
        lora_step = bisect_left(self._lora_steps, loras)
        if lora_step == len(self._lora_steps):
            return None
        cell = tuple(self._step(axis, bounds) for axis in range(self._axes))
        # Query lengths that no graph is uniform in share one table, so hosts cannot grow the dict.
        if query_len not in self._query_lens:
            query_len = None
        key = (mode, query_len, lora_step, cell, variant)
        table = self._tables.get(key)
        if table is None:
            capacity = self._lora_steps[lora_step]
            table = self._tables[key] = self._table([mode], query_len, capacity, cell, variant)
        try:
            row = table[tokens]
        except IndexError:
            return None
        return row[2].find(reqs)

    def _step(self, axis: int, bounds: Sequence[int]) -> float:
        """The smallest captured bound that admits the batch's; infinite if none or unknown."""
        steps = self._bound_steps[axis]
        place = bisect_left(steps, bounds[axis]) if axis < len(bounds) else len(steps)
        return steps[place] if place < len(steps) else _INF

    def _table(
        self,
        modes: Sequence[GraphMode],
        query_len: int | None,
        loras: float,
        cell: Sequence[float],
        variant: Hashable,
    ) -> Table:
        by_mode = [
            sorted(
                (
                    c
                    for c in self._candidates
                    if c.mode is mode
                    and (not c.descriptor.uniform or c.descriptor.query_len == query_len)
                    and c.descriptor.lora_capacity >= loras
                    and c.descriptor.variant == variant
                    and all(c.bound(axis) >= least for axis, least in enumerate(cell))
                ),
                key=lambda c: c.order(self._axes),
            )
            for mode in modes
        ]
        sizes = sorted({c.descriptor.num_tokens for group in by_mode for c in group})
        return _spread(sizes, _rows(sizes, by_mode))


def _rows(sizes: list[int], by_mode: list[list[Candidate]]) -> list[Row]:
    """For each size the front of what has at least as many tokens, the modes one after another."""
    fronts: list[list[Candidate]] = [[] for _ in by_mode]
    pending = [list(group) for group in by_mode]
    rows: list[Row] = []
    for size in reversed(sizes):
        for place, group in enumerate(pending):
            same: list[Candidate] = []
            while group and group[-1].descriptor.num_tokens >= size:
                same.append(group.pop())
            if same:
                fronts[place] = _pruned([*reversed(same), *fronts[place]])
        front = Front([c for group in fronts for c in group])
        rows.append((front.limits[0], front.results[0], front))
    rows.reverse()
    return rows


def _pruned(candidates: list[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.reqs > kept[-1].reqs:
            kept.append(candidate)
    return kept


def _spread(sizes: list[int], rows: list[Row]) -> Table:
    if not sizes or sizes[-1] > _DENSE_LIMIT:
        return _Sparse(sizes, rows)
    table: list[Row] = []
    for size, row in zip(sizes, rows, strict=True):
        table.extend([row] * (size + 1 - len(table)))
    return table
