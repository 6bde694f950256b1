"""What a wrapper captured for one descriptor, and how it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrt.core.base import (
    DeviceHangError,
    InvalidUpdateError,
    LaunchQueueError,
    tree,
    without_gradients,
)
from graphrt.core.batch import BatchDescriptor, ForwardContext
from graphrt.core.device import GraphRead
from graphrt.core.replay._deferred import DEFERRED, Deferred, failed_before
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import UNCHANGED, HostValues
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import Part, TaskedSegment, graphs_of
from graphrt.core.replay.task_table import TaskTable, resolve_updates


class Entry:
    """What one descriptor captured: its parts, its outputs and the addresses it reads."""

    __slots__ = (
        "_launch",
        "breaks",
        "captured_in",
        "descriptor",
        "fresh",
        "graph",
        "inputs",
        "outputs",
        "parts",
        "pooled",
        "tasks",
        "unchecked",
    )

    def __init__(
        self,
        descriptor: BatchDescriptor,
        parts: tuple[Part, ...],
        outputs: Any,
        inputs: tuple[tuple[str, tuple[object, ...]], ...],
        captured_in: object,
        pooled: frozenset[str] = frozenset(),
    ) -> None:
        self.descriptor = descriptor
        self.parts = parts
        self.outputs = outputs
        self.inputs = inputs
        # Paths of arguments in the pool, which the platform says nothing of.
        self.pooled = pooled
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
    def deferred(self) -> Deferred | None:
        """The last launch, where its updates come after it."""
        return self._launch.deferred

    @property
    def update_failed(self) -> bool:
        """Whether an update of its tasks ended the last launch, so that it may be repeated."""
        return self._launch.update_failed

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
