"""Which captured graph serves a batch: the only source of truth of which graphs exist."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from operator import itemgetter
from typing import Any, NamedTuple

from graphrt.core.base.errors import InvalidBatchError, InvalidModeError, Uncopied
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import items_of, optional, padding_ratio, shown
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import (
    NO_MODES,
    NOT_FOUND,
    Batch,
    BatchDescriptor,
    checked_batch,
    descriptor_of,
    live_query_len,
    settled,
    unpadded,
)
from graphrt.core.batch.modes import GraphMode, graphs_off
from graphrt.core.dispatch.ladders import GRAPH_MODES, Ladders
from graphrt.core.dispatch.reasons import OF_CALLS, Agreed, Dispatch, Reason

REMEMBERED = 1024
"""So many answers are kept: a host whose batches never come again cannot make them grow."""
COUNTED = 768
"""So many sizes of batches are counted each by itself, of all graphs and misses together."""
_OF_DISPATCH = tuple(reason for reason in Reason if reason not in OF_CALLS)
_MAX_PADDING: Any = optional(padding_ratio)
_INF = float("inf")
_new_tuple = tuple.__new__
_RUNTIME_MODES = frozenset(mode for mode in GraphMode if mode.is_runtime_mode)
_AGREED = frozenset({BatchDescriptor, Dispatch, type(None)})
# Constants: CPython 3.11 takes 0.07 us to load the member of an enum.
_NONE, _PIECEWISE = GraphMode.NONE, GraphMode.PIECEWISE


class Count:
    """How many batches had the same answer. C knows where in an object `batches` is."""

    __slots__ = ("batches",)
    batches: int


class Reserved(NamedTuple):
    """A reserved graph: the dispatch of its batches, the context of its steps, itself alone where
    ranks have agreed on it."""

    dispatch: Dispatch
    context: ForwardContext
    alone: Ladders


class _Version:
    """The published and planned graphs between two changes, and the answers that batches had then.

    The ladders are built at the first batch that needs them: capture publishes graphs one by one.
    """

    __slots__ = ("answers", "ladders", "max_padding")

    def __init__(self, max_padding: float) -> None:
        self.max_padding = max_padding
        self.answers: dict[Any, tuple[Count, Dispatch]] = {}
        self.ladders: tuple[Ladders, Ladders] | None = None


@public("graphrt")
class GraphDispatcher(Uncopied):
    """Finds the best captured graph for a batch. Best is the least in this order:
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
        self._lock = threading.RLock()
        self._graphs: list[Reserved] = []
        self._slots: dict[tuple[GraphMode, BatchDescriptor], int] = {}
        self._published: set[int] = set()
        # By the slot, or the reason why there is none, and the live tokens.
        self._counts: dict[tuple[int | Reason, int], Count] = {}
        self._not_replayed: Counter[tuple[int, Reason]] = Counter()
        # The last step that a wrapper could not replay.
        self._last_missed: object = None
        # How many steps were not replayed, of all graphs and for all reasons.
        self.not_served = 0
        self._last_context = ForwardContext(GraphMode.NONE)
        # Another one whenever the answer to a batch may change. It is made before the change, under
        # the lock: whatever interrupts that, no answer outlives its version.
        self.version = _Version(_MAX_PADDING("max_padding", max_padding) or _INF)

    def reserve(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> int:
        """The slot of a planned graph; the same one when it is reserved again.

        Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for
        what is no descriptor.
        """
        key = mode, descriptor = _checked_key(mode, descriptor)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = len(self._graphs)
                context = ForwardContext(mode, descriptor, slot, dispatcher=self)
                dispatch = Dispatch(mode, descriptor, Reason.HIT, slot)
                graph = Reserved(dispatch, context, Ladders([dispatch]))
                self._renew()
                self._graphs.append(graph)
                self._slots[key] = slot
            return slot

    def publish(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> Dispatch:
        """Serve batches with this graph from now on; returns their dispatch.

        Raises what `reserve` does.
        """
        with self._lock:
            slot = self.reserve(mode, descriptor)
            if not self._off:
                self._renew()
                self._published.add(slot)
            return self._graphs[slot].dispatch

    def withdraw(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> None:
        """Stop serving batches with this graph; it stays reserved. Raises what `reserve` does."""
        with self._lock:
            slot = self.reserve(mode, descriptor)
            self._renew()
            self._published.discard(slot)

    def withdraw_all(self) -> None:
        """Stop serving; every graph stays reserved."""
        with self._lock:
            self._renew()
            self._published.clear()

    @property
    def published(self) -> tuple[Dispatch, ...]:
        """The graphs that serve batches, in the order they were reserved."""
        with self._lock:
            return tuple(self._graphs[slot].dispatch for slot in sorted(self._published))

    def dispatch(self, batch: Batch, *, agreed: Agreed | None = None) -> Dispatch:
        """The best captured graph for `batch`, else NONE with the unpadded batch and the reason.

        `agreed` is the graph that ranks have agreed on, by its descriptor or the dispatch of one of
        them: that one whatever it pads, or none, with RANKS_DISAGREE. Never raises for a batch of
        at least one token; raises `InvalidBatchError` for one of none, or with counts that are no
        integers, and `InvalidModeError` where what it excludes is no set of modes.
        """
        count, dispatch = self._answer(batch, agreed)
        count.batches += 1
        return dispatch

    def peek(self, batch: Batch, *, agreed: Agreed | None = None) -> Dispatch:
        """What `dispatch` would say now, which is not counted as a step."""
        return self._answer(batch, agreed)[1]

    def planned_for(self, batch: Batch, *, agreed: Agreed | None = None) -> Dispatch | None:
        """The best graph for `batch` among those that are reserved but not published, and that
        dispatch would take: None if it would pad more than allowed. Raises what `dispatch` does."""
        batch, version = settled(checked_batch(batch)), self.version
        excluded = _checked_modes(batch.exclude)
        if agreed is not None:
            return self._agreed_on(batch, excluded, agreed, published=False)
        most = batch.num_tokens * version.max_padding
        return self._ladders(version)[1].find(batch, excluded, most)[0]

    def step(self, batch: Batch, updates: Any = None, metadata: Any = None) -> ForwardContext:
        """The context to run `batch` in, of its best graph: `with dispatcher.step(batch): ...`.

        Contexts are used again, so one thread at a time may do this with one dispatcher.
        """
        mode, descriptor, _, slot = self.dispatch(batch)
        context = self._graphs[slot].context if slot >= 0 else None
        if context is None or context.token is not None:
            context = ForwardContext(
                mode, descriptor, slot, updates, metadata, dispatcher=self, live=batch
            )
        else:
            last = self._last_context
            if last is not context and last.token is None:
                # Or every graph would keep the updates and metadata of its last step.
                last.updates = last.metadata = last.live = None
            self._last_context = context
            context.updates = updates
            context.metadata = metadata
            context.live = batch
        if mode is _PIECEWISE:
            context.query_len = live_query_len(batch)
        return context

    def not_replayed(self, context: ForwardContext) -> None:
        """Count the step of this context, which was announced as a HIT, as MISSING_GRAPH.

        Wrappers say so, where the context has its `dispatcher`; of one step once.
        """
        step = context.token or context
        with self._lock:
            known = context.announced and context.slot < len(self._graphs)
            if step is not self._last_missed and known:
                self._last_missed = step
                self._count(context.slot, Reason.MISSING_GRAPH)

    def run_eagerly(self, dispatch: Dispatch, batch: Batch, reason: Reason) -> Dispatch:
        """Count a batch that was dispatched to a graph but is not replayed; returns its dispatch
        without one."""
        with self._lock:
            self._count(dispatch.slot, reason)
        return Dispatch(_NONE, unpadded(batch), reason)

    def failed(self, dispatch: Dispatch) -> Dispatch:
        """Count a batch whose step by a graph raised, so that no graph has served it; returns the
        dispatch with this reason."""
        with self._lock:
            self._count(dispatch.slot, Reason.FAILED)
        return dispatch._replace(reason=Reason.FAILED)

    def _count(self, slot: int, reason: Reason) -> None:
        self._not_replayed[slot, reason] += 1
        self.not_served += 1

    def _counter(self, dispatch: Dispatch, tokens: int) -> Count:
        """The counter of batches with this answer and token count. A remembered answer keeps its
        counter, so a step looks none up. Once there are `COUNTED` counters, the tokens of further
        ones are rounded up to four binary digits, at most to the graph's size."""
        _, descriptor, reason, slot = dispatch
        where = slot if slot >= 0 else reason
        try:
            return self._counts[where, tokens]
        except KeyError:
            count = Count()
        count.batches = 0
        if len(self._counts) >= COUNTED:
            step = 1 << max(tokens.bit_length() - 4, 0)
            tokens = -(-tokens // step) * step
            if slot >= 0:
                tokens = min(tokens, descriptor.num_tokens)
        # Another thread may have been here first.
        return self._counts.setdefault((where, tokens), count)

    def sizes(self) -> dict[tuple[GraphMode, BatchDescriptor] | Reason, dict[int, int]]:
        """Batches by live size, for each graph (its key) and each reason why there was none. A
        batch counts for its graph also where the wrapper then ran it eagerly."""
        with self._lock:
            keys = list(self._slots)
            sizes: dict[tuple[GraphMode, BatchDescriptor] | Reason, dict[int, int]] = {}
            sizes.update((key, {}) for key in keys)
            sizes.update((reason, {}) for reason in _OF_DISPATCH)
            for where, tokens in sorted(self._counts, key=itemgetter(1)):
                batches = self._counts[where, tokens].batches
                if batches:
                    sizes[where if isinstance(where, Reason) else keys[where]][tokens] = batches
            return sizes

    def counts(self) -> dict[Reason, int]:
        """How many batches were dispatched for each reason so far."""
        counts = dict.fromkeys(_OF_DISPATCH, 0)
        with self._lock:
            for key, sizes in self.sizes().items():
                counts[key if isinstance(key, Reason) else Reason.HIT] += sum(sizes.values())
            for (_, reason), count in self._not_replayed.items():
                counts[Reason.HIT] -= count
                counts[reason] += count
            return counts

    def hits(self) -> dict[tuple[GraphMode, BatchDescriptor], int]:
        """How many batches each reserved graph has served."""
        with self._lock:
            sizes = self.sizes()
            hits = {key: sum(sizes[key].values()) for key in self._slots}
            for (slot, _), count in self._not_replayed.items():
                hits[self._graphs[slot].dispatch[:2]] -= count
            return hits

    def not_served_by(self) -> dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]]:
        """How many batches a graph was to serve and has not, by graph and reason."""
        with self._lock:
            counts: dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]] = {}
            for (slot, reason), count in self._not_replayed.items():
                counts.setdefault(self._graphs[slot].dispatch[:2], {})[reason] = count
            return counts

    def _answer(self, batch: Batch, agreed: Agreed | None) -> tuple[Count, Dispatch]:
        """The dispatch of a batch, and where it is counted."""
        # One version for all of it: a graph that is published meanwhile serves the next batch.
        version, key = self.version, None
        try:
            # Of these classes alone: a tuple that equals a batch is none.
            if batch.__class__ is Batch and agreed.__class__ in _AGREED:
                key = batch if agreed is None else (batch, agreed)
                known = version.answers.get(key)
                if known is not None:
                    return known
        except NOT_FOUND:
            # No error is lost: everything is looked at again, and what is wrong is named.
            key = None
        return self._search(version, key, batch, agreed)

    def _search(
        self, version: _Version, key: Any, batch: Batch, agreed: Agreed | None
    ) -> tuple[Count, Dispatch]:
        """The same for a batch that was not seen before, or cannot be remembered."""
        checked = checked_batch(batch)
        live = settled(checked)
        excluded = NO_MODES if batch.exclude is NO_MODES else _checked_modes(batch.exclude)
        dispatch, reason = self._best(version, live, excluded, agreed)
        if dispatch is None:
            # As all of a `Dispatch`, which takes as long as its descriptor.
            dispatch = _new_tuple(Dispatch, (_NONE, descriptor_of(live), reason, -1))
        answer = self._counter(dispatch, live[0]), dispatch
        # Not of what a host may change in place.
        if key is not None and checked is batch and batch.exclude.__class__ is frozenset:
            if len(version.answers) >= REMEMBERED:
                version.answers.clear()
            version.answers[key] = answer
        return answer

    def _best(
        self,
        version: _Version,
        batch: Batch,
        excluded: frozenset[GraphMode],
        agreed: Agreed | None,
    ) -> tuple[Dispatch | None, Reason]:
        """The best graph, or why there is none: the first of these that is true."""
        off = self.mode is _NONE
        if agreed is not None:
            graph = self._agreed_on(batch, excluded, agreed, published=True)
            return graph, Reason.MODE_NONE if off else Reason.RANKS_DISAGREE
        published, planned = version.ladders or self._ladders(version)
        max_tokens = batch.num_tokens * version.max_padding
        graph, pads, left_out, largest = published.find(batch, excluded, max_tokens)
        if graph is not None or off:
            return graph, Reason.MODE_NONE
        if pads or left_out:
            return None, Reason.PADDING if pads else Reason.EXCLUDED
        graph, pads, _, _ = planned.find(batch, excluded, max_tokens)
        if pads or graph is not None:
            return None, Reason.PADDING if graph is None else Reason.NOT_CAPTURED
        return None, Reason.TOO_LARGE if 0 < largest < batch.num_tokens else Reason.NO_GRAPH

    def _agreed_on(
        self, batch: Batch, excluded: frozenset[GraphMode], agreed: Agreed, *, published: bool
    ) -> Dispatch | None:
        """The graph that ranks have agreed on, if it can serve the batch and is (not) published."""
        modes: tuple[GraphMode, ...] = GRAPH_MODES
        if isinstance(agreed, Dispatch):
            modes, agreed = (agreed.mode,), agreed.descriptor
        agreed = _checked_descriptor(agreed)
        # Or a graph that is being published would be missed, and the answer remembered.
        with self._lock:
            for mode in modes:
                slot = self._slots.get((mode, agreed))
                if slot is None or (slot in self._published) is not published:
                    continue
                graph = self._graphs[slot].alone.find(batch, excluded, _INF)[0]
                if graph is not None:
                    return graph
        return None

    def _renew(self) -> None:
        self.version = _Version(self.version.max_padding)

    def _ladders(self, version: _Version) -> tuple[Ladders, Ladders]:
        """The graphs that are published, and those that are only planned."""
        # Under the lock of `publish`, whose version this may be before it has published.
        with self._lock:
            if version.ladders is None:
                planned = [
                    graph.dispatch
                    for slot, graph in enumerate(self._graphs)
                    if slot not in self._published
                ]
                version.ladders = Ladders(self.published), Ladders(planned)
            return version.ladders


