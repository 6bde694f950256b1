"""Graphs that are captured by the first step that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from graphrt.core.base.sharing import cloned
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner._dropped import DroppedGraph
from graphrt.core.runner.steps.checks import Checks


class LazyCaptures:
    """Captures while serving; `failed` are the slots that no step, and no `capture_next()`, tries
    again."""

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        pool: GraphPool,
        dropped: Sequence[DroppedGraph],
        checks: Checks,
    ) -> None:
        self.failed: set[int] = set()
        self._dispatcher = dispatcher
        self._pool = pool
        self._dropped = dropped
        self._checks = checks

    def wanted(
        self,
        batch: Batch,
        found: Dispatch,
        agreed: Agreed | None = None,
    ) -> Dispatch | None:
        """The planned graph that would serve `batch` better than what was found, or None."""
        planned = self._dispatcher.planned_for(batch, agreed=agreed)
        if planned is None or planned.slot in self.failed or self._checks.changed_settings():
            return None
        better = found.slot < 0 or preferred(planned, found)
        return planned if better else None

    def capture(
        self,
        capture: Callable[[Iterable[CaptureKey]], None],
        wanted: Dispatch,
        values: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Capture one graph while serving, a failing one only once; returns the step's inputs, out
        of the reach of the capture."""
        # They may live in the buffers that it fills, and be the last step's, on its stream.
        self._pool.follow_stream()
        values = cloned(dict(values))
        dropped = len(self._dropped)
        try:
            capture([(wanted.mode, wanted.descriptor)])
        except Exception:
            self.failed.add(wanted.slot)
            raise
        if len(self._dropped) > dropped:
            self.failed.add(wanted.slot)
        return values
