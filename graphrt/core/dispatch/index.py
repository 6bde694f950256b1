"""From the numbers of a batch to the tables of its kind, which are built when first asked for."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence

from graphrt.core.base import fork_safe
from graphrt.core.batch import Batch
from graphrt.core.dispatch.limits import EXCLUDED_BITS
from graphrt.core.dispatch.order import bound_of, preference
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.dispatch.search import Forest, Searched, SearchedView
from graphrt.core.dispatch.tables import NARROWED, Count, Reserved
from graphrt.core.dispatch.view import View

# What a look into an index raises for batches that are not what they should be.
NOT_FOUND = (IndexError, KeyError, TypeError, ValueError, RuntimeError)
_INF = float("inf")
MOST_BYTES = 640 << 10
"""More than that the tables of an index never take; what is remembered beside them takes less."""
_UNKNOWN = 64
"""So many query lengths and variants that no graph has are found as fast as those of graphs; a host
that has more cannot make a table grow."""
_REMEMBERED = 256
"""So many answers to batches that no graph serves are remembered."""
_SEARCHES = 4096
"""After so many searches for want of room all tables are forgotten: others may be needed now."""
_ENTRY_BYTES = 128
_NO_VARIANT = object()
"""No graph has it."""
_INTS = frozenset({int})


class Views(dict[int | None, View]):
    """The graphs for batches of some LoRAs, bounds and variant, by query length (None: mixed)."""

    __slots__ = ("bounds", "index", "loras", "variant")

    def __init__(
        self, index: GraphIndex, variant: Hashable, loras: float, bounds: tuple[float, ...]
    ) -> None:
        self.index = index
        self.variant = variant
        self.loras = loras
        self.bounds = bounds

    def are_for(self, graph: Reserved, query_len: int | None) -> bool:
        """Whether a graph serves such batches, as far as neither tokens nor requests decide."""
        own = graph.found.descriptor
        return (
            (not own.uniform or own.query_len == query_len)
            and own.lora_capacity >= self.loras
            and own.variant == self.variant
            and all(bound_of(own, axis) >= least for axis, least in enumerate(self.bounds))
        )

    def __missing__(self, query_len: object) -> View:
        if query_len is None:
            return self.index.built(self, None)
        # Whatever else hashes like no number, such as a tensor, is looked at by the dispatcher.
        if type(query_len) is not int:
            raise KeyError(query_len)
        if query_len in self.index.query_lens:
            return self.index.built(self, query_len)
        # No graph is uniform in it.
        view = self[None]
        if None in self and len(self) < _UNKNOWN and self.index.has_room(_ENTRY_BYTES):
            self[query_len] = view
        return view


class _Cells(dict[int, Views]):
    """The views of one variant, by the number of the LoRAs and bounds that graphs tell apart."""

    __slots__ = ("_index", "_variants")

    def __init__(self, index: GraphIndex, variants: Sequence[Hashable]) -> None:
        self._index = index
        self._variants = variants

    def __missing__(self, number: int) -> Views:
        views = self._index.cell(number, self._variants)
        if self._index.has_room(_ENTRY_BYTES + sys.getsizeof(views)):
            self[number] = views
        return views


class _Variants(dict[Hashable, _Cells]):
    """The views of each variant that a graph has; others have the same, which no graph is in."""

    __slots__ = ("_most", "_nothing")

    def __init__(self, index: GraphIndex, variants: Collection[Hashable]) -> None:
        super().__init__((variant, _Cells(index, [variant])) for variant in variants)
        self._nothing = _Cells(index, ())
        self._most = len(self) + _UNKNOWN

    def __missing__(self, variant: Hashable) -> _Cells:
        if len(self) < self._most:
            self[variant] = self._nothing
        return self._nothing

    def forget(self) -> None:
        """Empty all views."""
        for cells in (self._nothing, *self.values()):
            for views in tuple(cells.values()):
                views.clear()
            cells.clear()


class GraphIndex:
    """An immutable index over graphs, of which some are `published`; `plain` are the views of
    batches without LoRAs, bounds and variant.

    `answers` are those to batches that no graph serves, by what narrows the choice; there is room
    for `answers_left` more.
    """

    def __init__(
        self, graphs: Sequence[Reserved], published: Collection[int], *, off: bool
    ) -> None:
        """With `off` whatever has no graph is told MODE_NONE."""
        self._lock = fork_safe(threading.RLock())
        self._off = off
        self._published = frozenset(published)
        named = [graph.found.descriptor for graph in graphs]
        axes = max((len(each.bounds) for each in named), default=0)
        self._graphs = sorted(graphs, key=lambda graph: preference(graph.found, axes))
        self._bound_steps = [
            sorted({bound_of(each, axis) for each in named} - {_INF}) for axis in range(axes)
        ]
        self._lora_steps = sorted({each.lora_capacity for each in named})
        self.query_lens = frozenset(each.query_len for each in named if each.uniform)
        self._cells = 1
        for steps in self._bound_steps:
            self._cells *= len(steps) + 1
        self._unbounded = self._cells - 1
        self._only_axis = self._bound_steps[0] if axes == 1 else None
        self.answers: list[dict[object, tuple[Count, Dispatch]]] = [{} for _ in NARROWED]
        self.answers_left = _REMEMBERED
        self._nothing = Views(self, _NO_VARIANT, _INF, ())
        self._variants = _Variants(self, {each.variant for each in named})
        self._is_full = False
        self._searches = 0
        self._forests: tuple[Forest, Forest] | None = None
        self._own_bytes = self.nbytes = sys.getsizeof(self._graphs)
        self.plain = self.views((), 0, None)

    def hit(self, batch: Batch, ratio: float | None) -> Reserved | None:
        """The graph that `GraphDispatcher.dispatch(batch)` finds at its first look, with padding up
        to `ratio`, counted as there; None where that has to look again, or would raise.

        The same look without limits, which cost a caller that has none a third of it.
        """
        try:
            tokens, reqs, query_len, bounds, loras, variant, excluded = batch
            if query_len is not None and (reqs is None or reqs * query_len != tokens):
                return None
            if bounds or loras or variant is not None:
                view = self.views(bounds, loras, variant)[query_len]
            else:
                view = self.plain[query_len]
            if 0 < tokens <= view.last:
                row = view.rows[EXCLUDED_BITS[excluded] if excluded else 0]
                graph = row[view.places[tokens]]
                if (
                    graph is not None
                    and (reqs is None or reqs <= graph.reqs)
                    and (ratio is None or graph.tokens <= tokens * ratio)
                    and batch.__class__ is Batch
                ):
                    graph.batches += 1
                    return graph
        except NOT_FOUND:
            # No error is lost: `dispatch` is asked next.
            pass
        return None

    def views(self, bounds: Sequence[int], loras: int, variant: Hashable) -> Views:
        """The graphs for batches of these numbers, by query length.

        Raises `TypeError` for bounds that are no tuple of ints, and LoRAs that are no int.
        """
        if not bounds:
            number = self._unbounded
        elif bounds.__class__ is not tuple:
            raise TypeError(bounds)
        elif self._only_axis is not None and len(bounds) == 1:
            if bounds[0].__class__ is not int:
                raise TypeError(bounds)
            number = bisect_left(self._only_axis, bounds[0])
        else:
            number = self._number(bounds)
        if loras:
            if loras.__class__ is not int:
                raise TypeError(loras)
            number += bisect_left(self._lora_steps, loras) * self._cells
        return self._variants[variant][number]

    def _number(self, bounds: tuple[int, ...]) -> int:
        """The number of a cell among those of the same LoRAs; unknown is more than any bound."""
        if not _INTS.issuperset(map(type, bounds)):
            raise TypeError(bounds)
        number = 0
        for axis, steps in enumerate(self._bound_steps):
            step = bisect_left(steps, bounds[axis]) if axis < len(bounds) else len(steps)
            number = number * (len(steps) + 1) + step
        return number

    def forget_answers(self) -> None:
        """Make room for others."""
        for answers in self.answers:
            answers.clear()
        self.answers_left = _REMEMBERED

    def cell(self, number: int, variants: Sequence[Hashable]) -> Views:
        """The views of one cell; of one where no graph is, those that have none."""
        lora_step, left = divmod(number, self._cells)
        if not variants or lora_step >= len(self._lora_steps):
            return self._nothing
        bounds: list[float] = []
        for steps in reversed(self._bound_steps):
            left, step = divmod(left, len(steps) + 1)
            bounds.insert(0, steps[step] if step < len(steps) else _INF)
        return Views(self, variants[0], self._lora_steps[lora_step], tuple(bounds))

    def built(self, views: Views, query_len: int | None) -> View:
        """The view of one query length, with its tables; others make room for them if need be."""
        with self._lock:
            if self._is_full:
                self._searches += 1
                if self._searches < _SEARCHES:
                    return self._searched(views, query_len)
                self._forget()
            graphs = [graph for graph in self._graphs if views.are_for(graph, query_len)]
            published = [graph for graph in graphs if graph.found.slot in self._published]
            planned = [graph for graph in graphs if graph.found.slot not in self._published]
            room = MOST_BYTES // 2 - self.nbytes
            view = View(published, planned, room, off=self._off)
            if self.nbytes + view.nbytes > MOST_BYTES:
                self._is_full = True
                return self._searched(views, query_len)
            self.nbytes += view.nbytes
            views[query_len] = view
            return view

    def has_room(self, nbytes: int) -> bool:
        """Take so many bytes more, if they are left."""
        with self._lock:
            if self.nbytes + nbytes > MOST_BYTES:
                return False
            self.nbytes += nbytes
            return True

    def _searched(self, views: Views, query_len: int | None) -> SearchedView:
        if self._forests is None:
            axes, served = len(self._bound_steps), self._published
            published = [graph for graph in self._graphs if graph.found.slot in served]
            planned = [graph for graph in self._graphs if graph.found.slot not in served]
            self._forests = Forest(published, axes), Forest(planned, axes)
            self._own_bytes += sum(forest.nbytes for forest in self._forests)
        found = [
            Searched(forest.trees(views.variant, query_len), views.loras, views.bounds)
            for forest in self._forests
        ]
        return SearchedView(*found, off=self._off)

    def _forget(self) -> None:
        """Have all views built anew when they are next asked for."""
        self.plain.clear()
        self._variants.forget()
        self.nbytes = self._own_bytes
        self._is_full = False
        self._searches = 0


class _NotBuilt(GraphIndex):
    """What stands for an index until a dispatch has to build it: looking into it raises."""

    def __init__(self) -> None:
        super().__init__((), (), off=False)

    def views(self, bounds: Sequence[int], loras: int, variant: Hashable) -> Views:
        return self._nothing

    def built(self, views: Views, query_len: int | None) -> View:
        raise KeyError(query_len)


NOT_BUILT = _NotBuilt()
