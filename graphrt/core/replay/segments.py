"""What a captured entry is made of: segments of graph, some with tasks, and eager parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, cast

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_takes, shown
from graphrt.core.device.graph import DeviceGraph
from graphrt.core.device.platform import Platform
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.host_args import HostValues
from graphrt.core.replay.tasks import CapturedTask


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

    __slots__ = ("before", "graph")

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

    __slots__ = ("before", "graph", "name", "platform", "tasks")

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
