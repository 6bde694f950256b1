"""Steps that are launched before their updates come, for hosts that call wrappers themselves.

1. A call with `updates=DEFERRED` launches the graph, which waits on the device for its tasks;
2. until the update the step owns the pool, and nothing else may run in it;
3. `ACLGraphWrapper.update` gives the tasks their values, and the graph runs to its end.

A step with eager parts cannot be launched before its updates: those parts may wait for the device.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread, get_ident
from typing import Any

from graphrt.core.base.errors import GraphRTError, InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.replay.entry import Entry, Segment, TaskTable
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.tasks import DEFERRED, HostValues, Updates


class WaitingStep:
    """A launched graph that waits for its updates. It owns the pool until they came."""

    def __init__(
        self,
        table: TaskTable,
        segment: Segment,
        context: ForwardContext,
        *,
        all_tasks: bool,
        was_mixed: bool,
    ) -> None:
        """`all_tasks` says that every task of the step is in `table`. `was_mixed` is what
        `table.mixed` was before the launch."""
        self._thread = get_ident()
        self._table = table
        self._segment = segment
        self._context = context
        self._all_tasks = all_tasks
        self._was_mixed = was_mixed
        # Whether `expire` has ended it.
        self._is_expired = False

    def __repr__(self) -> str:
        return f"the step {self._context!r}, whose updates have not come,"

    def end(self, pool: GraphPool, updates: Updates | Any) -> None:
        """Give every task its updates. The graph then runs to its end, even if one fails. Updates
        that do not fit change nothing. Raises what the updates of any step raise."""
        if updates is DEFERRED:
            raise InvalidUpdateError(
                "the updates of a launched step cannot be put off again",
                got="DEFERRED",
                expected="its updates, or UNCHANGED",
                advice="updates=UNCHANGED, or this step's host arguments",
            )
        context = copy.copy(self._context)
        context.updates = updates
        self._table.mixed = self._was_mixed
        values = self._table.values(context, all_known=self._all_tasks)
        self.end_by(pool, lambda segment: self._update(values))

    def end_by(self, pool: GraphPool, update: Callable[[Segment], object]) -> None:
        """End the step by `update`, which signals the tasks of the segment. After `expire` it
        raises `MissingUpdateError`, in any thread."""
        if self._end(update, pool):
            return
        if self._is_expired and pool.owner is self:
            raise self._expired_error(pool)
        raise pool.busy_error(None)

    def expire(self) -> bool:
        """End the graph with its old arguments, from any thread, so that the device goes on; True
        if its update has not begun. The step keeps the pool: its update, or the next step, raises.
        """
        return self._end(lambda segment: self._update(None), None)

    def abandon(self, pool: GraphPool) -> None:
        """End the step, which nobody can update any more, and free the pool."""
        if not self._end(lambda segment: self._update(None), pool) and self._is_expired:
            self._over(pool)

    def refusal(self, pool: GraphPool) -> GraphRTError | None:
        """End the step with the old arguments, as a next step came instead of updates; returns that
        step's error. None inside of its update, and in another thread, where nothing is done."""
        if self._thread != get_ident():
            return None
        try:
            self.expire()
        except BaseException:
            if self._is_expired:
                self._free(pool)
            raise
        return self._expired_error(pool) if self._is_expired else None

    def _free(self, pool: GraphPool) -> None:
        """Give the pool to the next step, after `expire`."""
        self._table.mixed = self._was_mixed
        pool.owner = None

    def _expired_error(self, pool: GraphPool) -> MissingUpdateError:
        """Free the pool; returns the one error of a step that was ended without its update."""
        self._free(pool)
        return MissingUpdateError(
            "a step was launched with updates=DEFERRED and got none in time; it was ended with the "
            "host arguments of the replay before, so its outputs are worth nothing",
            got=self._context.descriptor,
            expected="one update after every such call",
            advice="update a launched step before the next one: wrapper.update(updates), under "
            "vllm-ascend update_full_graph_params",
        )

    def _end(self, update: Callable[[Segment], object], pool: GraphPool | None) -> bool:
        """End the step by `update`, and free `pool`; without a pool the step is expired then. False
        for all callers, of all threads, but the first. If it raises, the device goes on too."""
        caller = object()
        try:
            # One store, which tells the handler too who signals the tasks.
            if self.__dict__.setdefault("_ended_by", caller) is not caller:
                return False
            self._table.mixed = True
            update(self._segment)
            self._table.mixed = False
            # Not before: another thread's step would replay the graph while its tasks change.
            self._over(pool)
            return True
        except BaseException:  # in place of `@undoing`, for speed
            if self.__dict__.get("_ended_by") is caller:
                self._table.mixed = True
                try:
                    platform: Any = self._segment.platform  # Ascend's
                    platform.forget_update(self._segment.graph, self._segment.tasks)
                finally:
                    self._over(pool)
            raise

    def _over(self, pool: GraphPool | None) -> None:
        """The step has ended: free `pool`, or note that it is expired."""
        if pool is None:
            self._is_expired = True
        elif pool.owner is self:
            pool.owner = None

    def _update(self, values: list[HostValues] | None) -> None:
        segment = self._segment
        platform: Any = segment.platform  # Ascend's
        segment.give(values, partial(platform.update_deferred, segment.graph, segment.tasks))


class DeferrableEntry(Entry):
    """An entry that can be launched before its updates; `waiting` is the last such launch, in
    `pool`."""

    __slots__ = ("pool", "waiting")

    def __init__(self, *args: Any) -> None:
        self.pool: GraphPool | None = None
        self.waiting: WaitingStep | None = None
        super().__init__(*args)

    def launch(self, context: ForwardContext, pool: GraphPool, *, all_tasks: bool) -> None:
        self.waiting = None
        if context.updates is not DEFERRED or not self.tasks:
            super().launch(context, pool, all_tasks=all_tasks)
            return
        (segment, *later_parts) = self.parts
        if later_parts or not (isinstance(segment, Segment) and segment.tasks):
            raise InvalidUpdateError(
                "the updates of a step with eager parts cannot come after its launch, as those may "
                "wait for the device",
                got="DEFERRED",
                expected="this step's updates",
                advice="pass updates=, or capture the step as one FULL graph",
            )
        table = self.table
        platform: Any = segment.platform  # Ascend's
        step = WaitingStep(table, segment, context, all_tasks=all_tasks, was_mixed=table.mixed)
        table.mixed = True
        try:
            for call in segment.before:
                call()
            if platform.launch_deferred(segment.graph, segment.tasks, name=segment.name):
                self.waiting, self.pool = step, pool
                pool.owner = step
            else:
                table.mixed = False  # it was updated before its launch
        except BaseException:  # an interrupt may have come behind the launch
            platform.forget_update(segment.graph, segment.tasks)
            raise

    def __del__(self) -> None:
        # The wrapper was dropped before its update: without signals a wait for the device never
        # ends. In a new thread, as the thread that collects this may hold the lock of an update.
        step, pool = self.waiting, self.pool
        if step is not None and pool is not None and pool.owner is step and not sys.is_finalizing():
            Thread(target=step.abandon, args=(pool,), daemon=True).start()
