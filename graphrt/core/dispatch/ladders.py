"""The best graph for a batch, among graphs by their kinds (docs/concepts/sizes.md)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable
from operator import le

from graphrt.core.batch.descriptor import Batch, room_for_reqs
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Dispatch

GRAPH_MODES = (GraphMode.FULL, GraphMode.PIECEWISE)
"""The modes of graphs, the better one first."""
_INF = float("inf")


def preference(graph: Dispatch) -> tuple[object, ...]:
    """A key to sort graphs by: of those that can serve a batch the least is the best."""
    descriptor = graph.descriptor
    return (
        GRAPH_MODES.index(graph.mode),
        descriptor.num_tokens,
        descriptor.lora_capacity,
        not descriptor.uniform,
        # A graph without a bound, behind those with one.
        (*descriptor.bounds, _INF),
        _INF if descriptor.num_reqs is None else descriptor.num_reqs,
    )


_Ladder = tuple[GraphMode, float, tuple[int, ...], list[int], list[float], list[int]]
"""Graphs of one mode and kind, smallest first: the most LoRAs, the bounds; and of each its tokens,
the most requests, and its place among all graphs by preference."""

Search = tuple[Dispatch | None, bool, bool, int]
"""The best graph for a batch, and what else there is: one that pads too much, one of an excluded
mode, the most tokens that batches of its kind may have (0 for none)."""


class Ladders:
    """Graphs by what a batch must equal to be served: their variant, and their query length where
    they are uniform."""

    __slots__ = ("_ladders", "_ranked")

    def __init__(self, graphs: Collection[Dispatch], max_num_reqs: int | None = None) -> None:
        # All graphs, the best first: a graph's place here is its rank.
        self._ranked = sorted(graphs, key=preference)
        # (variant, query length) -> the ladders of this length, then those for any length.
        self._ladders: dict[tuple[Hashable, int | None], list[_Ladder]] = {}
        of_kind: dict[Hashable, _Ladder] = {}
        for rank, (mode, descriptor, _, _) in enumerate(self._ranked):
            kind = mode, descriptor.kind
            ladder = of_kind.get(kind)
            if ladder is None:
                loras, bounds = descriptor.lora_capacity, descriptor.bounds
                ladder = of_kind[kind] = mode, loras, bounds, [], [], []
                key = descriptor.variant, descriptor.query_len if descriptor.uniform else None
                self._ladders.setdefault(key, []).append(ladder)
            _, _, _, sizes, reqs, ranks = ladder
            sizes.append(descriptor.num_tokens)
            most = descriptor.num_reqs or max_num_reqs
            reqs.append(room_for_reqs(descriptor, most) if most else _INF)
            ranks.append(rank)
        for (variant, query_len), ladders in self._ladders.items():
            if query_len is not None:
                ladders += self._ladders.get((variant, None), ())

    def find(self, batch: Batch, excluded: Collection[GraphMode], max_tokens: float) -> Search:
        """The best graph of at most so many tokens; `batch` is checked and settled."""
        tokens, reqs = batch.num_tokens, batch.num_reqs
        loras, bounds = batch.num_active_loras, batch.bounds
        best, too_padded, left_out, largest = _INF, False, False, 0
        ladders = self._ladders.get((batch.variant, batch.query_len))
        if ladders is None:
            # Only those for any query length.
            ladders = self._ladders.get((batch.variant, None), [])
        for mode, most_loras, most_bounds, sizes, most_reqs, ranks in ladders:
            if most_loras < loras or (most_bounds and not _within(bounds, most_bounds)):
                continue
            last = sizes[-1]
            if last > largest:
                largest = last
            if last < tokens:
                continue
            rung = bisect_left(sizes, tokens)
            if reqs is not None and most_reqs[rung] < reqs:
                rung = _roomy(most_reqs, rung, reqs)
                if rung < 0:
                    continue
            if mode in excluded:
                left_out = True
            elif sizes[rung] > max_tokens:
                too_padded = True
            elif ranks[rung] < best:
                best = ranks[rung]
        graph = None if best is _INF else self._ranked[int(best)]
        return graph, too_padded, left_out, largest


def _roomy(most_reqs: list[float], start: int, reqs: int) -> int:
    """The first rung from `start` on that has room for so many requests; -1 for none."""
    return next((rung for rung in range(start, len(most_reqs)) if most_reqs[rung] >= reqs), -1)


def _within(bounds: tuple[int, ...], most: tuple[int, ...]) -> bool:
    """Whether a batch says as many bounds as a graph has, and none of them is larger."""
    if not bounds or bounds[0] > most[0]:
        return False
    # Mostly there is one bound.
    return len(most) == 1 or (len(bounds) >= len(most) and all(map(le, bounds, most)))
