"""What a wrapper captured for one descriptor, and how it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import (
    DeviceHangError,
    InvalidUpdateError,
    LaunchQueueError,
    StaleInputError,
)
from graphrt.core.base.homes import public
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.graph import GraphRead
from graphrt.core.replay._deferred import DEFERRED, Deferred, failed_before
from graphrt.core.replay.arguments import BoundArguments, is_unread
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import UNCHANGED, HostValues
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import Part, TaskedSegment, graphs_of
from graphrt.core.replay.task_table import TaskTable, resolve_updates


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

    `_mixed` says that an update failed: nobody knows which host arguments the tasks have.
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
        self._mixed = False

    def launch(self, context: ForwardContext, *, all_tasks: bool) -> None:
        self.update_failed, self.deferred = False, None
        if context.updates is DEFERRED:
            self._launch_deferred(context, all_tasks)
            return
        values = resolve_updates(self.table, context, all_known=all_tasks)
        if values is None and self._mixed:
            if context.updates is UNCHANGED:
                raise failed_before()
            values = [task.values for task in self.table.tasks]
        self._mixed = True
        if values is None and not self._breaks:
            self._replay(None)
        else:
            without_gradients(lambda: self._replay(values))
        self._mixed = False

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
        mixed, self._mixed = self._mixed, True
        if segment.launch():
            self.deferred = Deferred(
                segment, self.table, context, self._updated, mixed=mixed, all_tasks=all_tasks
            )
        else:
            self._updated()

    def _updated(self) -> None:
        self._mixed = False

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
