"""What a wrapper captured for one descriptor, and how it is replayed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from threading import Thread, get_ident
from typing import Any, Final, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import (
    DeviceHangError,
    GraphRTError,
    InvalidUpdateError,
    LaunchQueueError,
    MissingUpdateError,
    StaleInputError,
)
from graphrt.core.base.homes import public
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.graph import GraphRead
from graphrt.core.device.platform import Platform
from graphrt.core.replay._turn import OwnedPool, PoolOwner
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import UNCHANGED, HostValues, Updates, _Marker
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import Part, TaskedSegment, graphs_of
from graphrt.core.replay.tasks import TaskTable, resolve_updates

DEFERRED: Final = _Marker("DEFERRED")
"""As `updates=` to a wrapper: they come after the call, with `GraphWrapper.update`. Until then the
device waits in the middle of the graph, and nothing else may run in its pool."""


class Deferred(PoolOwner):
    """A launched graph that waits for its updates. It owns the pool until they came."""

    _is_over = False

    def __init__(
        self,
        launch: _TaskedLaunch,
        segment: TaskedSegment,
        context: ForwardContext,
        *,
        mixed: bool,
        all_tasks: bool,
    ) -> None:
        super().__init__("a step whose updates have not come")
        self._thread = get_ident()
        self._launch = launch
        self.segment = segment
        self._context = context
        self._mixed = mixed
        self._all_tasks = all_tasks

    def __repr__(self) -> str:
        return f"the step {self._context!r}, whose updates have not come,"

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
        asked = copy.copy(self._context)
        asked.updates = updates
        values = self._launch.values(asked, all_tasks=self._all_tasks, mixed=self._mixed)
        self.end_by(pool, lambda segment: segment.update_with(values))

    def end_by(self, pool: GraphPool, update: Callable[[TaskedSegment], object]) -> None:
        """The same, by a function that brings the segment to its end."""
        if pool.owner is self:
            pool.owner = None
        self._is_over = True
        update(self.segment)
        self._launch.mixed = False

    def refusal(self, pool: OwnedPool) -> GraphRTError | None:
        """In its own thread, bring the step to its end with the arguments that it has."""
        if self._thread != get_ident():
            return None
        pool.owner = None
        self._is_over = True
        self.segment.update_with(None)
        self._launch.mixed = self._mixed
        return MissingUpdateError(
            "the step before was launched with updates=DEFERRED and got none; it was ended with "
            "the host arguments of the replay before, so its outputs are worth nothing",
            got=self._context.descriptor,
            expected="one update after every such call",
            advice="call wrapper.update(updates) before the next step",
        )

    def __del__(self) -> None:
        # Its engine was thrown away, and whoever waits for the device would wait for ever. In a
        # thread of its own: this one may hold the lock of an update, wherever it is collected.
        if not self._is_over and not sys.is_finalizing():
            Thread(target=self.segment.update_with, args=(None,), daemon=True).start()


class BoundArguments(NamedTuple):
    """Every argument that a graph bakes in, with its path in the call: tensors by where and what
    they are, plain values as they are."""

    values: tuple[tuple[str, tuple[object, ...]], ...]
    pooled: frozenset[str]
    """The paths of tensors in the pool, where the platform can tell what graphs read outside of it;
    else none, as none are needed to say that an argument is read."""

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool | None
    ) -> BoundArguments:
        """Those of a call; asked before it, as it may clear a list of them. Without a `pool` nobody
        asks which lie in one."""
        found: list[tuple[str, tuple[object, ...]]] = []
        pooled: list[str] = []
        tells = pool is not None and type(pool.platform).reads is not Platform.reads
        for path, leaf in tree.leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                found.append((path, tree.identity(leaf)))
                if tells and pool is not None and pool.platform.owns(pool.memory, leaf):
                    pooled.append(path)
            elif isinstance(leaf, int | float | str | None):
                found.append((path, (leaf,)))
        return cls(tuple(found), frozenset(pooled))


def is_unread(captured: tuple[object, ...] | None, reads: Sequence[GraphRead] | None) -> bool:
    """Whether a tensor argument, as it was captured, is known to be read by no graph."""
    if captured is None or len(captured) == 1 or reads is None:
        return False
    if isinstance(captured[2], torch.layout):
        return False  # sparse: it has no address to look for
    address = captured[0]
    assert isinstance(address, int)
    for read in reads:
        storage = read.tensor.untyped_storage()
        if storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1):
            return False
    return True


@public("graphrt.types")
class Entry:
    """What one descriptor captured: its parts, its outputs and the addresses it reads."""

    __slots__ = (
        "_launch",
        "bound",
        "breaks",
        "captured_in",
        "descriptor",
        "fresh",
        "graph",
        "outputs",
        "parts",
        "tasks",
        "unchecked",
    )

    def __init__(
        self,
        descriptor: BatchDescriptor,
        parts: tuple[Part, ...],
        outputs: Any,
        bound: tuple[tuple[tuple[str, tuple[object, ...]], ...], frozenset[str]],
        captured_in: object,
    ) -> None:
        self.descriptor = descriptor
        self.parts = parts
        self.outputs = outputs
        self.bound = BoundArguments(*bound)
        # What was under way: called again in the same, the wrapper would replay itself.
        self.captured_in = captured_in
        # The caller may change what it gets, so a container is made anew for every step.
        self.fresh = tree.copier(outputs)
        # Whether the next replay compares its arguments with those of the capture.
        self.unchecked = False
        # Whether an eager part runs at every replay.
        self.breaks = any(isinstance(part, EagerPart) for part in parts)
        tasked = [part for part in parts if isinstance(part, TaskedSegment)]
        for place, part in enumerate(tasked):
            which = f" segment {place + 1} of {len(tasked)}" if len(tasked) > 1 else ""
            part.name = f"[{descriptor}]{which}"
        self._launch = _TaskedLaunch(parts, breaks=self.breaks)
        self.tasks = self._launch.table.tasks
        # What most entries are: one graph and nothing else. None once the wrapper has let go of it.
        alone = len(parts) == 1 and not self.tasks
        self.graph: Part | None = parts[0] if alone else None

    @property
    def deferred(self) -> Any:
        """The last launch, where its updates come after it."""
        return self._launch.deferred

    @property
    def update_failed(self) -> bool:
        """Whether an update of its tasks ended the last launch, so that it may be repeated."""
        return self._launch.update_failed

    def check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool, name: str
    ) -> None:
        """Raise `StaleInputError` unless the arguments of a call of `name` are what the graphs were
        captured with; tensors that they do not read, as far as the platform can tell, may be
        others."""
        now, then = BoundArguments.of(args, kwargs, None).values, self.bound.values
        if now == then:
            return
        before = dict(then)
        reads, _ = self.reads(pool)
        for path, bound in now:
            if before.get(path) == bound:
                continue
            if path in self.bound.pooled or not is_unread(before.get(path), reads):
                raise StaleInputError(
                    f"argument {path} of {name} is not where the graph of [{self.descriptor}] "
                    "reads it",
                    got=bound,
                    expected=before.get(path, "no such tensor at capture"),
                    advice="copy_() into the tensor that it was captured with, and pass that one "
                    "at every step; or let GraphRunner own the buffers",
                )
        if [path for path, _ in now] != [path for path, _ in then]:
            raise StaleInputError(
                f"the graph of {name} for [{self.descriptor}] was captured with other arguments",
                got=[path for path, _ in now],
                expected=[path for path, _ in then],
                advice="call the wrapper with the same arguments at every step",
            )

    def reads(self, pool: GraphPool) -> tuple[list[GraphRead] | None, list[torch.Tensor]]:
        """The tensors outside of the pool that a replay reads, None if the platform cannot tell,
        and those in which eager parts and the entry itself leave results."""
        platform, results = pool.platform, tree.tensors(self.outputs)
        found: list[GraphRead] = []
        for graph in graphs_of(self.parts):
            read = platform.reads(graph)
            if read is None:
                return None, results
            found += read
        for part in self.parts:
            if isinstance(part, EagerPart):
                given, left = part.tensors()
                found += [
                    GraphRead(tensor, "an eager part")
                    for tensor in given
                    if tensor.numel() and not platform.owns(pool.memory, tensor)
                ]
                results += left
        return found, results

    def launch(self, context: ForwardContext, *, all_tasks: bool) -> None:
        """Replay segments, eager parts and tasks with their new host arguments, in order.

        All updates are validated before anything is launched.
        """
        if self.tasks:
            self._launch.launch(context, all_tasks=all_tasks)
        else:
            # With gradients on, a bridge that an eager result is copied into would grow a graph.
            without_gradients(self._replay)

    def _replay(self) -> None:
        for part in self.parts:
            part.replay()


class _TaskedLaunch:
    """Launches the parts of an entry some of which have tasks, and knows how the last launch went.

    `mixed` says that an update failed: nobody knows which host arguments the tasks have.
    """

    def __init__(self, parts: tuple[Part, ...], *, breaks: bool) -> None:
        self.table = TaskTable(
            [task for part in parts if isinstance(part, TaskedSegment) for task in part.tasks]
        )
        self.update_failed = False
        self.deferred: Deferred | None = None
        self._parts = parts
        # Only eager parts, and issuing a task, could grow a graph of gradients.
        self._breaks = breaks
        self.mixed = False

    def launch(self, context: ForwardContext, *, all_tasks: bool) -> None:
        self.update_failed, self.deferred = False, None
        if context.updates is DEFERRED:
            self._launch_deferred(context, all_tasks)
            return
        values = self.values(context, all_tasks=all_tasks, mixed=self.mixed)
        self.mixed = True
        if values is None and not self._breaks:
            self._replay(None)
        else:
            without_gradients(lambda: self._replay(values))
        self.mixed = False

    def _launch_deferred(self, context: ForwardContext, all_tasks: bool) -> None:
        (segment, *others) = self._parts
        if others or not isinstance(segment, TaskedSegment):
            raise InvalidUpdateError(
                "the updates of a step with eager parts cannot come after its launch, as those may "
                "wait for the device",
                got="DEFERRED",
                expected="this step's updates",
                advice="pass updates=, or capture the step as one FULL graph",
            )
        mixed, self.mixed = self.mixed, True
        if segment.launch():
            self.deferred = Deferred(self, segment, context, mixed=mixed, all_tasks=all_tasks)
        else:
            self.mixed = False

    def values(
        self, context: ForwardContext, *, all_tasks: bool, mixed: bool
    ) -> list[HostValues] | None:
        """The host arguments that a step gives to each task; None for those of the replay before,
        which nobody knows where they are `mixed`."""
        values = resolve_updates(self.table, context, all_known=all_tasks)
        if values is not None or not mixed:
            return values
        if context.updates is UNCHANGED:
            raise MissingUpdateError(
                "the step before failed half-way, so its host arguments cannot be repeated",
                got="UNCHANGED",
                expected="updates for every task",
                advice="pass the updates of this step",
            )
        return [task.values for task in self.table.tasks]

    def _replay(self, values: Sequence[HostValues] | None) -> None:
        taken = 0
        for part in self._parts:
            if isinstance(part, TaskedSegment):
                count = len(part.tasks)
                try:
                    part.replay_with(None if values is None else values[taken : taken + count])
                except Exception as error:
                    self.update_failed = not isinstance(error, DeviceHangError | LaunchQueueError)
                    raise
                taken += count
            else:
                part.replay()
