"""Which captured graph serves a batch: the only source of truth of which graphs exist."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from operator import itemgetter
from typing import Any

from graphrt.core.base.errors import InvalidBatchError, InvalidModeError, Uncopied
from graphrt.core.base.option_values import count_of, items_of, padding_ratio, refused
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
"""The most answers that are remembered: some hosts' batches never repeat."""
COUNTED = 768
"""The most sizes of batches, of all graphs and misses, that have a counter each; further ones share
counters."""
AGREED_ON = 32
"""The most graphs agreed on by ranks whose ladders are kept."""
# The reasons that this counts.
_OF_DISPATCH = tuple(reason for reason in Reason if reason not in OF_CALLS)
_INF = float("inf")
_new_tuple = tuple.__new__
_RUNTIME_MODES = frozenset(mode for mode in GraphMode if mode.is_runtime_mode)
_NO_GRAPHS = Ladders(())
# Classes of `agreed` that a remembered answer may have been given for.
_AGREED = frozenset({BatchDescriptor, Dispatch, type(None)})
# Constants: CPython 3.11 takes 0.07 us to load the member of an enum.
_NONE, _PIECEWISE = GraphMode.NONE, GraphMode.PIECEWISE

_Choice = tuple[Ladders, Ladders, float]
"""The graphs that are published, those that are only planned, and the largest ratio of their tokens
to those of a batch."""


class Count:
    """How many batches had the same answer. C counts in the slot `batches`."""

    __slots__ = ("batches",)
    batches: int


class _Version:
    """The published and planned graphs between two changes, and the answers that batches had then.

    Ladders, of all graphs or those that ranks agreed on, are built at the first batch that needs
    them: capture publishes graphs one by one.
    """

    __slots__ = ("answers", "ladders")

    def __init__(self) -> None:
        # a batch, or (batch, what ranks agreed on) -> the counter of its answer, and the answer.
        self.answers: dict[Any, tuple[Count, Dispatch]] = {}
        # what ranks agreed on, None for nothing -> the graphs to choose from then.
        self.ladders: dict[Agreed | None, _Choice] = {}


