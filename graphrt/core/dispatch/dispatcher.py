"""Which captured graph serves a batch: the only source of truth of which graphs exist."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from graphrt.core.base import Uncopied
from graphrt.core.batch import Batch, BatchDescriptor, ForwardContext, GraphMode, graphs_off
from graphrt.core.dispatch._counted import Counted
from graphrt.core.dispatch.index import NOT_BUILT, NOT_FOUND, GraphIndex
from graphrt.core.dispatch.limits import (
    COLLECTIONS,
    DISAGREED_BITS,
    EXCLUDED_BIT,
    EXCLUDED_BITS,
    MOST_PADDING,
    NO_MODES,
    checked_ratio,
    limits_of,
    plain_ratio,
)
from graphrt.core.dispatch.order import checked_key
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.dispatch.tables import Reserved
from graphrt.core.dispatch.uniform import (
    checked_batch,
    checked_uniform,
    live_query_len,
    unpadded,
)
from graphrt.core.dispatch.view import View

_new_tuple = tuple.__new__
# Constants: CPython 3.11 takes 0.07 us to load the member of an enum.
_NONE, _PIECEWISE = GraphMode.NONE, GraphMode.PIECEWISE
_NO_BOUNDS = Batch(1).bounds
_COUNT = (int, type(None))


def _stays(batch: Batch) -> bool:
    """Whether nobody can change what is in a batch."""
    tokens, reqs, query_len, bounds, loras, variant, exclude = batch
    return (
        tokens.__class__ is loras.__class__ is int
        and reqs.__class__ in _COUNT
        and query_len.__class__ in _COUNT
        and bounds is _NO_BOUNDS
        and variant is None
        and exclude.__class__ is frozenset
    )


class GraphDispatcher(Counted, Uncopied):
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
        super().__init__()
        self._most_padding = checked_ratio(max_padding)
        self._published: set[int] = set()
        self._last_context = ForwardContext(GraphMode.NONE)
        # The last batch of `step`; and one that came twice in turn, and that nobody can change: by
        # which version it was found which graph. Hosts that make one for each step pay a compare.
        self._last_batch: object = None
        self._again: tuple[Batch | None, object, Any] = None, None, None
        # Whether `step` may look a batch up by itself: not past the `dispatch` of a subclass.
        self._looks = type(self).dispatch is GraphDispatcher.dispatch
        self._reindex()

    @property
    def max_padding(self) -> float | None:
        """The largest allowed ratio of a graph's tokens to the batch's."""
        return self._most_padding

    @max_padding.setter
    def max_padding(self, ratio: float | None) -> None:
        checked = checked_ratio(ratio)
        with self._lock:
            # First, or an interrupt of the second would leave batches what they are told now; and
            # again, as meanwhile other threads are told by the ratio of before.
            self._reindex()
            try:
                self._most_padding = checked
            finally:
                self._reindex()

    def reserve(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> int:
        """The slot of a planned graph; the same one when it is reserved again.

        Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for
        what is no descriptor.
        """
        key = mode, descriptor = checked_key(mode, descriptor)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = len(self._graphs)
                context = ForwardContext(mode, descriptor, slot, dispatcher=self)
                found = Dispatch(mode, descriptor, Reason.HIT, slot)
                # First: whatever interrupts this, no index outlives what is reserved.
                self._reindex()
                self._graphs.append(Reserved(found, context))
                self._slots[key] = slot
            return slot

    def publish(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> Dispatch:
        """Serve batches with this graph from now on; returns what they are told.

        Raises what `reserve` does.
        """
        with self._lock:
            slot = self.reserve(mode, descriptor)
            if not self._off:
                # First: whatever interrupts this, no index outlives what is published.
                self._reindex()
                self._published.add(slot)
            return self._graphs[slot].found

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
        limits = limits_of(batch, NO_MODES, at_least, at_most_mode, self._most_padding)
        view, reqs = self._view(self._built(), batch)
        if view.planned is None:
            return None
        found = view.planned.find(limits.narrowed, limits.tokens, reqs, limits.most_tokens)
        return None if found is None else found.found

    @property
    def published(self) -> tuple[Dispatch, ...]:
        """The graphs that serve batches, in the order they were reserved."""
        with self._lock:
            return tuple(self._graphs[slot].found for slot in sorted(self._published))

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
        # One index for all of it: what is published meanwhile serves the next batch.
        index = self._index
        try:
            tokens, reqs, query_len, bounds, loras, variant, excluded = batch
            if query_len is not None and (reqs is None or reqs * query_len != tokens):
                reqs, query_len = checked_uniform(tokens, reqs, query_len)
            if bounds or loras or variant is not None:
                view = index.views(bounds, loras, variant)[query_len]
            else:
                view = index.plain[query_len]
            narrowed, agreed, ratio = 0, tokens, self._most_padding
            if excluded:
                narrowed = EXCLUDED_BITS[excluded]
            if exclude:
                if exclude.__class__ is frozenset:
                    narrowed |= EXCLUDED_BITS[exclude]
                elif exclude.__class__ in COLLECTIONS:
                    for mode in exclude:
                        narrowed |= EXCLUDED_BIT[mode]
                else:
                    raise TypeError(exclude)
            if at_most_mode is not None:
                narrowed |= DISAGREED_BITS[at_most_mode]
            if at_least != 0:
                if at_least.__class__ is not int:
                    raise TypeError(at_least)
                if at_least > tokens:
                    agreed = at_least
            if max_padding is not None:
                if max_padding.__class__ is not float or not 1.0 <= max_padding < MOST_PADDING:
                    max_padding = plain_ratio(max_padding)
                ratio = max_padding
            if tokens > 0 and agreed <= view.last:
                graph = view.rows[narrowed][view.places[agreed]]
                if (
                    graph is not None
                    and (reqs is None or reqs <= graph.reqs)
                    and (ratio is None or graph.tokens <= agreed * ratio)
                    and batch.__class__ is Batch
                ):
                    graph.batches += 1
                    return graph.found
            key = batch if ratio is None and agreed == tokens else (batch, agreed, ratio)
            answers = index.answers[narrowed]
            known = answers.get(key)
            if known is not None and batch.__class__ is Batch and tokens.__class__ is int:
                count, found = known
                count.batches += 1
                return found
            if (
                batch.__class__ is Batch
                and tokens.__class__ is int
                and tokens > 0
                and (reqs is None or (reqs.__class__ is int and reqs > 0))
                and loras.__class__ is int
                and loras >= 0
                and bounds.__class__ is tuple
                and excluded.__class__ is frozenset
            ):
                answer = view.answer(narrowed, tokens, agreed, reqs, ratio)
                if isinstance(answer, Reserved):
                    answer.batches += 1
                    return answer.found
                numbers = tokens, reqs, query_len is not None, loras > 0, loras, query_len
                # By their own calls all would be checked once more.
                own = _new_tuple(BatchDescriptor, (*numbers, bounds, variant))
                found = _new_tuple(Dispatch, (_NONE, own, answer, -1))
                count = self._misses[answer]
                count.batches += 1
                if index.answers_left <= 0:
                    index.forget_answers()
                index.answers_left -= 1
                answers[key] = count, found
                return found
        except NOT_FOUND:
            # No error is lost: everything is looked at again, and what is wrong is named.
            pass
        return self._dispatch_checked(batch, exclude, at_least, at_most_mode, max_padding)

    def step(self, batch: Batch, updates: Any = None, metadata: Any = None) -> ForwardContext:
        """The context to run `batch` in, of its best graph: `with dispatcher.step(batch): ...`.

        Contexts are used again, so one thread at a time may do this with one dispatcher. A `Batch`
        that is kept, and given again as long as it is true, is found faster than an equal one.
        """
        again, version, graph = self._again
        if batch is again and version is self.version:
            graph.batches += 1
        else:
            version = self.version
            graph = self._index.hit(batch, self._most_padding) if self._looks else None
            if batch is not self._last_batch:
                self._last_batch = batch
            elif graph is not None and _stays(batch):
                self._again = batch, version, graph
        found = self.dispatch(batch) if graph is None else graph.found
        if graph is None and found.slot >= 0:
            graph = self._graphs[found.slot]
        if graph is None or graph.context.token is not None:
            mode, descriptor, _, slot = found
            context = ForwardContext(
                mode, descriptor, slot, updates, metadata, dispatcher=self, live=batch
            )
        else:
            context = graph.context
            last = self._last_context
            if last is not context and last.token is None:
                # Or every graph would keep what its last step was given.
                last.updates = last.metadata = last.live = None
            self._last_context = context
            context.updates = updates
            context.metadata = metadata
            context.live = batch
        if context.mode is _PIECEWISE:
            context.query_len = live_query_len(batch)
        return context

    def served_by(self, slot: int) -> Any:
        """The graph in a slot: what its batches are told (`found`), and how many (`batches`)."""
        return self._graphs[slot]

    def _dispatch_checked(
        self,
        batch: Batch,
        exclude: Collection[GraphMode | str],
        at_least: int,
        at_most_mode: GraphMode | str | None,
        max_padding: float | None,
    ) -> Dispatch:
        """The same where something is not as it should be, or the index is not built."""
        batch = checked_batch(batch)
        ratio = self._most_padding if max_padding is None else checked_ratio(max_padding)
        limits = limits_of(batch, exclude, at_least, at_most_mode, ratio)
        index = self._built()
        view, reqs = self._view(index, batch)
        answer = view.answer(limits.narrowed, batch.num_tokens, limits.tokens, reqs, ratio)
        if isinstance(answer, Reserved):
            answer.batches += 1
            return answer.found
        self._misses[answer].batches += 1
        return Dispatch(_NONE, unpadded(batch), answer)

    def _view(self, index: GraphIndex, batch: Batch) -> tuple[View, int | None]:
        """The graphs for batches of this kind, and the requests of this one."""
        reqs, query_len = batch.num_reqs, batch.query_len
        if query_len is not None:
            reqs, query_len = checked_uniform(batch.num_tokens, reqs, query_len)
        views = index.views(batch.bounds, batch.num_active_loras, batch.variant)
        return views[query_len], reqs

    def _reindex(self) -> None:
        """Have the index built anew at the next dispatch: capture publishes graphs one by one."""
        self._index: GraphIndex = NOT_BUILT
        # Another one whenever a batch may be told something else than before. After the index: who
        # knows it dispatches by the new one.
        self.version = object()

    def _built(self) -> GraphIndex:
        index = self._index
        if index is NOT_BUILT:
            # Under the lock of `publish`, or an index of before it could take the place of none.
            with self._lock:
                index = self._index
                if index is NOT_BUILT:
                    off = self.mode is GraphMode.NONE
                    index = GraphIndex(self._graphs, self._published, off=off)
                    self._index = index
        return index
