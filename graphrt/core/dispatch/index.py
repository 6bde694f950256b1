"""Tables that find the least compatible graph: constant time for ladders, bisection otherwise."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Protocol

from graphrt.core.batch import BatchDescriptor, GraphMode

_INF = float("inf")
BEST_FIRST = (GraphMode.FULL, GraphMode.PIECEWISE)
_DENSE_LIMIT = 1 << 16
"""Above so many tokens a table of one row per token count would be larger than it is worth."""
_KNOWN_QUERY_LENS = 64
"""So many are found at once, graphs or not; a host that has more cannot make the table grow."""


class Graph(Protocol):
    """A graph that may serve a batch, with the slot by which it is found."""

    @property
    def mode(self) -> GraphMode: ...

    @property
    def descriptor(self) -> BatchDescriptor: ...

    @property
    def slot(self) -> int: ...


def serves(
    graph: BatchDescriptor,
    tokens: int,
    reqs: int | None,
    query_len: int | None,
    bounds: Sequence[int],
    loras: int,
    variant: Hashable,
) -> bool:
    """Whether a graph is compatible with a batch of these numbers."""
    return (
        graph.num_tokens >= tokens
        and (reqs is None or _reqs(graph) >= reqs)
        and (not graph.uniform or graph.query_len == query_len)
        and graph.lora_capacity >= loras
        and graph.variant == variant
        and all(
            axis < len(bounds) and bound >= bounds[axis] for axis, bound in enumerate(graph.bounds)
        )
    )


def _reqs(graph: BatchDescriptor) -> float:
    return _INF if graph.num_reqs is None else graph.num_reqs


def _bound(graph: BatchDescriptor, axis: int) -> float:
    return graph.bounds[axis] if axis < len(graph.bounds) else _INF


class Front:
    """Graphs in order of preference, each serving more requests than all before it."""

    __slots__ = ("limits", "slots")

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.limits: list[float] = []
        self.slots: list[int] = []
        for graph in _pruned(graphs):
            self.limits.append(_reqs(graph.descriptor))
            self.slots.append(graph.slot)

    def find(self, reqs: int | None) -> int:
        """The slot of the first graph for `reqs` requests (None: any), or -1."""
        index = 0 if reqs is None else bisect_left(self.limits, reqs)
        return self.slots[index] if index < len(self.slots) else -1


def _pruned(graphs: Sequence[Graph]) -> list[Graph]:
    """Without those that serve no more requests than one that is preferred."""
    kept: list[Graph] = []
    for graph in graphs:
        if not kept or _reqs(graph.descriptor) > _reqs(kept[-1].descriptor):
            kept.append(graph)
    return kept


Row = tuple[float, int, Front]
"""The requests and the slot of the preferred graph, and the front it is the first of."""


class _Sparse:
    """A table over so many token counts that rows are found by bisection."""

    def __init__(self, sizes: list[int], rows: list[Row]) -> None:
        self._sizes = sizes
        self._rows = rows

    def __getitem__(self, tokens: int) -> Row:
        if tokens.__class__ is not int:
            # As a list does, which takes no floats.
            tokens = operator.index(tokens)
        return self._rows[bisect_left(self._sizes, tokens)]


Table = list[Row] | _Sparse


class PlainTables(dict[int | None, Table]):
    """Tables by query length; one that no graph is uniform in has that of None."""

    __slots__ = ()

    def __missing__(self, query_len: object) -> Table:
        # Whatever else hashes like no number, such as a tensor, is looked at by the dispatcher.
        if type(query_len) is not int or None not in self:
            raise KeyError(query_len)
        table = self[None]
        if len(self) < _KNOWN_QUERY_LENS:
            self[query_len] = table
        return table


class GraphIndex:
    """An immutable index over graphs; most of its tables are built when first asked for."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs
        self.slots = frozenset(graph.slot for graph in graphs)
        descriptors = [graph.descriptor for graph in graphs]
        self._axes = max((len(d.bounds) for d in descriptors), default=0)
        self._bound_steps = [
            sorted({_bound(d, axis) for d in descriptors} - {_INF}) for axis in range(self._axes)
        ]
        self._lora_steps = sorted({d.lora_capacity for d in descriptors})
        self._query_lens = {d.query_len for d in descriptors if d.uniform}
        self._variants = {d.variant for d in descriptors}
        self._tables: dict[object, Table] = {}

    def plain(self) -> PlainTables:
        """Tables for batches without LoRAs, bounds or variant, by query length (None: any)."""
        unknown = (_INF,) * self._axes
        return PlainTables(
            (query_len, self._table(BEST_FIRST, query_len, 0, unknown, None))
            for query_len in (None, *self._query_lens)
        )

    def find(
        self,
        mode: GraphMode,
        tokens: int,
        reqs: int | None,
        query_len: int | None,
        bounds: Sequence[int],
        loras: int,
        variant: Hashable,
    ) -> int:
        """The slot of the best graph of `mode` for a batch of these numbers, or -1."""
        if variant not in self._variants:
            return -1
        lora_step = bisect_left(self._lora_steps, loras)
        if lora_step == len(self._lora_steps):
            return -1
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
            return -1
        return row[2].find(reqs)

    def _step(self, axis: int, bounds: Sequence[int]) -> float:
        """The smallest captured bound that admits the batch's; infinite if none or unknown."""
        steps = self._bound_steps[axis]
        index = bisect_left(steps, bounds[axis]) if axis < len(bounds) else len(steps)
        return steps[index] if index < len(steps) else _INF

    def _table(
        self,
        modes: Sequence[GraphMode],
        query_len: int | None,
        loras: float,
        cell: Sequence[float],
        variant: Hashable,
    ) -> Table:
        def compatible(graph: BatchDescriptor) -> bool:
            return (
                (not graph.uniform or graph.query_len == query_len)
                and graph.lora_capacity >= loras
                and graph.variant == variant
                and all(_bound(graph, axis) >= least for axis, least in enumerate(cell))
            )

        by_mode = [
            sorted(
                (g for g in self._graphs if g.mode is mode and compatible(g.descriptor)),
                key=lambda graph: _preference(graph, self._axes),
            )
            for mode in modes
        ]
        sizes = sorted({g.descriptor.num_tokens for group in by_mode for g in group})
        return _spread(sizes, _rows(sizes, by_mode))