def _checked_modes(modes: Collection[GraphMode | str]) -> frozenset[GraphMode]:
    """The runtime modes in a collection; raises `InvalidModeError` for what is no set of them."""
    if modes.__class__ in (frozenset, set) and _RUNTIME_MODES.issuperset(modes):
        return frozenset(modes)
    what = "a step runs in no such mode to exclude"
    # What can be read once only would not be the same for the next batch.
    listed = modes if isinstance(modes, Collection) else None
    each = items_of("exclude", listed, "{GraphMode.FULL}", InvalidModeError)
    return frozenset([GraphMode.parse_runtime(mode, what) for mode in each])


def _checked_key(
    mode: GraphMode | str, descriptor: BatchDescriptor
) -> tuple[GraphMode, BatchDescriptor]:
    """The key of a graph.

    Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for what
    is no descriptor.
    """
    mode = GraphMode.parse(mode)
    if mode not in GRAPH_MODES:
        raise InvalidModeError(
            "a graph is captured and served in one runtime mode",
            got=mode.name,
            expected="PIECEWISE or FULL",
            advice="pass the mode that the graph was captured in",
        )
    return mode, _checked_descriptor(descriptor)


def _checked_descriptor(descriptor: object) -> BatchDescriptor:
    if isinstance(descriptor, BatchDescriptor):
        return descriptor
    raise InvalidBatchError(
        "a graph is named by its descriptor",
        got=shown(descriptor),
        expected="BatchDescriptor(num_tokens, num_reqs, ...)",
        advice="BatchDescriptor(num_tokens=4)",
    )
