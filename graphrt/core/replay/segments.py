"""What a captured entry is made of: segments of graph, some with tasks, and eager parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from graphrt.core.base import tree
from graphrt.core.device.graph import DeviceGraph
from graphrt.core.device.platform import Platform

if TYPE_CHECKING:
    from graphrt.core.replay.tasks import UpdatableTask

HostValues = Mapping[str, Any]
"""The host arguments of one task by name."""


class Part(Protocol):
    """One element of a captured step."""

    def replay(self) -> None: ...


class CapturedTask:
    """One task of a captured segment: its handle, its values, and how to issue it again.

    It is the `TaskUpdate` of every replay itself, as building one would cost more than the rest of
    a replay whose arguments did not change.
    """

    __slots__ = ("args", "handle", "kwargs", "name", "spec", "values")

    def __init__(
        self,
        spec: UpdatableTask,
        name: str,
        handle: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: HostValues,
    ) -> None:
        self.spec = spec
        self.name = name
        self.handle = handle
        self.args = args
        self.kwargs = kwargs
        self.values = values

    def issue(self) -> None:
        """Issue the operator with the present values."""
        try:
            self.spec.issue(*self.args, **self.kwargs, **self.values)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"while updating task {self.name!r}")
            raise

    def likeness(self) -> Hashable:
        """See `TaskUpdate`."""
        leaves = tree.leaves((self.args, self.kwargs))
        return id(self.spec), *((path, _trait(leaf)) for path, leaf in leaves)

    def tensors(self) -> list[torch.Tensor]:
        """See `TaskUpdate`."""
        return tree.tensors((self.args, self.kwargs))


def _trait(leaf: Any) -> Hashable:
    """What two layers' tasks must have in common at one argument to be issued alike."""
    if isinstance(leaf, torch.Tensor):
        # What is in host memory can be read when the task is issued.
        if leaf.device.type == "cpu":
            return id(leaf)
        return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device
    if isinstance(leaf, bool | int | float | str | torch.dtype | torch.device | None):
        return type(leaf), leaf.hex() if isinstance(leaf, float) else leaf
    return id(leaf)


class SegmentHooks(Protocol):
    """What a weight offloader needs around each graph of a wrapper."""

    def before_capture(self) -> None:
        """Before a segment is captured: wait for what it will read."""

    def end_of_capture(self) -> None:
        """Inside the capture, at its end: join the streams that were forked."""

    def before_replay(self) -> None:
        """Before every replay of a segment."""


class HookedSegment:
    """A segment with a hook before its replay; without hooks the graph stands for itself."""

    __slots__ = ("graph", "hooks")

    def __init__(self, graph: DeviceGraph, hooks: SegmentHooks) -> None:
        self.graph = graph
        self.hooks = hooks

    def replay(self) -> None:
        self.hooks.before_replay()
        self.graph.replay()


class TaskedSegment:
    """A segment whose tasks are issued anew at every replay; `name` says whose it is."""

    __slots__ = ("_hooks", "_platform", "graph", "name", "tasks")

    def __init__(
        self,
        platform: Platform,
        graph: DeviceGraph,
        tasks: list[CapturedTask],
        hooks: SegmentHooks | None = None,
    ) -> None:
        self.graph = graph
        self.tasks = tasks
        self.name = "a graph under capture"
        self._platform = platform
        self._hooks = hooks

    def replay(self) -> None:
        """Replay with the host arguments of the replay before."""
        self.replay_with(None)

    def replay_with(self, values: Sequence[HostValues] | None) -> None:
        """Replay with `values`, one for each task; None repeats those of the replay before."""
        if self._hooks is not None:
            self._hooks.before_replay()
        tasks, replay = self.tasks, self._platform.replay_updated
        if values is None:
            replay(self.graph, tasks, changed=False, name=self.name)
            return
        before = [task.values for task in tasks]
        try:
            for task, new in zip(tasks, values, strict=True):
                task.values = new
            replay(self.graph, tasks, changed=True, name=self.name)
        except BaseException:
            for task, old in zip(tasks, before, strict=True):
                task.values = old
            raise
