"""Which graphs of a runner are captured when: all that are missing, a few at a time, or the one
that a step misses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import count_of, items_of, number_of, shown
from graphrt.core.base.sharing import cloned
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.capture_session import CaptureSession, Progress, WarmUps
from graphrt.core.runner.graph_table import GraphRecord, GraphTable, tell_dropped
from graphrt.core.runner.host import MakeExample

_RECENT = 3
"""Graphs of a mode by which the next one is judged: the first of all loads kernels."""


@public("graphrt.types")
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


class CaptureScheduler:
    """Captures what a runner's plan has and its dispatcher does not serve yet, then seals.

    All of it is called in a turn of the graphs' owner. Each call is a `CaptureSession` of its own:
    between two of them steps move what a session saves.
    """

    def __init__(
        self,
        graphs: GraphTable,
        try_examples: Callable[[MakeExample, Callable[[], None]], None],
    ) -> None:
        """`try_examples` tries graphs when all are there, and releases them all if one fails."""
        self._setup = graphs.setup
        self._graphs = graphs
        self._try_examples = try_examples
        self._warm_ups = WarmUps()
        # By slot, the steps that a missing graph would have served better, while some are missing.
        self._misses: Counter[int] = Counter()
        # What a call of `next` takes after its last graph.
        self._tail_s = 0.0

    def all(self, progress: Progress | None) -> None:
        """Capture everything that is missing, what was dropped or has failed included."""
        graphs = self._graphs
        graphs.left_out.clear()
        before = len(graphs.records)
        self._session().run(graphs.missing(self._setup.plan.capture_order()), progress)
        self._finish()
        new = graphs.records[before:]
        logger.info("captured %d graphs in %.2f s", len(new), sum(each.capture_s for each in new))

    def next(self, budget_s: float, prefer: Iterable[int]) -> CaptureProgress:
        """Capture what fits into `budget_s` seconds, at least one graph; seal after the last."""
        began = time.perf_counter()
        budget_s = number_of("budget_s", budget_s, "the budget, in seconds,")
        sizes = self._checked_sizes(prefer)
        graphs, left = self._graphs, self._left(sizes)
        before = len(graphs.records)
        if left:
            if not graphs.sealing.may_capture:
                self._misses.clear()
                graphs.sealing.may_capture = True
            self._capture_some(left, began, budget_s)
            left = self._left(sizes)
        elif not self._setup.plan.keys and not graphs.sealing.closed:
            # Modules that compile themselves have to, and are sealed.
            self._session().run(())
        captured = tuple(graphs.records[before:])
        if not left and (captured or not graphs.sealing.closed):
            graphs.checks.captured(graphs.dispatcher.published)
            try:
                self._finish()
            except Exception:
                if not graphs.sealing.closed:
                    # A trial has failed, as it would again: nothing is left, until `release()`.
                    self._leave_out(self._setup.plan.keys)
                raise
        return CaptureProgress(captured, len(left), self._expected_s(left[0]) if left else None)

    def for_step(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], agreed: Agreed | None
    ) -> Mapping[str, Any] | None:
        """Note which missing graph would serve a step better than what was found, and capture it
        with `GraphOptions(lazy=True)`, a failing one only once. Returns the inputs of the step, out
        of the reach of the capture; None where nothing was captured."""
        graphs = self._graphs
        wanted = graphs.better_for(batch, found, agreed)
        if wanted is None:
            return None
        self._misses[wanted.slot] += 1
        is_lazy = self._setup.options.lazy and not graphs.sealing.closed
        if not is_lazy or wanted.slot in graphs.left_out:
            return None
        if graphs.checks.glances.changed_settings():
            return None
        # They may live in the buffers that it fills, and be the last step's, on its stream.
        self._setup.pool.follow_stream()
        values = cloned(dict(values))
        try:
            self._session().run([(wanted.mode, wanted.descriptor)])
        except Exception:
            self._leave_out([(wanted.mode, wanted.descriptor)])
            raise
        return values

    def _session(self) -> CaptureSession:
        return CaptureSession(self._graphs, self._warm_ups)

    def _capture_some(self, left: Sequence[CaptureKey], began: float, budget_s: float) -> None:
        graphs, tried, first_at = self._graphs, list[CaptureKey](), began

        def enough(key: CaptureKey) -> bool:
            nonlocal first_at
            now = time.perf_counter()
            if not tried:
                first_at = now
            elif now - began + (self._expected_s(key) or 0.0) + self._tail_s > budget_s:
                return True
            tried.append(key)
            return False

        before = len(graphs.records)
        try:
            self._session().run(left, enough=enough)
        except Exception:
            # Of an error before the first graph none is to blame.
            self._leave_out(graphs.missing(tried[-1:]))
            raise
        taken = sum(each.capture_s for each in graphs.records[before:])
        self._tail_s = max(time.perf_counter() - first_at - taken, 0.0)

    def _finish(self) -> None:
        """Seal the graphs, as complete as they get, and try them."""
        graphs, setup = self._graphs, self._setup
        graphs.seal()
        if graphs.dropped:
            tell_dropped(graphs.dropped, len(setup.plan.keys), strict=setup.options.strict)
        if setup.host.example is not None:
            self._try_examples(setup.host.example, graphs.release)

    def _leave_out(self, keys: Iterable[CaptureKey]) -> None:
        for key in keys:
            self._graphs.left_out.setdefault(self._graphs.dispatcher.reserve(*key))

    # The order ----------------------------------------------------------------------------------

    def _left(self, prefer: Sequence[int]) -> list[CaptureKey]:
        """What is still to be tried: sizes that the host prefers, then what steps have missed most,
        then by the plan; but nothing of a kind before its largest.

        Where a forward makes its workspaces larger as it needs, a smaller graph would go on with
        one that is given up. And the largest serves every batch of its kind.
        """
        graphs, plan = self._graphs, self._setup.plan
        reserve, ranks = graphs.dispatcher.reserve, {size: at for at, size in enumerate(prefer)}
        missing = [
            key
            for key in graphs.missing(plan.capture_order(serving=True))
            if reserve(*key) not in graphs.left_out
        ]
        missing.sort(
            key=lambda key: (
                ranks.get(key[1].num_tokens, len(ranks)),
                -self._misses[reserve(*key)],
            )
        )
        largest = {(key[0], key[1].kind): key for key in sorted(plan.keys, key=_size)}
        left = set(missing)
        in_order = (each for key in missing for each in (largest[key[0], key[1].kind], key))
        return list(dict.fromkeys(each for each in in_order if each in left))

    # The time -----------------------------------------------------------------------------------

    def _expected_s(self, key: CaptureKey) -> float | None:
        """The seconds that the graph will take, by those of its mode, or of others if there is none
        of it; None before the first."""
        records = self._graphs.records
        alike = [each for each in records if each.mode is key[0]] or records
        return max((each.capture_s for each in alike[-_RECENT:]), default=None)

    def _checked_sizes(self, prefer: Iterable[int]) -> list[int]:
        given = items_of("prefer", prefer, "[8, 16]")
        sizes = [count_of("a size of prefer=", size, least=1) for size in given]
        unknown = [size for size in sizes if size not in self._setup.sizes]
        if unknown:
            raise InvalidOptionError(
                "capture_next(prefer=) names sizes that the plan has no graph of",
                got=shown(unknown),
                expected=f"some of {shown(sorted(self._setup.sizes))}",
                advice="sizes in tokens of graphs, not of batches",
            )
        return sizes


def _size(key: CaptureKey) -> int:
    return key[1].num_tokens
