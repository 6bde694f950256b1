"""What steps take while graphs are still missing, and which of the missing they would have used."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from graphrt.core.base._undo import Undo
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import NOT_REPLAYED, Agreed, Dispatch, Reason
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.inputs.slot import InputSlot
from graphrt.core.replay.recording import is_inside_capture

_KEPT = 8
"""Slowest steps."""


class SlowStep(NamedTuple):
    """A step, the mode that it ran in and why, and the seconds of its call on the host."""

    batch: Batch
    mode: GraphMode
    reason: Reason
    seconds: float


@dataclass(frozen=True)
class StepsMeanwhile:
    """The steps between the first `capture_next()` and the last: how many there were, how many of
    them ran without a graph, the seconds of all of them on the host, and the slowest, slowest
    first."""

    steps: int = 0
    eager: int = 0
    seconds: float = 0.0
    slowest: tuple[SlowStep, ...] = ()


class Meanwhile:
    """Times the steps of a runner from `begin` to `end`. `wanted` counts, by slot, the missing
    graphs that would have served them better."""

    def __init__(self, dispatcher: GraphDispatcher, inputs: StaticInputs) -> None:
        self.on = False
        self.wanted: Counter[int] = Counter()
        self._dispatcher = dispatcher
        self._inputs = inputs
        # The threads whose steps are timed: what is called in one is a part of its step.
        self._threads: set[int] = set()
        self._order = itertools.count()
        self._seen: StepsMeanwhile | None = None
        self._slowest: list[tuple[float, int, SlowStep]] = []

    def begin(self) -> None:
        """Time steps from now on; those of another time are forgotten."""
        if not self.on:
            self.wanted.clear()
            self._slowest = []
            self._seen = StepsMeanwhile()
            self.on = True

    def end(self) -> None:
        """Time none any more."""
        self.on = False

    def timed(
        self,
        step: Callable[..., Any],
        last_dispatch: Callable[[], Dispatch | None],
        batch: Batch | None,
        values: Mapping[str, Any],
        agreed: Agreed | None,
    ) -> Any:
        """Run a step; it is timed if nothing around it is, and noted if it did not raise."""
        me = get_ident()
        if not self.on or me in self._threads or is_inside_capture():
            # Its time is not its own.
            return self._within(me, step)
        started = time.perf_counter()
        outputs = self._within(me, step)
        seconds = time.perf_counter() - started
        found = last_dispatch()
        if found is not None:
            if batch is None:
                own = type(values) is InputSlot
                batch = values.batch if own else batch_of(self._inputs, values)  # type: ignore[attr-defined]
            self._note(batch, found, seconds, agreed)
        return outputs

    def seen(self) -> StepsMeanwhile | None:
        """The steps so far; None where `begin` was never called."""
        return self._seen

    def _within(self, me: int, step: Callable[..., Any]) -> Any:
        if me in self._threads:
            return step()
        undo = Undo()
        try:
            undo.later(partial(self._threads.discard, me))
            self._threads.add(me)
            outputs = step()
            undo.now()
            return outputs
        except BaseException:
            undo.now()
            raise

    def _note(self, batch: Batch, found: Dispatch, seconds: float, agreed: Agreed | None) -> None:
        seen = self._seen or StepsMeanwhile()
        # Numbered, as steps cannot be compared.
        slow = seconds, next(self._order), SlowStep(batch, found.mode, found.reason, seconds)
        if len(self._slowest) < _KEPT:
            heapq.heappush(self._slowest, slow)
        else:
            heapq.heappushpop(self._slowest, slow)
        self._seen = StepsMeanwhile(
            seen.steps + 1,
            seen.eager + (found.mode is GraphMode.NONE),
            seen.seconds + seconds,
            tuple(each for _, _, each in sorted(self._slowest, reverse=True)),
        )
        if found.reason in NOT_REPLAYED:
            return
        planned = self._dispatcher.planned_for(batch, agreed=agreed)
        if planned is not None and (found.slot < 0 or preferred(planned, found)):
            self.wanted[planned.slot] += 1
