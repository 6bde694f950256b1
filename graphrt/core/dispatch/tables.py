"""Tables over graphs of one kind: the best with so many tokens and requests, of some modes."""

from __future__ import annotations

import operator
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from graphrt.core.batch import ForwardContext, GraphMode
from graphrt.core.dispatch.reasons import Dispatch

DENSE_LIMIT = 1 << 16
"""Above so many tokens a table of one place per token count would be larger than it is worth."""
NO_FULL, NO_PIECEWISE = 1, 2
"""Modes that are excluded. These bits say what is taken out for a batch."""
EXCLUDED = NO_FULL | NO_PIECEWISE
FULL_DISAGREED, PIECEWISE_DISAGREED = 4, 8
"""Modes that other ranks cannot run."""
NARROWED = range(16)
"""All that these bits can be together."""
_FULL, _PIECEWISE = 1, 2
LEFT = [
    (0 if narrowed & (NO_FULL | FULL_DISAGREED) else _FULL)
    | (0 if narrowed & (NO_PIECEWISE | PIECEWISE_DISAGREED) else _PIECEWISE)
    for narrowed in NARROWED
]
"""The modes that are left of both."""


class Count:
    """How many batches were told the same."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = 0


class Reserved(Count):
    """A reserved graph: what batches are told, how many it has served, the context of its steps.

    `reqs` is the most requests it serves, infinite for any.
    """

    __slots__ = ("context", "found", "reqs", "tokens")

    def __init__(self, found: Dispatch, context: ForwardContext) -> None:
        super().__init__()
        reqs = found.descriptor.num_reqs
        self.reqs: float = float("inf") if reqs is None else reqs
        self.tokens = found.descriptor.num_tokens
        self.found = found
        self.context = context


class Places(Protocol):
    """For a number of tokens, up to the largest size, the place of the smallest size for it."""

    def __getitem__(self, tokens: int, /) -> int: ...


class _Bisected:
    """The same for so many token counts that a table of all of them would be too large."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __getitem__(self, tokens: int) -> int:
        if tokens.__class__ is not int:
            # As a table does, which takes no floats.
            tokens = operator.index(tokens)
        return bisect_left(self._sizes, tokens)


class Ranked:
    """Graphs of one mode in order of preference, tokens first; `firsts` are the best for any number
    of requests, by the place of the tokens."""

    __slots__ = ("_graphs", "_most", "_starts", "_top", "firsts")

    def __init__(self, graphs: list[Reserved], sizes: list[int]) -> None:
        self._graphs = graphs
        self._starts = array("I")
        self._most: list[float] = []
        self._top: list[float] = []
        self.firsts: list[Reserved | None] = []
        start, most = len(graphs), 0.0
        for size in reversed(sizes):
            while start and graphs[start - 1].tokens >= size:
                start -= 1
                most = max(most, graphs[start].reqs)
            self._starts.append(start)
            self._most.append(most)
            self.firsts.append(graphs[start] if start < len(graphs) else None)
        for table in (self._starts, self._most, self.firsts):
            table.reverse()

    def find(self, place: int, reqs: int | None) -> Reserved | None:
        """The best graph for the tokens of `place` and `reqs` requests (None: any)."""
        first = self.firsts[place]
        if first is None or reqs is None or reqs <= first.reqs:
            return first
        if reqs > self._most[place]:
            return None
        # A tree of maxima: up to the right until a node has enough, then down to its first leaf.
        top = self._top or self._maxima()
        leaves = len(top) // 2
        node = leaves + self._starts[place]
        while top[node] < reqs:
            while node & 1:
                node >>= 1
            node += 1
        while node < leaves:
            node *= 2
            if top[node] < reqs:
                node += 1
        return self._graphs[node - leaves]

    def nbytes(self) -> int:
        """Bytes of all tables, with the one that is built when it is first needed."""
        listed = (self._graphs, self._starts, self._most, self.firsts)
        return sum(map(sys.getsizeof, listed)) + 16 * self._leaves()

    def _leaves(self) -> int:
        return 1 << max(len(self._graphs) - 1, 0).bit_length()

    def _maxima(self) -> list[float]:
        leaves = self._leaves()
        top = [0.0] * (2 * leaves)
        top[leaves : leaves + len(self._graphs)] = [graph.reqs for graph in self._graphs]
        for node in range(leaves - 1, 0, -1):
            top[node] = max(top[2 * node], top[2 * node + 1])
        self._top = top
        return top


class Tables:
    """Graphs of one kind, whatever their size.

    `last` is the largest size; up to it `rows[narrowed][places[tokens]]` is the best graph for any
    number of requests, or None, where `narrowed` says which modes are taken out.
    """

    __slots__ = ("_ranked", "last", "nbytes", "places", "rows")

    def __init__(self, graphs: Sequence[Reserved], room: int) -> None:
        """`graphs` in order of preference; a table of all token counts may take `room` bytes."""
        sizes = sorted({graph.tokens for graph in graphs})
        self.last = sizes[-1] if sizes else 0
        self.places = _places(sizes, room)
        full, pieces = (
            Ranked([graph for graph in graphs if graph.found.mode is mode], sizes)
            for mode in (GraphMode.FULL, GraphMode.PIECEWISE)
        )
        none: list[Reserved | None] = [None] * len(sizes)
        both = [
            second if first is None else first
            for first, second in zip(full.firsts, pieces.firsts, strict=True)
        ]
        by_mode = none, full.firsts, pieces.firsts, both
        self.rows = tuple(by_mode[left] for left in LEFT)
        self._ranked = (_FULL, full), (_PIECEWISE, pieces)
        self.nbytes = full.nbytes() + pieces.nbytes()
        self.nbytes += sum(map(sys.getsizeof, (sizes, self.places, none, both, self.rows)))

    def find(
        self, narrowed: int, tokens: int, reqs: int | None, most: float | None = None
    ) -> Reserved | None:
        """The best graph with at least `tokens` tokens, and at most `most`; FULL ones first."""
        if tokens > self.last:
            return None
        place = self.places[tokens]
        found = self.rows[narrowed][place]
        if found is None or (
            (reqs is None or reqs <= found.reqs) and (most is None or found.tokens <= most)
        ):
            return found
        for mode, ranked in self._ranked:
            if mode & LEFT[narrowed]:
                found = ranked.find(place, reqs)
                if found is not None and (most is None or found.tokens <= most):
                    return found
        return None


def _places(sizes: list[int], room: int) -> Places:
    width = 1 if len(sizes) <= 256 else 2
    if not sizes or sizes[-1] > DENSE_LIMIT or sizes[-1] * width > room:
        return _Bisected(sizes)
    table = array("B" if width == 1 else "H")
    for place, size in enumerate(sizes):
        table.extend([place] * (size + 1 - len(table)))
    return table.tobytes() if width == 1 else table