class GraphDispatcher(Uncopied):
    """Finds the best captured graph for a batch. Best is the least in this order:
    FULL before PIECEWISE, tokens, active LoRAs, uniform before general, bounds, requests.

    Graphs are reserved when they are planned and published when all their wrappers have captured.
    Threads may dispatch while another one publishes and withdraws: each dispatch that begins after
    a `publish` or `withdraw` has returned knows of it.
    """

    def __init__(
        self,
        mode: GraphMode | str,
        *,
        max_padding: float | None = None,
        max_num_reqs: int | None = None,
    ) -> None:
        """`max_padding` (>= 1) is the largest allowed ratio of a graph's tokens to the batch's.
        `max_num_reqs` is the most requests of a batch in graphs that serve any number of them.

        With `GRAPHRT_MODE=NONE` in the environment no graph serves a batch. Raises
        `InvalidModeError` and `InvalidOptionError`.
        """
        self.mode = GraphMode.parse(mode)
        # Whether `GRAPHRT_MODE=NONE` is set: then nothing is published.
        self._off = graphs_off()
        if self._off:
            self.mode = GraphMode.NONE
        self._lock = threading.RLock()
        # slot -> the dispatch to the reserved graph there; and mode and descriptor -> slot.
        self._graphs: list[Dispatch] = []
        self._slots: dict[tuple[GraphMode, BatchDescriptor], int] = {}
        # The slots of the graphs that serve batches.
        self._published: set[int] = set()
        # (slot, or the reason why there is none; live tokens) -> their counter.
        self._counts: dict[tuple[int | Reason, int], Count] = {}
        # (slot, reason) -> the batches that were dispatched to the graph there and not replayed.
        self._not_replayed: Counter[tuple[int, Reason]] = Counter()
        # The token of the last step that a wrapper could not replay, or its context: each piece of
        # a step says so, and the step is counted once.
        self._last_missed: object = None
        # How many steps were not replayed, of all graphs and for all reasons.
        self.not_served = 0
        self._max_padding = _INF
        if max_padding is not None:
            self._max_padding = padding_ratio("max_padding", max_padding)
        self._max_num_reqs = max_num_reqs
        if max_num_reqs is not None:
            self._max_num_reqs = count_of("max_num_reqs", max_num_reqs, least=1)
        # Replaced whenever the answer to a batch may change, under the lock and before the change:
        # after an interrupt between the two no batch gets an old answer.
        self.version = _Version()

    def reserve(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> int:
        """The slot of a planned graph; the same one when it is reserved again.

        Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for
        what is no descriptor.
        """
        mode = GraphMode.parse(mode)
        if mode not in GRAPH_MODES:
            what = "a graph is captured and served in one runtime mode"
            advice = "pass the mode that the graph was captured in"
            raise refused(what, mode, "PIECEWISE or FULL", advice, InvalidModeError)
        key = mode, _checked_descriptor(descriptor)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = len(self._graphs)
                self.version = _Version()
                self._graphs.append(Dispatch(*key, Reason.HIT, slot))
                self._slots[key] = slot
            return slot

    def publish(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> Dispatch:
        """Serve batches with this graph from now on; returns their dispatch.

        Raises what `reserve` does.
        """
        with self._lock:
            slot = self.reserve(mode, descriptor)
            if not self._off:
                self.version = _Version()
                self._published.add(slot)
            return self._graphs[slot]

    def withdraw(self, mode: GraphMode | str, descriptor: BatchDescriptor) -> None:
        """Stop serving batches with this graph; it stays reserved. Raises what `reserve` does."""
        with self._lock:
            slot = self.reserve(mode, descriptor)
            self.version = _Version()
            self._published.discard(slot)

    def withdraw_all(self) -> None:
        """Stop serving; every graph stays reserved."""
        with self._lock:
            self.version = _Version()
            self._published.clear()

    @property
    def published(self) -> tuple[Dispatch, ...]:
        """The graphs that serve batches, in the order they were reserved."""
        with self._lock:
            return tuple(self._graphs[slot] for slot in sorted(self._published))

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
        batch = settled(checked_batch(batch))
        _, planned, padding = self._ladders(self.version, agreed)
        excluded = _checked_modes(batch.exclude)
        return planned.find(batch, excluded, batch.num_tokens * padding)[0]

    def step(self, batch: Batch, updates: Any = None, metadata: Any = None) -> ForwardContext:
        """The context to run `batch` in, of its best graph: `with dispatcher.step(batch): ...`."""
        mode, descriptor, _, slot = self.dispatch(batch)
        length = live_query_len(batch) if mode is _PIECEWISE else None
        # By position: by name it takes half as long again.
        return ForwardContext(mode, descriptor, slot, updates, metadata, None, length, self, batch)

    def not_replayed(self, context: ForwardContext) -> None:
        """Count the step of this context, which was announced as a HIT, as MISSING_GRAPH.

        Wrappers say so, where the context has its `dispatcher`; of one step once.
        """
        step = context.token or context
        with self._lock:
            is_graph = context.announced and context.slot < len(self._graphs)
            if step is not self._last_missed and is_graph:
                self._last_missed = step
                self._count(context.slot, Reason.MISSING_GRAPH)

    def without_graph(self, dispatch: Dispatch, batch: Batch, reason: Reason) -> Dispatch:
        """Count a batch that was dispatched to a graph but is not replayed; returns its dispatch
        without one."""
        self._count(dispatch.slot, reason)
        return Dispatch(_NONE, unpadded(batch), reason)

    def failed(self, dispatch: Dispatch) -> Dispatch:
        """Count a batch whose step by a graph raised, so that no graph has served it; returns the
        dispatch with this reason."""
        self._count(dispatch.slot, Reason.FAILED)
        return dispatch._replace(reason=Reason.FAILED)

    def _count(self, slot: int, reason: Reason) -> None:
        """Count a batch that was dispatched to a graph and not replayed."""
        with self._lock:
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
            rows: list[tuple[GraphMode, BatchDescriptor] | Reason] = [*keys, *_OF_DISPATCH]
            sizes: dict[tuple[GraphMode, BatchDescriptor] | Reason, dict[int, int]]
            sizes = {row: {} for row in rows}
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
            for key, reasons in self.not_served_by().items():
                hits[key] -= sum(reasons.values())
            return hits

    def not_served_by(self) -> dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]]:
        """How many batches a graph was to serve and has not, by graph and reason."""
        with self._lock:
            counts: dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]] = {}
            for (slot, reason), count in self._not_replayed.items():
                counts.setdefault(self._graphs[slot][:2], {})[reason] = count
            return counts

    def _answer(self, batch: Batch, agreed: Agreed | None) -> tuple[Count, Dispatch]:
        """The dispatch of a batch, and where it is counted."""
        # Read once: a graph that is published during this call serves the next batch.
        version, key = self.version, None
        try:
            # Only for these classes: a plain tuple that equals a batch has to raise.
            if batch.__class__ is Batch and agreed.__class__ in _AGREED:
                key = batch if agreed is None else (batch, agreed)
                answer = version.answers.get(key)
                if answer is not None:
                    return answer
        except NOT_FOUND:
            # The batch cannot be hashed or compared: `_search` names the wrong field.
            key = None
        return self._search(version, key, batch, agreed)

    def _search(
        self, version: _Version, key: Any, batch: Batch, agreed: Agreed | None
    ) -> tuple[Count, Dispatch]:
        """As `_answer`, for a batch without a remembered answer."""
        checked = checked_batch(batch)
        live = settled(checked)
        dispatch, reason = self._best(version, live, agreed)
        if dispatch is None:
            # Faster than `Dispatch(...)`, which takes as long as making the descriptor.
            dispatch = _new_tuple(Dispatch, (_NONE, descriptor_of(live), reason, -1))
        answer = self._counter(dispatch, live[0]), dispatch
        # A host may change its own set of modes in place: only frozensets are remembered.
        if key is not None and checked is batch and batch.exclude.__class__ is frozenset:
            if len(version.answers) >= REMEMBERED:
                version.answers.clear()
            version.answers[key] = answer
        return answer

    def _best(
        self, version: _Version, batch: Batch, agreed: Agreed | None
    ) -> tuple[Dispatch | None, Reason]:
        """The best graph; without one, the first reason below that is true of the batch."""
        excluded = NO_MODES if batch.exclude is NO_MODES else _checked_modes(batch.exclude)
        published, planned, padding = self._ladders(version, agreed)
        max_tokens = batch.num_tokens * padding
        graph, too_padded, left_out, largest = published.find(batch, excluded, max_tokens)
        if graph is not None:
            return graph, Reason.HIT
        if self.mode is _NONE:
            return None, Reason.MODE_NONE
        if agreed is not None:
            return None, Reason.RANKS_DISAGREE
        if too_padded or left_out:
            return None, Reason.PADDING if too_padded else Reason.EXCLUDED
        graph, too_padded, _, most = planned.find(batch, excluded, max_tokens)
        if too_padded or graph is not None:
            return None, Reason.PADDING if graph is None else Reason.NOT_CAPTURED
        largest = max(largest, most)
        return None, Reason.TOO_LARGE if 0 < largest < batch.num_tokens else Reason.NO_GRAPH

    def _ladders(self, version: _Version, agreed: Agreed | None) -> _Choice:
        """The graphs to choose from: all, or the one that ranks have agreed on."""
        modes: tuple[GraphMode, ...] = GRAPH_MODES
        descriptor = agreed
        if isinstance(agreed, Dispatch):
            modes, descriptor = (agreed.mode,), agreed.descriptor
        if agreed is not None:
            descriptor = _checked_descriptor(descriptor)
        if agreed in version.ladders:
            return version.ladders[agreed]
        # Under the lock: `publish` makes its version first. Ladders built before the graph is
        # published would lack it.
        with self._lock:
            graphs, padding = self._graphs, self._max_padding
            if descriptor is not None:
                keys = [(mode, descriptor) for mode in modes]
                graphs = [graphs[self._slots[key]] for key in keys if key in self._slots]
                padding = _INF
            published = [graph for graph in graphs if graph.slot in self._published]
            planned = [graph for graph in graphs if graph.slot not in self._published]
            choice = (
                Ladders(published, self._max_num_reqs) if published else _NO_GRAPHS,
                Ladders(planned, self._max_num_reqs) if planned else _NO_GRAPHS,
                padding,
            )
            # Of a descriptor without a graph here nothing is kept: ranks may name any number.
            if agreed is None or (graphs and len(version.ladders) < AGREED_ON):
                version.ladders[agreed] = choice
            return choice


def _checked_modes(modes: Collection[GraphMode | str]) -> frozenset[GraphMode]:
    """The runtime modes in a collection; raises `InvalidModeError` for what is no set of them."""
    if modes.__class__ in (frozenset, set) and _RUNTIME_MODES.issuperset(modes):
        return frozenset(modes)
    what = "a step runs in no such mode to exclude"
    # An iterator is refused: it would be empty at the next batch.
    listed = modes if isinstance(modes, Collection) else None
    each = items_of("exclude", listed, "{GraphMode.FULL}", InvalidModeError)
    return frozenset([GraphMode.parse_runtime(mode, what) for mode in each])


def _checked_descriptor(descriptor: object) -> BatchDescriptor:
    if isinstance(descriptor, BatchDescriptor):
        return descriptor
    what, expected = "a graph is named by its descriptor", "BatchDescriptor(num_tokens, ...)"
    raise refused(what, descriptor, expected, "BatchDescriptor(num_tokens=4)", InvalidBatchError)
