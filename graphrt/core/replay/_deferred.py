"""A step whose updates come after its launch: what is awaited, and what ends the waiting."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, Final, Protocol

from graphrt.core.base.errors import GraphRTError, InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.replay._steps import AwaitsUpdates
from graphrt.core.replay.host_args import UNCHANGED, Updates, _Marker
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import TaskedSegment
from graphrt.core.replay.task_table import TaskTable, resolve_updates

DEFERRED: Final = _Marker("DEFERRED")
"""As `updates=` to a wrapper: they come after the call, with `GraphWrapper.update`. Until then the
device waits in the middle of the graph, and nothing else may run in its pool."""


class Deferred(AwaitsUpdates):
    """A launched graph that waits for its updates. It owns the pool until they came."""

    _is_over = False

    def __init__(
        self,
        segment: TaskedSegment,
        table: TaskTable,
        context: ForwardContext,
        updated: Callable[[], None],
        *,
        mixed: bool,
        all_tasks: bool,
    ) -> None:
        """`updated` is called when every task has its new arguments, or kept all of its old.
        `mixed` says that an update before failed, so that nobody knows which those are."""
        super().__init__()
        self.segment = segment
        self.context = context
        self._table = table
        self._updated = updated
        self._mixed = mixed
        self._all_tasks = all_tasks

    def __repr__(self) -> str:
        return f"the step {self.context!r}, whose updates have not come,"

    def end(self, pool: GraphPool, updates: Updates | Any) -> None:
        """Give every task its updates. The graph then runs to its end, also where one fails; where
        they do not fit, nothing has changed. Raises what the updates of any step raise."""
        if updates is DEFERRED:
            raise InvalidUpdateError(
                "the updates of a launched step cannot be put off again",
                got="DEFERRED",
                expected="its updates, or UNCHANGED",
                advice="updates=UNCHANGED, or this step's host arguments",
            )
        asked = copy.copy(self.context)
        asked.updates = updates
        values = resolve_updates(self._table, asked, all_known=self._all_tasks)
        if values is None and self._mixed:
            if updates is UNCHANGED:
                raise failed_before()
            values = [task.values for task in self.segment.tasks]
        self.end_by(pool, lambda segment: segment.update_with(values))

    def end_by(self, pool: GraphPool, update: Callable[[TaskedSegment], object]) -> None:
        """The same, by a function that brings the segment to its end."""
        pool.end_turn_of(self)
        self._is_over = True
        update(self.segment)
        self._updated()

    def abandon(self) -> GraphRTError:
        self._is_over = True
        self.segment.update_with(None)
        if not self._mixed:
            self._updated()
        return MissingUpdateError(
            "the step before was launched with updates=DEFERRED and got none; it was ended with "
            "the host arguments of the replay before, so its outputs are worth nothing",
            got=self.context.descriptor,
            expected="one update after every such call",
            advice="call wrapper.update(updates) before the next step",
        )

    def __del__(self) -> None:
        # Its engine was thrown away, and whoever waits for the device would wait for ever. In a
        # thread of its own: this one may hold the lock of an update, wherever it is collected.
        if not self._is_over and not sys.is_finalizing():
            Thread(target=self.segment.update_with, args=(None,), daemon=True).start()


def failed_before() -> MissingUpdateError:
    """That there are no arguments to repeat, as an update before failed."""
    return MissingUpdateError(
        "the step before failed half-way, so its host arguments cannot be repeated",
        got="UNCHANGED",
        expected="updates for every task",
        advice="pass the updates of this step",
    )


class Launches(Protocol):
    """What launches graphs, such as an entry."""

    @property
    def deferred(self) -> Deferred | None:
        """Its last launch, if the updates of that come later."""


def waiting_step(pool: GraphPool, entries: Iterable[Launches]) -> Deferred:
    """The step of one of `entries` that waits for its updates; raises `MissingUpdateError`."""
    waiting = pool.owner
    for entry in entries:
        if entry.deferred is not None and entry.deferred is waiting:
            return entry.deferred
    raise MissingUpdateError(
        "no step waits for updates",
        got=waiting,
        expected="a call with updates=DEFERRED before",
        advice="call the wrapper first, or pass the updates with the call",
    )