def preferred(first: Graph, second: Graph) -> bool:
    """Whether `first` is the better of two graphs that can both serve a batch (DESIGN 6)."""
    axes = max(len(first.descriptor.bounds), len(second.descriptor.bounds))
    return _preference(first, axes) < _preference(second, axes)


def _preference(graph: Graph, axes: int) -> tuple[object, ...]:
    """The least of the compatible graphs is the best; `axes` is how many bounds are compared."""
    descriptor = graph.descriptor
    return (
        BEST_FIRST.index(graph.mode),
        descriptor.num_tokens,
        descriptor.lora_capacity,
        not descriptor.uniform,
        tuple(_bound(descriptor, axis) for axis in range(axes)),
        _reqs(descriptor),
    )


def _rows(sizes: list[int], by_mode: list[list[Graph]]) -> list[Row]:
    """For each size the front of what has at least as many tokens, the modes one after another."""
    fronts: list[list[Graph]] = [[] for _ in by_mode]
    pending = [list(group) for group in by_mode]
    rows: list[Row] = []
    for size in reversed(sizes):
        for index, group in enumerate(pending):
            same: list[Graph] = []
            while group and group[-1].descriptor.num_tokens >= size:
                same.append(group.pop())
            if same:
                fronts[index] = _pruned([*reversed(same), *fronts[index]])
        front = Front([graph for group in fronts for graph in group])
        rows.append((front.limits[0], front.slots[0], front))
    rows.reverse()
    return rows


def _spread(sizes: list[int], rows: list[Row]) -> Table:
    if not sizes or sizes[-1] > _DENSE_LIMIT:
        return _Sparse(sizes, rows)
    table: list[Row] = []
    for size, row in zip(sizes, rows, strict=True):
        table.extend([row] * (size + 1 - len(table)))
    return table
