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
        "_mixed",
        "_only_graphs",
        "_table",
        "breaks",
        "captured_in",
        "deferred",
        "descriptor",
        "fresh",
        "graph",
        "inputs",
        "outputs",
        "parts",
        "pooled",
        "tasks",
        "unchecked",
        "update_failed",
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
        self._mixed = False
        # Whether the next replay compares its arguments with those of the capture.
        self.unchecked = False
        # Whether the last launch was ended by an update of its tasks, so that it may be repeated.
        self.update_failed = False
        # The last launch, where its updates come after it.
        self.deferred: Deferred | None = None
        tasked = [part for part in parts if isinstance(part, TaskedSegment)]
        for place, part in enumerate(tasked):
            which = f" segment {place + 1} of {len(tasked)}" if len(tasked) > 1 else ""
            part.name = f"[{descriptor}]{which}"
        self._table = TaskTable([task for part in tasked for task in part.tasks])
        self.tasks = self._table.tasks
        # Only eager parts, and issuing a task, could grow a graph of gradients.
        self._only_graphs = not any(isinstance(part, EagerPart) for part in parts)

        # Whether an eager part runs at every replay.
        self.breaks = not self._only_graphs

        # What most entries are: one graph and nothing else.
        alone = len(parts) == 1 and not self.tasks
        self.graph: Part | None = parts[0] if alone else None

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
            self._launch_tasks(context, all_tasks)
            return
        # With gradients on, a bridge that an eager result is copied into would grow a graph.
        without_gradients(self._replay_untasked)

    def _replay_untasked(self) -> None:
        for part in self.parts:
            part.replay()

    def _launch_tasks(self, context: ForwardContext, all_tasks: bool) -> None:
        self.update_failed, self.deferred = False, None
        if context.updates is DEFERRED:
            self._launch_deferred(context, all_tasks)
            return
        values = resolve_updates(self._table, context, all_known=all_tasks)
        if values is None and self._mixed:
            if context.updates is UNCHANGED:
                raise failed_before()
            values = [task.values for task in self.tasks]
        self._mixed = True
        if values is None and self._only_graphs:
            self._replay_parts(None)
        else:
            without_gradients(lambda: self._replay_parts(values))
        self._mixed = False

    def _launch_deferred(self, context: ForwardContext, all_tasks: bool) -> None:
        (segment, *others) = self.parts
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
                segment, self._table, context, self._updated, mixed=mixed, all_tasks=all_tasks
            )
        else:
            self._updated()

    def _updated(self) -> None:
        self._mixed = False

    def _replay_parts(self, values: Sequence[HostValues] | None) -> None:
        taken = 0
        for part in self.parts:
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
