"""Which captured graph serves a batch: the only source of truth of which graphs exist."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

from graphrt.core.base import InvalidBatchError, InvalidModeError
from graphrt.core.batch import Batch, BatchDescriptor, ForwardContext, GraphMode, graphs_off
from graphrt.core.dispatch.index import BEST_FIRST, GraphIndex, PlainTables, serves
from graphrt.core.dispatch.limits import NO_MODES, Limits, checked_ratio, limits_of
from graphrt.core.dispatch.reasons import NOT_REPLAYED, OF_BATCHES, Dispatch, Reason
from graphrt.core.dispatch.uniform import (
    checked_batch,
    checked_uniform,
    live_query_len,
    unpadded,
)

# What a look into a table raises for batches that are not in it, or not what they should be.
_NOT_FOUND = (IndexError, KeyError, TypeError, ValueError, RuntimeError)


class GraphDispatcher:
    """Finds the best captured graph for a batch, where best is least in the order of DESIGN 6:
    FULL before PIECEWISE, tokens, active LoRAs, uniform before general, bounds, requests.

    Graphs are reserved when they are planned and published when all their wrappers have captured.
    Threads may dispatch while another one publishes and withdraws: each dispatch that begins after
    a `publish` or `withdraw` has returned knows of it.
    """

    def __init__(self, mode: GraphMode | str, *, max_padding: float | None = None) -> None:
        """`max_padding` (>= 1) is the largest allowed ratio of a graph's tokens to the batch's.

        With `GRAPHRT_MODE=NONE` in the environment no graph serves a batch. Raises
        `InvalidModeError` and `InvalidOptionError`.
        """
        self.mode = GraphMode.parse(mode)
        self._off = graphs_off()
        if self._off:
            self.mode = GraphMode.NONE
        self.max_padding = checked_ratio(max_padding)
        self._lock = threading.RLock()
        self._graphs: list[Dispatch] = []
        self._slots: dict[tuple[GraphMode, BatchDescriptor], int] = {}
        self._published: set[int] = set()
        self._hits: list[int] = []
        self._contexts: list[ForwardContext] = []
        self._last_context = ForwardContext(GraphMode.NONE)
        self._misses: dict[Reason, int] = dict.fromkeys(OF_BATCHES, 0)
        self._not_replayed: Counter[tuple[int, Reason]] = Counter()
        self._told: object = None
        self._reindex()

    def reserve(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> int:
        """The slot of a planned graph; the same one when it is reserved again.

        Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for
        what is no descriptor.
        """
        mode = GraphMode.parse(mode)
        if mode not in BEST_FIRST:
            raise InvalidModeError(
                "a graph is captured and served in one runtime mode",
                got=mode.name,
                expected="PIECEWISE or FULL",
                advice="pass the mode that the graph was captured in",
            )
        if not isinstance(descriptor, BatchDescriptor):
            raise InvalidBatchError(
                "a graph is named by its descriptor",
                got=repr(descriptor)[:200],
                expected="BatchDescriptor(num_tokens, num_reqs, ...)",
                advice="BatchDescriptor(num_tokens=4)",
            )
        key = (mode, descriptor)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = len(self._graphs)
                self._hits.append(0)
                self._contexts.append(ForwardContext(mode, descriptor, slot, dispatcher=self))
                self._graphs.append(Dispatch(mode, descriptor, Reason.HIT, slot))
                self._slots[key] = slot
            return slot

    def publish(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> Dispatch:
        """Serve batches with this graph from now on; returns what they are told.

        Raises what `reserve` does.
        """
        with self._lock:
            slot = self.reserve(mode, descriptor)
            if not self._off:
                # First: whatever interrupts this, no table outlives what is published.
                self._reindex()
                self._published.add(slot)
            return self._graphs[slot]

    def withdraw(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> None:
        """Stop serving batches with this graph; it stays reserved. Raises what `reserve` does."""
        with self._lock:
            self._reindex()
            self._published.discard(self.reserve(mode, descriptor))

    def withdraw_all(self) -> None:
        """Stop serving; every graph stays reserved."""
        with self._lock:
            self._reindex()
            self._published.clear()

    def planned_for(
        self,
        batch: Batch,
        *,
        at_least: int = 0,
        at_most_mode: GraphMode | str | None = None,
    ) -> Dispatch | None:
        """The best graph for `batch` among those that are reserved but not published, and that
        dispatch would take: None if it would pad more than allowed. Raises what `dispatch` does."""
        batch = checked_batch(batch)
        limits = limits_of(batch, NO_MODES, at_least, at_most_mode, self.max_padding)
        planned = GraphIndex(self._planned(batch, self._built()))
        return self._best(batch, limits, planned)

    @property
    def published(self) -> tuple[Dispatch, ...]:
        """The graphs that serve batches, in the order they were reserved."""
        with self._lock:
            return tuple(self._graphs[slot] for slot in sorted(self._published))

    def dispatch(
        self,
        batch: Batch,
        *,
        exclude: Collection[GraphMode | str] = NO_MODES,
        at_least: int = 0,
        at_most_mode: GraphMode | str | None = None,
        max_padding: float | None = None,
    ) -> Dispatch:
        """The best captured graph for `batch`, else NONE with the unpadded batch and the reason.

        `exclude` takes runtime modes out for this batch. `at_least` (tokens) and `at_most_mode` (a
        runtime mode) take what ranks have agreed on. Never raises for a batch of at least one
        token; raises `InvalidBatchError` for one of none, or with counts that are no integers, and
        `InvalidModeError` and `InvalidOptionError` for limits that are none.
        """
        if not (exclude or at_least or at_most_mode is not None or max_padding is not None):
            slot = self._hit(batch)
            if slot >= 0:
                return self._graphs[slot]
        batch = checked_batch(batch)
        ratio = self.max_padding if max_padding is None else checked_ratio(max_padding)
        limits = limits_of(batch, exclude, at_least, at_most_mode, ratio)
        # One index for all of it: what is published meanwhile serves the next batch.
        index = self._built()
        found = self._best(batch, limits, index)
        if found is not None:
            self._hits[found.slot] += 1
            return found
        reason = self._why_not(batch, limits, index)
        self._misses[reason] += 1
        return Dispatch(GraphMode.NONE, unpadded(batch), reason)

    def step(self, batch: Batch, updates: Any = None, metadata: Any = None) -> ForwardContext:
        """The context to run `batch` in, of its best graph: `with dispatcher.step(batch): ...`.

        Contexts are used again, so one thread at a time may do this with one dispatcher.
        """
        slot = self._hit(batch)
        if slot >= 0:
            context = self._contexts[slot]
            if context.token is None:
                last = self._last_context
                if last is not context and last.token is None:
                    # Or every graph would keep what its last step was given.
                    last.updates = last.metadata = last.live = None
                self._last_context = context
                context.updates = updates
                context.metadata = metadata
                context.live = batch
                if context.mode is GraphMode.PIECEWISE:
                    context.query_len = live_query_len(batch)
                return context
            found = self._graphs[slot]
        else:
            found = self.dispatch(batch)
        context = ForwardContext(
            found.mode,
            found.descriptor,
            found.slot,
            updates,
            metadata,
            dispatcher=self,
            live=batch,
        )
        if found.mode is GraphMode.PIECEWISE:
            context.query_len = live_query_len(batch)
        return context

    def not_replayed(self, context: ForwardContext) -> None:
        """Count the step of this context, which was announced as a HIT, as MISSING_GRAPH.

        Wrappers say so, where the context has its `dispatcher`; of one step once.
        """
        step = context.token or context
        with self._lock:
            known = context.announced and context.slot < len(self._graphs)
            if step is not self._told and known:
                self._told = step
                self._not_replayed[context.slot, Reason.MISSING_GRAPH] += 1

    def run_eagerly(self, found: Dispatch, batch: Batch, reason: Reason) -> Dispatch:
        """Count a batch that was dispatched to a graph but is not replayed; returns how it runs
        instead."""
        with self._lock:
            self._not_replayed[found.slot, reason] += 1
        return Dispatch(GraphMode.NONE, unpadded(checked_batch(batch)), reason)

    def counts(self) -> dict[Reason, int]:
        """How many batches were dispatched for each reason so far."""
        with self._lock:
            counts = dict(self._misses)
            counts[Reason.HIT] = sum(self._hits) - self._not_replayed.total()
            counts.update(dict.fromkeys(NOT_REPLAYED, 0))
            for (_, reason), count in self._not_replayed.items():
                counts[reason] += count
            return counts

    def hits(self, *, announced: bool = False) -> dict[tuple[GraphMode, BatchDescriptor], int]:
        """How many batches each reserved graph has served; with `announced`, those too that were
        not replayed after all."""
        with self._lock:
            hits = list(self._hits)
            for (slot, _), count in self._not_replayed.items():
                hits[slot] -= 0 if announced else count
            return {key: hits[slot] for key, slot in self._slots.items()}

    def reset_counts(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._misses = dict.fromkeys(OF_BATCHES, 0)
            self._not_replayed.clear()
            self._hits = [0] * len(self._hits)

    def _hit(self, batch: Batch) -> int:
        """The slot of the best graph where one look into a table finds it, else -1."""
        try:
            num_tokens, num_reqs, query_len, bounds, loras, variant, excluded = batch
            if (
                loras
                or bounds
                or excluded
                or variant is not None
                or self.max_padding is not None
                or num_tokens < 1
            ):
                return -1
            if query_len is not None and (num_reqs is None or num_reqs * query_len != num_tokens):
                num_reqs, query_len = checked_uniform(num_tokens, num_reqs, query_len)
            limit, slot, more = self._plain[query_len][num_tokens]
            if num_reqs is not None and num_reqs > limit:
                slot = more.find(num_reqs)
                if slot < 0:
                    return -1
        except _NOT_FOUND:
            # No error is lost: what calls this looks again, and names what is wrong.
            return -1
        self._hits[slot] += 1
        return slot

    def _reindex(self) -> None:
        """Have the index built anew at the next dispatch: capture publishes graphs one by one."""
        # Empty tables make every look into them miss, and the search builds the index.
        self._plain = PlainTables()
        self._index: GraphIndex | None = None

    def _built(self) -> GraphIndex:
        index = self._index
        if index is None:
            # Under the lock of `publish`, or an index of before it could take the place of none.
            with self._lock:
                index = self._index
                if index is None:
                    index = GraphIndex(self.published)
                    self._plain = index.plain()
                    self._index = index
        return index

    def _best(self, batch: Batch, limits: Limits, index: GraphIndex) -> Dispatch | None:
        """The best graph of an index within the limits."""
        for mode in limits.modes:
            found = self._find(batch, limits.tokens, mode, index)
            if found is not None and not limits.wasted_by(found):
                return found
        return None

    def _find(
        self, batch: Batch, tokens: int, mode: GraphMode, index: GraphIndex
    ) -> Dispatch | None:
        """The best graph of one mode with at least `tokens` tokens in an index."""
        reqs, query_len = batch.num_reqs, batch.query_len
        if query_len is not None:
            reqs, query_len = checked_uniform(batch.num_tokens, reqs, query_len)
        slot = index.find(
            mode, tokens, reqs, query_len, batch.bounds, batch.num_active_loras, batch.variant
        )
        return None if slot < 0 else self._graphs[slot]

    def _why_not(self, batch: Batch, limits: Limits, index: GraphIndex) -> Reason:
        if self.mode is GraphMode.NONE:
            return Reason.MODE_NONE
        if any(self._find(batch, limits.tokens, mode, index) for mode in limits.modes):
            return Reason.PADDING
        modes = [mode for mode in BEST_FIRST if mode not in limits.banned]
        alone = limits._replace(tokens=batch.num_tokens)
        local = [self._find(batch, batch.num_tokens, mode, index) for mode in modes]
        if any(found is not None and not alone.wasted_by(found) for found in local):
            return Reason.RANKS_DISAGREE
        banned = [mode for mode in BEST_FIRST if mode in limits.banned]
        if any(self._find(batch, batch.num_tokens, mode, index) for mode in banned):
            return Reason.EXCLUDED
        planned = [found for found in self._planned(batch, index) if found.mode in modes]
        if planned:
            wasted = all(map(limits.wasted_by, planned))
            return Reason.PADDING if wasted else Reason.NOT_CAPTURED
        too_large = self._too_large(batch, limits.tokens, index)
        return Reason.TOO_LARGE if too_large else Reason.NO_GRAPH

    def _too_large(self, batch: Batch, tokens: int, index: GraphIndex) -> bool:
        """Whether a smaller batch of the same kind would have a graph."""
        _, _, query_len, bounds, loras, variant, _ = batch
        kin = [
            descriptor.num_tokens
            for descriptor in (self._graphs[slot].descriptor for slot in index.slots)
            if serves(descriptor, 1, None, query_len, bounds, loras, variant)
        ]
        return bool(kin) and tokens > max(kin)

    def _planned(self, batch: Batch, index: GraphIndex) -> list[Dispatch]:
        """The graphs that are reserved but not in an index and could serve the batch."""
        tokens, reqs, query_len, bounds, loras, variant, _ = batch
        if query_len is not None:
            reqs, query_len = checked_uniform(tokens, reqs, query_len)
        return [
            graph
            for graph in tuple(self._graphs)
            if graph.slot not in index.slots
            and serves(graph.descriptor, tokens, reqs, query_len, bounds, loras, variant)
        ]
