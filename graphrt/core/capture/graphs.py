"""What one wrapper has captured so far, and what each of its calls reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graphrt.core.base.errors import GraphsCapturedError
from graphrt.core.base.option_values import check_hashable, check_kind
from graphrt.core.base.sharing import cloned
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.bridges import Bridges
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.graph import DeviceGraph
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import graphs_of

_FULL = GraphMode.FULL


class RepeatsEagerly(Protocol):
    """A wrapper, whose runnable may be run where the update of a graph's tasks failed."""

    def _repeat_eagerly(
        self, entry: Entry, context: ForwardContext, error: Exception, args: Any, kwargs: Any
    ) -> Any:
        """What a step returns that is run eagerly after all; raises `error` if it is not."""


class WrapperGraphs:
    """The entries of a wrapper, by descriptor and by slot, and the buffers between their parts.

    An entry is found by its slot once its descriptor and its arguments were looked at: until then,
    and where arguments are compared at every replay, by its descriptor. Apart from the wrapper,
    because a class with `__getattr__` loads its own attributes slowly.
    """

    # `NativeReplay` knows where in an object `by_slot` is.
    __slots__ = (
        "always_checks",
        "bridges",
        "by_slot",
        "checks",
        "clones",
        "entries",
        "fresh_containers",
        "mode",
        "pool",
        "read_context",
        "read_stream_id",
        "statics",
    )

    def __init__(
        self,
        mode: GraphMode,
        pool: GraphPool,
        options: GraphOptions,
        read_context: Callable[[], ForwardContext | None],
    ) -> None:
        self.entries: dict[BatchDescriptor, Entry] = {}
        self.by_slot: list[Entry | None] = [None]  # the slot -1 finds the last, which is None
        self.bridges = Bridges()
        self.statics = Bridges()
        # Whether arguments are compared at an entry's first replay, and at every one.
        self.checks = options.checks("capture")
        self.always_checks = options.checks("always")
        self.clones = options.outputs == "clone"
        self.fresh_containers = True
        self.mode = mode
        self.read_context = read_context
        self.use(pool)

    def use(self, pool: GraphPool) -> None:
        """Capture and replay in this pool."""
        self.pool = pool
        self.read_stream_id = pool.read_stream_id

    def check_move(self, pool: GraphPool) -> None:
        """Raise what `GraphWrapper.move_to` does where it cannot be moved."""
        check_kind("pool", pool, GraphPool, optional=False)
        pool.check_open()
        pool._check_like(self.pool)
        if self.entries:
            raise GraphsCapturedError(
                "a wrapper cannot be moved to another pool: its graphs lie in this one",
                got=", ".join(map(str, self.entries)),
                expected="no graphs",
                advice="call clear_graphs() before; what is captured next lies in the new pool",
            )

    def replay(
        self, entry: Entry, context: ForwardContext, wrapper: RepeatsEagerly, args: Any, kwargs: Any
    ) -> Any:
        """Replay an entry in the turn of `context`; returns its outputs. A step that waits for its
        updates has the pool from then on."""
        pool = self.pool
        whole = self.mode is _FULL
        if whole:
            if pool.step is not None:
                pool._leave_step(context)
            pool.generation += 1
            if pool.handed_out:
                pool._expire_outputs()
        elif pool.step is not context.token or context.token is None:
            pool._enter_step(context)
        if self.read_stream_id is not None:
            stream_id = self.read_stream_id()
            if stream_id != pool.stream_id:
                pool._change_stream(stream_id)
        if entry.graph is not None:
            entry.graph.replay()
        else:
            try:
                entry.launch(context, all_tasks=whole)
            except Exception as error:
                return wrapper._repeat_eagerly(entry, context, error, args, kwargs)
            if entry.deferred is not None:
                pool.owner = entry.deferred
        if self.clones:
            return cloned(entry.outputs)
        if entry.fresh is not None and self.fresh_containers:
            return entry.fresh()
        return entry.outputs

    def leave(self, context: ForwardContext, outer: object) -> None:
        """End the turn of a call; a step that waits for its updates keeps the pool."""
        if self.pool.owner is context:
            self.pool.owner = outer

    def entry_of(self, descriptor: BatchDescriptor | None) -> Entry | None:
        """The entry of a descriptor, if there is one; raises `InvalidOptionError` for none."""
        try:
            return None if descriptor is None else self.entries.get(descriptor)
        except TypeError:
            check_kind("descriptor", descriptor, BatchDescriptor, example="BatchDescriptor(4)")
            raise

    def find_at(self, slot: int, entry: Entry) -> None:
        """Let steps of this slot find `entry` without looking it up; -1 is no slot."""
        if slot >= 0 and not entry.unchecked:
            by_slot = self.by_slot
            by_slot.extend([None] * (slot + 2 - len(by_slot)))
            by_slot[slot] = entry

    def look_again(self, descriptor: BatchDescriptor) -> None:
        """Compare the arguments of an entry before its next replay."""
        entry = self.entries.get(descriptor)
        if entry is not None:
            entry.unchecked = True
            self._lose([entry])

    def take(self, descriptor: BatchDescriptor | None) -> Sequence[DeviceGraph]:
        """The graphs of one descriptor, or of all, which no step finds any more."""
        if descriptor is None:
            taken = list(self.entries.values())
        else:
            check_hashable("descriptor", descriptor)
            found = self.entries.get(descriptor)
            taken = [] if found is None else [found]
        self._lose(taken)
        for entry in taken:
            self.entries.pop(entry.descriptor, None)
        return graphs_of([part for entry in taken for part in entry.parts])

    def _lose(self, entries: Sequence[Entry]) -> None:
        lost = set(map(id, entries))
        self.by_slot = [None if id(each) in lost else each for each in self.by_slot]

    def clear_buffers(self) -> None:
        """Let go of the buffers if no graph is left: they may lie in the pool, and keep what the
        graphs had there."""
        if not self.entries:
            self.bridges.clear()
            self.statics.clear()


def hot_of(wrapper: object) -> WrapperGraphs:
    """What a wrapper has captured, for who replays its graphs without calling it."""
    graphs: WrapperGraphs = wrapper._graphs  # type: ignore[attr-defined]
    return graphs
