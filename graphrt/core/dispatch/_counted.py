"""How many batches a dispatcher has told what, and which of them came to nothing."""

from __future__ import annotations

import threading
from collections import Counter

from graphrt.core.base import fork_safe
from graphrt.core.batch import Batch, BatchDescriptor, ForwardContext, GraphMode
from graphrt.core.dispatch.reasons import NOT_REPLAYED, OF_BATCHES, Dispatch, Reason
from graphrt.core.dispatch.tables import Count, Reserved
from graphrt.core.dispatch.uniform import checked_batch, unpadded


class Counted:
    """The graphs that a dispatcher knows, and what became of its batches."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.RLock())
        self._graphs: list[Reserved] = []
        self._slots: dict[tuple[GraphMode, BatchDescriptor], int] = {}
        self._misses = {reason: Count() for reason in OF_BATCHES}
        self._not_replayed: Counter[tuple[int, Reason]] = Counter()
        self._told: object = None
        # How many of them were not replayed, of all graphs and for all reasons.
        self.counted_otherwise = 0

    def not_replayed(self, context: ForwardContext) -> None:
        """Count the step of this context, which was announced as a HIT, as MISSING_GRAPH.

        Wrappers say so, where the context has its `dispatcher`; of one step once.
        """
        step = context.token or context
        with self._lock:
            known = context.announced and context.slot < len(self._graphs)
            if step is not self._told and known:
                self._told = step
                self._count(context.slot, Reason.MISSING_GRAPH)

    def run_eagerly(self, found: Dispatch, batch: Batch, reason: Reason) -> Dispatch:
        """Count a batch that was dispatched to a graph but is not replayed; returns how it runs
        instead."""
        with self._lock:
            self._count(found.slot, reason)
        return Dispatch(GraphMode.NONE, unpadded(checked_batch(batch)), reason)

    def failed(self, found: Dispatch) -> Dispatch:
        """Count a batch whose step by a graph raised, so that no graph has served it; returns what
        became of it."""
        with self._lock:
            self._count(found.slot, Reason.FAILED)
        return found._replace(reason=Reason.FAILED)

    def _count(self, slot: int, reason: Reason) -> None:
        self._not_replayed[slot, reason] += 1
        self.counted_otherwise += 1

    def counts(self) -> dict[Reason, int]:
        """How many batches were dispatched for each reason so far."""
        with self._lock:
            counts = {reason: missed.batches for reason, missed in self._misses.items()}
            hits = sum(graph.batches for graph in self._graphs)
            counts[Reason.HIT] = hits - self._not_replayed.total()
            counts.update(dict.fromkeys(NOT_REPLAYED, 0))
            for (_, reason), count in self._not_replayed.items():
                counts[reason] += count
            return counts

    def hits(self, *, announced: bool = False) -> dict[tuple[GraphMode, BatchDescriptor], int]:
        """How many batches each reserved graph has served; with `announced`, those too that ran
        padded as it would be, because a wrapper did not have it (MISSING_GRAPH)."""
        with self._lock:
            hits = [graph.batches for graph in self._graphs]
            for (slot, reason), count in self._not_replayed.items():
                padded = announced and reason is Reason.MISSING_GRAPH
                hits[slot] -= 0 if padded else count
            return {key: hits[slot] for key, slot in self._slots.items()}

    def reset_counts(self) -> None:
        """Start counting anew."""
        with self._lock:
            for missed in self._misses.values():
                missed.batches = 0
            self._not_replayed.clear()
            for graph in self._graphs:
                graph.batches = 0
