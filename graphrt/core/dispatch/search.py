"""Finding a graph without tables, where they would take more memory than an index may have."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Sequence

from graphrt.core.batch import GraphMode
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.dispatch.tables import LEFT, Reserved, Tables
from graphrt.core.dispatch.view import View

_INF = float("inf")


class _Tree:
    """Graphs in order of preference under a binary tree of the most that each part of them has.

    A part of which no graph can have enough is passed over whole: a search takes the logarithm of
    the number of graphs where one number decides, more where graphs have much of one and little of
    another.
    """

    def __init__(self, ranked: Sequence[tuple[int, Reserved]], axes: int) -> None:
        """`ranked` are graphs with their places among all others."""
        self.ranked = ranked
        self._leaves = leaves = 1 << max(len(ranked) - 1, 0).bit_length()
        rows = [_numbers(graph, axes) for _, graph in ranked]
        self._tops: list[list[float]] = []
        for column in zip(*rows, strict=True):
            top = [-_INF] * leaves + [*column] + [-_INF] * (leaves - len(rows))
            for node in range(leaves - 1, 0, -1):
                top[node] = max(top[2 * node], top[2 * node + 1])
            self._tops.append(top)
        full = [graph.tokens for _, graph in ranked if graph.found.mode is GraphMode.FULL]
        pieces = [graph.tokens for _, graph in ranked[len(full) :]]
        self._by_mode = (1, full, 0), (2, pieces, len(full))
        self.nbytes = sum(map(sys.getsizeof, (*self._tops, full, pieces, ranked, *ranked)))

    def find(
        self, left: int, tokens: int, needed: Sequence[float], most: float | None
    ) -> tuple[int, Reserved] | None:
        """The first graph of the modes that are `left` with all that is needed."""
        for mode, sizes, offset in self._by_mode:
            if mode & left:
                start, end = bisect_left(sizes, tokens), len(sizes)
                found = self._first(offset + start, offset + end, needed) if start < end else None
                if found is not None and (most is None or found[1].tokens <= most):
                    return found
        return None

    def _first(self, start: int, end: int, needed: Sequence[float]) -> tuple[int, Reserved] | None:
        leaves = self._leaves
        node = leaves + start
        while True:
            fits = self._may_fit(node, needed)
            while fits and node < leaves:
                node *= 2
                fits = self._may_fit(node, needed)
            if fits:
                return self.ranked[node - leaves]
            # To the next part on the right: up as long as this one is the right half.
            while node & 1:
                node >>= 1
            node += 1
            first = node << (leaves.bit_length() - node.bit_length())
            if node == 1 or first - leaves >= end:
                return None

    def _may_fit(self, node: int, needed: Sequence[float]) -> bool:
        for top, least in zip(self._tops, needed, strict=True):  # noqa: SIM110 - it is faster
            if top[node] < least:
                return False
        return True


class Forest:
    """Trees of graphs, given in order of preference, by their variant and query length."""

    def __init__(self, graphs: Sequence[Reserved], axes: int) -> None:
        kinds: dict[tuple[Hashable, int | None], list[tuple[int, Reserved]]] = {}
        for place, graph in enumerate(graphs):
            own = graph.found.descriptor
            query_len = own.query_len if own.uniform else None
            kinds.setdefault((own.variant, query_len), []).append((place, graph))
        self._trees = {kind: _Tree(ranked, axes) for kind, ranked in kinds.items()}
        self.nbytes = sum(tree.nbytes for tree in self._trees.values())

    def trees(self, variant: Hashable, query_len: int | None) -> list[_Tree]:
        """Those of graphs that may serve batches of this kind."""
        kinds = dict.fromkeys([(variant, None), (variant, query_len)])
        return [self._trees[kind] for kind in kinds if kind in self._trees]


class Searched(Tables):
    """The graphs of a forest for batches of one kind, found without tables of their own."""

    __slots__ = ("_needed", "_trees")

    def __init__(self, trees: list[_Tree], loras: float, bounds: Sequence[float]) -> None:
        self._trees = trees
        self._needed = (loras, *bounds)

    def find(
        self, narrowed: int, tokens: int, reqs: int | None, most: float | None = None
    ) -> Reserved | None:
        needed = (-_INF if reqs is None else reqs, *self._needed)
        found = [tree.find(LEFT[narrowed], tokens, needed, most) for tree in self._trees]
        return min((each for each in found if each is not None), default=(0, None))[1]


class SearchedView(View):
    """A view whose graphs are searched for."""

    __slots__ = ("_published",)

    def __init__(self, published: Searched, planned: Searched, *, off: bool) -> None:
        self._published = published
        self.planned = planned
        self.last = 0
        self.beyond = Reason.MODE_NONE if off else Reason.NO_GRAPH

    def find(
        self, narrowed: int, tokens: int, reqs: int | None, most: float | None = None
    ) -> Reserved | None:
        return self._published.find(narrowed, tokens, reqs, most)

    def without_graph(self, tokens: int) -> Reason:
        if self.find(0, tokens, None) is None and self.find(0, 1, None) is not None:
            return Reason.TOO_LARGE
        return Reason.NO_GRAPH


def _numbers(graph: Reserved, axes: int) -> tuple[float, ...]:
    own = graph.found.descriptor
    bounds = (*own.bounds, *[_INF] * axes)[:axes]
    return (graph.reqs, own.lora_capacity, *bounds)
