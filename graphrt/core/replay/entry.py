"""What a wrapper captured for one descriptor: segments of graph, some with tasks, and eager parts
between them, and how they are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import (
    DeviceHangError,
    InvalidOptionError,
    LaunchQueueError,
    StaleInputError,
)
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_takes, shown
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.graph import DeviceGraph, GraphRead
from graphrt.core.device.platform import Platform
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import HostValues
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.tasks import CapturedTask, TaskTable


def bound_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Every argument of a call that a graph bakes in, with its path: tensors by where and what they
    are, plain values as they are. Asked before the call, as it may clear a list of them."""
    return tuple(
        (path, tree.identity(leaf) if isinstance(leaf, torch.Tensor) else (leaf,))
        for path, leaf in tree.leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor | int | float | str | None)
    )


@public("graphrt.types")
class Part(Protocol):
    """One element of a captured step."""

    def replay(self) -> None: ...


@public("graphrt")
class SegmentHooks(Protocol):
    """What a weight offloader needs around each graph of a wrapper."""

    def before_capture(self) -> None:
        """Before a segment is captured: wait for what it will read."""

    def end_of_capture(self) -> None:
        """Inside the capture, at its end: join the streams that were forked."""

    def before_replay(self) -> None:
        """Before every replay of a segment."""


def check_hooks(name: str, hooks: object) -> None:
    """Raise `InvalidOptionError` for the argument `name` that is no `SegmentHooks`; None may be."""
    if hooks is None:
        return
    for method in ("before_capture", "end_of_capture", "before_replay"):
        hook = getattr(hooks, method, None)
        if not callable(hook):
            raise InvalidOptionError(
                f"the argument {name!r} is called around graphs, and has no {method}()",
                got=shown(hooks),
                expected="an object with before_capture(), end_of_capture(), before_replay()",
                advice="a subclass of graphrt.SegmentHooks, whose methods do nothing by themselves",
            )
        check_takes(f"{name}.{method}", hook, f"{method}()")


class HookedSegment:
    """A segment with calls `before` each replay. Without any, the part is the graph itself."""

    def __init__(self, graph: DeviceGraph, before: Sequence[Callable[[], object]]) -> None:
        self.graph = graph
        self.before = before

    def replay(self) -> None:
        for call in self.before:
            call()
        self.graph.replay()


@public("graphrt.lowlevel")
class TaskedSegment:
    """A segment whose tasks are issued again at every replay; `name` says whose it is.

    `before` is called before each replay.
    """

    def __init__(
        self,
        platform: Platform,
        graph: DeviceGraph,
        tasks: list[CapturedTask],
        before: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.graph = graph
        self.tasks = tasks
        self.name = "a graph under capture"
        self.platform = platform
        self.before = before

    def replay(self) -> None:
        """Replay with the host arguments of the replay before."""
        self.replay_with(None)

    def replay_with(self, values: Sequence[HostValues] | None) -> None:
        """Replay with `values`, one for each task; None repeats those of the replay before."""
        for call in self.before:
            call()
        replay = self.platform.replay_updated
        self.give(values, partial(replay, self.graph, self.tasks, name=self.name))

    def give(self, values: Sequence[HostValues] | None, act: Callable[..., object]) -> None:
        """Call `act(changed=)` with `values` in the tasks, which have the ones before if it raises;
        None leaves them as they are."""
        tasks = self.tasks
        if values is None:
            act(changed=False)
            return
        before = [task.values for task in tasks]
        try:
            for task, new in zip(tasks, values, strict=True):
                task.values = new
            act(changed=True)
        except BaseException:  # `undoing`, written out: on the way of every step with tasks
            for task, old in zip(tasks, before, strict=True):
                task.values = old
            raise


@public("graphrt.lowlevel")
def graphs_of(parts: Iterable[Part]) -> list[DeviceGraph]:
    """The device graphs among the parts of a step, in order."""
    graphs: list[DeviceGraph] = []
    for part in parts:
        if isinstance(part, TaskedSegment | HookedSegment):
            graphs.append(part.graph)
        elif not isinstance(part, EagerPart):
            graphs.append(cast(DeviceGraph, part))
    return graphs


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
        bound: tuple[tuple[str, tuple[object, ...]], ...],
        captured_in: object,
    ) -> None:
        self.descriptor = descriptor
        self.parts = parts
        self.outputs = outputs
        self.bound = bound
        # The step that was under way: called again in it, the wrapper would replay itself.
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

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        """Raise `StaleInputError` unless the arguments of a call of `name` are what the graphs were
        captured with."""
        now, then = bound_arguments(args, kwargs), dict(self.bound)
        if now == self.bound:
            return
        for path, bound in now:
            if then.get(path) != bound:
                raise StaleInputError(
                    f"argument {path} of {name} is not where the graph of [{self.descriptor}] "
                    "reads it",
                    got=bound,
                    expected=then.get(path, "no such tensor at capture"),
                    advice="copy_() into the tensor that it was captured with, and pass that one "
                    "at every step; or let GraphRunner own the buffers",
                )
        raise StaleInputError(
            f"the graph of {name} for [{self.descriptor}] was captured with other arguments",
            got=[path for path, _ in now],
            expected=list(then),
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
