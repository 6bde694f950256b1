"""Which graphs of a runner are captured when: all that are missing, or a few at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import count_of, items_of, number_of, shown
from graphrt.core.capture.refusals import NESTED_CAPTURE
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay._between import check_between_steps
from graphrt.core.replay._turn import in_turn
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import current_capture
from graphrt.core.runner._dropped import tell_dropped
from graphrt.core.runner._meanwhile import Meanwhile
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.runner.session import GraphRecord, PlannedGraph, Progress

_RECENT = 3
"""Graphs of a mode by which the next one is judged: the first of all loads kernels."""


@dataclass(frozen=True)
class CaptureProgress:
    """What one `capture_next()` came to.

    `captured` is what was captured in this call, `left` how many graphs are still to be tried, and
    `next_s` the seconds that the next of them is expected to take, by those before it, of its mode
    if there are some; None where there is none, or nothing is known yet.
    """

    captured: tuple[GraphRecord, ...]
    left: int
    next_s: float | None


class Rounds:
    """Captures what a runner's plan has and its dispatcher does not serve yet, then seals."""

    def __init__(
        self,
        graphs: GraphSet,
        plan: Plan,
        pool: GraphPool,
        meanwhile: Meanwhile,
        try_examples: Callable[[], None] | None,
        *,
        strict: bool,
    ) -> None:
        """`try_examples` tries graphs when all are there; it releases them all if one fails."""
        self._graphs = graphs
        self._plan = plan
        self._pool = pool
        self._meanwhile = meanwhile
        self._try_examples = try_examples
        self._strict = strict
        # What a call takes after its last graph.
        self._tail_s = 0.0

    def all(self, progress: Progress | None) -> None:
        """Capture everything that is missing, what was dropped or has failed included."""
        if current_capture() is not None:
            raise NESTED_CAPTURE()
        in_turn(self._pool, self._graphs.owner, partial(self.all_in_turn, progress))

    def all_in_turn(self, progress: Progress | None) -> None:
        """The same in a turn of the graphs' owner."""
        graphs = self._graphs
        graphs.dropped.clear()
        captured = {(found.mode, found.descriptor) for found in graphs.dispatcher.published}
        before = len(graphs.records)
        missing = [key for key in self._plan.capture_order() if key not in captured]
        graphs.capture(missing, progress)
        self._finish()
        new = graphs.records[before:]
        logger.info("captured %d graphs in %.2f s", len(new), sum(each.capture_s for each in new))

    def next(self, budget_s: float, prefer: Iterable[int]) -> CaptureProgress:
        """Capture what fits into `budget_s` seconds, at least one graph; seal after the last."""
        began = time.perf_counter()
        budget_s = number_of("budget_s", budget_s, "the budget, in seconds,")
        sizes = self._checked_sizes(prefer)
        check_between_steps(self._pool, "capture_next()")
        turn = partial(self._next, began, budget_s, sizes)
        return in_turn(self._pool, self._graphs.owner, turn)

    def _next(self, began: float, budget_s: float, sizes: Sequence[int]) -> CaptureProgress:
        graphs, left = self._graphs, self._left(sizes)
        before = len(graphs.records)
        if left:
            self._meanwhile.begin()
            self._capture(left, began, budget_s)
            left = self._left(sizes)
        elif not self._plan.keys and not graphs.sealing.closed:
            # Modules that compile themselves have to, and are sealed.
            graphs.capture(())
        captured = tuple(graphs.records[before:])
        if not left and (captured or not graphs.sealing.closed):
            try:
                self._finish()
            except Exception:
                if not graphs.sealing.closed:
                    # A trial has failed, as it would again: nothing is left, until `release()`.
                    self._give_up()
                raise
        return CaptureProgress(captured, len(left), self._expected_s(left[0]) if left else None)

    def _capture(self, left: Sequence[CaptureKey], began: float, budget_s: float) -> None:
        graphs, trying, first_at = self._graphs, list[CaptureKey](), began

        def enough(graph: PlannedGraph) -> bool:
            nonlocal first_at
            now, key = time.perf_counter(), (graph.mode, graph.descriptor)
            if not trying:
                first_at = now
            elif now - began + (self._expected_s(key) or 0.0) + self._tail_s > budget_s:
                return True
            trying.append(key)
            return False

        before = len(graphs.records)
        try:
            graphs.capture(self._that_may_fit(left, budget_s), enough=enough)
        except Exception:
            there = {(each.mode, each.descriptor) for each in graphs.records}
            there |= {(each.mode, each.descriptor) for each in graphs.dropped}
            # Of an error before the first graph none is to blame.
            if trying and trying[-1] not in there:
                graphs.lazy.failed.add(graphs.dispatcher.reserve(*trying[-1]))
            raise
        taken = sum(each.capture_s for each in graphs.records[before:])
        self._tail_s = max(time.perf_counter() - first_at - taken, 0.0)

    def _finish(self) -> None:
        """Seal what there is, as complete as it gets, and try it."""
        graphs = self._graphs
        graphs.checks.captured(graphs.dispatcher.published)
        graphs.seal()
        self._meanwhile.end()
        if graphs.dropped:
            tell_dropped(graphs.dropped, len(self._plan.keys), strict=self._strict)
        if self._try_examples is not None:
            self._try_examples()

    def _give_up(self) -> None:
        reserve = self._graphs.dispatcher.reserve
        self._graphs.lazy.failed.update(reserve(*key) for key in self._plan.keys)

    # The order ----------------------------------------------------------------------------------

    def _left(self, prefer: Sequence[int]) -> list[CaptureKey]:
        """What is still to be tried: sizes that the host prefers, then what steps have missed most,
        then by the plan; but nothing of a kind before its largest.

        Where a forward makes its workspaces larger as it needs, a smaller graph would go on with
        one that is given up. And the largest serves every batch of its kind.
        """
        graphs, wanted = self._graphs, self._meanwhile.wanted
        there = {(each.mode, each.descriptor) for each in graphs.dropped}
        there |= {(found.mode, found.descriptor) for found in graphs.dispatcher.published}
        slots = {key: graphs.dispatcher.reserve(*key) for key in self._order if key not in there}
        missing = [key for key, slot in slots.items() if slot not in graphs.lazy.failed]
        ranks = {size: rank for rank, size in enumerate(prefer)}
        missing.sort(
            key=lambda key: (ranks.get(key[1].num_tokens, len(ranks)), -wanted[slots[key]])
        )
        left = dict.fromkeys(missing)
        return list(
            dict.fromkeys(
                each
                for key in missing
                for each in (self._largest[key[0], key[1].kind], key)
                if each in left
            )
        )

    @cached_property
    def _order(self) -> tuple[CaptureKey, ...]:
        return self._plan.capture_order(serving=True)

    @cached_property
    def _largest(self) -> dict[object, CaptureKey]:
        ascending = sorted(self._plan.keys, key=lambda key: key[1].num_tokens)
        return {(key[0], key[1].kind): key for key in ascending}

    # The time -----------------------------------------------------------------------------------

    def _expected_s(self, key: CaptureKey) -> float | None:
        """The seconds that the graph will take, by those of its mode, or of others if there is none
        of it; None before the first."""
        records = self._graphs.records
        alike = [each for each in records if each.mode is key[0]] or records
        return max((each.capture_s for each in alike[-_RECENT:]), default=None)

    def _that_may_fit(self, left: Sequence[CaptureKey], budget_s: float) -> list[CaptureKey]:
        """The first of `left`, as many as could fit if nothing else took time, but one."""
        found, total = list[CaptureKey](), 0.0
        for key in left:
            found.append(key)
            total += self._expected_s(key) or 0.0
            if total > budget_s:
                break
        return found

    def _checked_sizes(self, prefer: Iterable[int]) -> list[int]:
        given = items_of("prefer", prefer, "[8, 16]")
        sizes = [count_of("a size of prefer=", size, least=1) for size in given]
        known = {descriptor.num_tokens for _, descriptor in self._plan.keys}
        unknown = [size for size in sizes if size not in known]
        if unknown:
            raise InvalidOptionError(
                "capture_next(prefer=) names sizes that the plan has no graph of",
                got=shown(unknown),
                expected=f"some of {shown(sorted(known))}",
                advice="sizes in tokens of graphs, not of batches",
            )
        return sizes
