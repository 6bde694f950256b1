"""Which captured graph serves a batch: the only source of truth of which graphs exist."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from graphrt.core.base import InvalidBatchError
from graphrt.core.batch import Batch, BatchDescriptor, ForwardContext, GraphMode, graphs_off
from graphrt.core.dispatch.index import BEST_FIRST, GraphIndex, Table, serves
from graphrt.core.dispatch.reasons import OF_BATCHES, Dispatch, Reason
from graphrt.core.dispatch.uniform import check_batch, checked_uniform, live_query_len, unpadded


class _Limits(NamedTuple):
    """What one batch may have: not these modes, at least so many tokens, at most this level."""

    banned: frozenset[GraphMode]
    tokens: int
    highest: int
    max_padding: float | None

    def wasted_by(self, found: Dispatch) -> bool:
        ratio = self.max_padding
        return ratio is not None and found.descriptor.num_tokens > self.tokens * ratio


_LEVEL = {GraphMode.NONE: 0, GraphMode.PIECEWISE: 1, GraphMode.FULL: 2}
_NO_MODES: frozenset[GraphMode] = frozenset()


class GraphDispatcher:
    """Finds the best captured graph for a batch, where best is least in the order of DESIGN 6:
    FULL before PIECEWISE, tokens, active LoRAs, uniform before general, bounds, requests.

    Graphs are reserved when they are planned and published when all their wrappers have captured.
    """

    def __init__(self, mode: GraphMode | str, *, max_padding: float | None = None) -> None:
        """`max_padding` is the largest allowed ratio of a graph's tokens to the batch's.

        With `GRAPHRT_MODE=NONE` in the environment no graph serves a batch. Raises
        `InvalidModeError`.
        """
        self.mode = GraphMode.parse(mode)
        self._off = graphs_off()
        if self._off:
            self.mode = GraphMode.NONE
        self.max_padding = max_padding
        self._graphs: list[Dispatch] = []
        self._slots: dict[tuple[GraphMode, BatchDescriptor], int] = {}
        self._published: set[int] = set()
        self._hits: list[int] = []
        self._contexts: list[ForwardContext] = []
        self._last_context = ForwardContext(GraphMode.NONE)
        self._misses: dict[Reason, int] = dict.fromkeys(OF_BATCHES, 0)
        self._reindex()

    def reserve(self, mode: GraphMode, descriptor: BatchDescriptor) -> int:
        """The slot of a planned graph; the same one when it is reserved again."""
        key = (mode, descriptor)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self._graphs)
            self._graphs.append(Dispatch(mode, descriptor, Reason.HIT, slot))
            self._hits.append(0)
            self._contexts.append(ForwardContext(mode, descriptor, slot))
        return slot

    def publish(self, mode: GraphMode, descriptor: BatchDescriptor) -> Dispatch:
        """Serve batches with this graph from now on; returns what they are told."""
        slot = self.reserve(mode, descriptor)
        if not self._off:
            self._published.add(slot)
            self._reindex()
        return self._graphs[slot]

    def withdraw(self, mode: GraphMode, descriptor: BatchDescriptor) -> None:
        """Stop serving batches with this graph; it stays reserved."""
        self._published.discard(self.reserve(mode, descriptor))
        self._reindex()

    def withdraw_all(self) -> None:
        """Stop serving; every graph stays reserved."""
        self._published.clear()
        self._reindex()

    def planned_for(
        self,
        batch: Batch,
        *,
        at_least: int = 0,
        at_most_mode: GraphMode | None = None,
    ) -> Dispatch | None:
        """The best graph for `batch` among those that are reserved but not published."""
        highest = 2 if at_most_mode is None else _LEVEL[at_most_mode]
        banned = {GraphMode.parse(mode) for mode in batch.exclude}
        modes = [m for m in BEST_FIRST if m not in banned and _LEVEL[m] <= highest]
        tokens = max(batch.num_tokens, at_least)
        planned = GraphIndex(self._planned(batch))
        found = (self._find(batch, tokens, mode, planned) for mode in modes)
        return next((graph for graph in found if graph is not None), None)

    @property
    def published(self) -> tuple[Dispatch, ...]:
        """The graphs that serve batches, in the order they were reserved."""
        return tuple(self._graphs[slot] for slot in sorted(self._published))

    def dispatch(
        self,
        batch: Batch,
        *,
        exclude: Collection[GraphMode] = _NO_MODES,
        at_least: int = 0,
        at_most_mode: GraphMode | None = None,
        max_padding: float | None = None,
    ) -> Dispatch:
        """The best captured graph for `batch`, else NONE with the unpadded batch and the reason.

        `exclude` takes runtime modes out for this batch. `at_least` (tokens) and `at_most_mode`
        take what ranks have agreed on. Never raises for a batch of at least one token; raises
        `InvalidBatchError` for one of none.
        """
        # Free where nothing goes wrong: what is no batch shows when it is read.
        try:
            if not (exclude or at_least or at_most_mode is not None or max_padding is not None):
                slot = self._hit(batch)
                if slot >= 0:
                    return self._graphs[slot]
            tokens = batch.num_tokens
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            check_batch(batch, error)
            raise
        if tokens < 1:
            raise InvalidBatchError(
                "a batch needs at least one token",
                got=batch.num_tokens,
                expected="num_tokens >= 1",
                advice="skip the step when nothing is scheduled",
            )
        limits = _Limits(
            frozenset(GraphMode.parse(mode) for mode in (*exclude, *batch.exclude)),
            max(batch.num_tokens, at_least),
            _LEVEL[GraphMode.FULL if at_most_mode is None else GraphMode.parse(at_most_mode)],
            self.max_padding if max_padding is None else max_padding,
        )
        for mode in BEST_FIRST:
            if mode not in limits.banned and _LEVEL[mode] <= limits.highest:
                found = self._find(batch, limits.tokens, mode)
                if found is not None and not limits.wasted_by(found):
                    self._hits[found.slot] += 1
                    return found
        reason = self._why_not(batch, limits)
        self._misses[reason] += 1
        return Dispatch(GraphMode.NONE, unpadded(batch), reason)

    def step(self, batch: Batch, updates: Any = None, metadata: Any = None) -> ForwardContext:
        """The context to run `batch` in, of its best graph: `with dispatcher.step(batch): ...`.

        Contexts are used again, so one thread at a time may do this with one dispatcher.
        """
        try:
            slot = self._hit(batch)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            check_batch(batch, error)
            raise
        if slot >= 0:
            context = self._contexts[slot]
            if context.token is None:
                last = self._last_context
                if last is not context and last.token is None:
                    # Or every graph would keep what its last step was given.
                    last.updates = last.metadata = None
                self._last_context = context
                context.updates = updates
                context.metadata = metadata
                if context.mode is GraphMode.PIECEWISE:
                    context.query_len = live_query_len(batch)
                return context
            found = self._graphs[slot]
        else:
            found = self.dispatch(batch)
        context = ForwardContext(found.mode, found.descriptor, found.slot, updates, metadata)
        if found.mode is GraphMode.PIECEWISE:
            context.query_len = live_query_len(batch)
        return context

    def counts(self) -> dict[Reason, int]:
        """How many batches were dispatched for each reason so far."""
        return {**self._misses, Reason.HIT: sum(self._hits)}

    def hits(self) -> dict[tuple[GraphMode, BatchDescriptor], int]:
        """How many batches each reserved graph has served."""
        return {key: self._hits[slot] for key, slot in self._slots.items()}

    def reset_counts(self) -> None:
        """Start counting anew."""
        self._misses = dict.fromkeys(OF_BATCHES, 0)
        self._hits = [0] * len(self._hits)

    def _hit(self, batch: Batch) -> int:
        """The slot of the best graph where one look into a table finds it, else -1."""
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
        try:
            limit, slot, more = self._plain.get(query_len, self._general)[num_tokens]
        except IndexError:
            return -1
        if num_reqs is not None and num_reqs > limit:
            slot = more.find(num_reqs)
            if slot < 0:
                return -1
        self._hits[slot] += 1
        return slot

    def _reindex(self) -> None:
        """Have the index built anew at the next dispatch: capture publishes graphs one by one."""
        self._index: GraphIndex | None = None
        # Empty tables make every look into them miss, and the search builds the index.
        self._plain: dict[int | None, Table] = {}
        self._general: Table = []

    def _built(self) -> GraphIndex:
        index = self._index
        if index is None:
            index = GraphIndex(self.published)
            self._plain = index.plain()
            self._general = self._plain[None]
            # Last: another thread that finds it set takes the tables for built.
            self._index = index
        return index

    def _find(
        self, batch: Batch, tokens: int, mode: GraphMode, index: GraphIndex | None = None
    ) -> Dispatch | None:
        """The best graph of one mode with at least `tokens` tokens, among the published ones."""
        reqs, query_len = batch.num_reqs, batch.query_len
        if query_len is not None:
            reqs, query_len = checked_uniform(batch.num_tokens, reqs, query_len)
        slot = (index or self._built()).find(
            mode, tokens, reqs, query_len, batch.bounds, batch.num_active_loras, batch.variant
        )
        return None if slot < 0 else self._graphs[slot]

    def _why_not(self, batch: Batch, limits: _Limits) -> Reason:
        if self.mode is GraphMode.NONE:
            return Reason.MODE_NONE
        modes = [mode for mode in BEST_FIRST if mode not in limits.banned]
        allowed = [mode for mode in modes if _LEVEL[mode] <= limits.highest]
        if any(self._find(batch, limits.tokens, mode) for mode in allowed):
            return Reason.PADDING
        alone = limits._replace(tokens=batch.num_tokens)
        local = [self._find(batch, batch.num_tokens, mode) for mode in modes]
        if any(found is not None and not alone.wasted_by(found) for found in local):
            return Reason.RANKS_DISAGREE
        if any(self._find(batch, batch.num_tokens, m) for m in BEST_FIRST if m in limits.banned):
            return Reason.EXCLUDED
        if any(found.mode in modes for found in self._planned(batch)):
            return Reason.NOT_CAPTURED
        return Reason.TOO_LARGE if self._too_large(batch, limits.tokens) else Reason.NO_GRAPH

    def _too_large(self, batch: Batch, tokens: int) -> bool:
        """Whether a smaller batch of the same kind would have a graph."""
        _, _, query_len, bounds, loras, variant, _ = batch
        kin = [
            graph.descriptor.num_tokens
            for graph in self.published
            if serves(graph.descriptor, 1, None, query_len, bounds, loras, variant)
        ]
        return bool(kin) and tokens > max(kin)

    def _planned(self, batch: Batch) -> list[Dispatch]:
        """The graphs that are reserved but not published and could serve the batch."""
        tokens, reqs, query_len, bounds, loras, variant, _ = batch
        if query_len is not None:
            reqs, query_len = checked_uniform(tokens, reqs, query_len)
        return [
            graph
            for graph in self._graphs
            if graph.slot not in self._published
            and serves(graph.descriptor, tokens, reqs, query_len, bounds, loras, variant)
        ]
