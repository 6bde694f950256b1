"""What a wrapper captured for one descriptor, and how it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import DeviceHangError, LaunchQueueError, StaleInputError
from graphrt.core.base.homes import public
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.graph import GraphRead
from graphrt.core.device.platform import Platform
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import HostValues
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import Part, TaskedSegment, graphs_of
from graphrt.core.replay.tasks import TaskTable


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
        values: list[tuple[str, tuple[object, ...]]] = []
        pooled: list[str] = []
        tells = pool is not None and type(pool.platform).reads is not Platform.reads
        for path, leaf in tree.leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                values.append((path, tree.identity(leaf)))
                if tells and pool is not None and pool._owns(leaf):
                    pooled.append(path)
            elif isinstance(leaf, int | float | str | None):
                values.append((path, (leaf,)))
        return cls(tuple(values), frozenset(pooled))


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
        "bound",
        "breaks",
        "captured_in",
        "descriptor",
        "fresh",
        "graph",
        "outputs",
        "parts",
        "table",
        "tasks",
        "unchecked",
        "update_failed",
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
        # The caller may change what it gets, so every step makes a container.
        self.fresh = tree.copier(outputs)
        # Whether the next replay compares its arguments with those of the capture.
        self.unchecked = False
        # Whether an eager part runs at every replay.
        self.breaks = any(isinstance(part, EagerPart) for part in parts)
        tasked = [part for part in parts if isinstance(part, TaskedSegment)]
        for number, part in enumerate(tasked, 1):
            which = f" segment {number} of {len(tasked)}" if len(tasked) > 1 else ""
            part.name = f"[{descriptor}]{which}"
        self.table = TaskTable([task for part in tasked for task in part.tasks])
        self.tasks = self.table.tasks
        # Whether an update of its tasks ended the last launch, so that it may be repeated.
        self.update_failed = False
        # What most entries are: one graph and nothing else. None once the wrapper has let go of it.
        alone = len(parts) == 1 and not tasked
        self.graph: Part | None = parts[0] if alone else None

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
        reads: list[GraphRead] = []
        for graph in graphs_of(self.parts):
            read = platform.reads(graph)
            if read is None:
                return None, results
            reads += read
        for part in self.parts:
            if isinstance(part, EagerPart):
                arguments, left = part.tensors()
                reads += [
                    GraphRead(tensor, "an eager part")
                    for tensor in arguments
                    if tensor.numel() and not pool._owns(tensor)
                ]
                results += left
        return reads, results

    def launch(self, context: ForwardContext, *, all_tasks: bool) -> object:
        """Replay segments, eager parts and tasks with their new host arguments, in order.

        All updates are validated before anything is launched. Returns who has the pool from then
        on, where a device has the step go on after the call, or None.
        """
        if not self.tasks:
            # With gradients on, a bridge that an eager result is copied into would grow a graph.
            without_gradients(self._replay)
            return None
        self.update_failed, table = False, self.table
        values = table.values(context, all_known=all_tasks)
        table.mixed = True
        # Only eager parts, and issuing a task, could grow a graph of gradients.
        if values is None and not self.breaks:
            self._replay_with(None)
        else:
            without_gradients(partial(self._replay_with, values))
        table.mixed = False
        return None

    def _replay(self) -> None:
        for part in self.parts:
            part.replay()

    def _replay_with(self, values: Sequence[HostValues] | None) -> None:
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
