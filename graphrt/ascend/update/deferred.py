"""Updates that come apart from the launch of their graph, before or after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.ascend.update.streams import UpdateStream
from graphrt.ascend.watchdog import WatchedStep
from graphrt.core.base.errors import MissingCapabilityError, TaskContractError
from graphrt.core.device.contract import TaskUpdate


@dataclass
class Launch:
    """A replay that waits for the updates of its tasks.

    `updating` is the stream to update them on, `fence` the end of the replay before, for which the
    update waits, `stream` that of the replay, `watched` the watchdog's note of it, `name` that of
    the graph, `thread` the id of the one that launched it."""

    updating: UpdateStream
    fence: Any
    stream: Any
    watched: WatchedStep | None
    name: str
    thread: int


@dataclass
class Ahead:
    """An update whose launch is to come: the stream it was issued on, and the event at its end."""

    updating: UpdateStream
    fence: Any


class UpdateWindow:
    """Given to a host that updates the tasks of a graph itself: its stream, and `signal`."""

    def __init__(self, stream: Any, updates: Sequence[TaskUpdate], watched: Any = None) -> None:
        """`watched` is the watchdog's note of the launch."""
        self.stream = stream
        """The stream of torch_npu to update on; it is current."""
        # id of an update that is not signalled yet -> the update.
        self._open = {id(update): update for update in updates}
        self._last = updates[-1]
        self._watched = watched

    def signal(self, update: TaskUpdate) -> None:
        """Let the graph run the task of `update`, whose operators were issued again on the stream.

        Raises `TaskContractError` for one that is no task of the graph, or that is signalled.
        """
        if self._open.pop(id(update), None) is None:
            raise TaskContractError(
                f"task {update.name!r} was signalled twice, or is another graph's",
                got=update.name,
                expected=_named(self._open.values()),
                advice="signal each task of the graph once a step",
            )
        if self._watched is not None:
            self._watched.updating(update.name)
        update.handle.event.record(self.stream)
        if self._watched is not None:
            self._watched.signalled(self.stream)

    @property
    def next(self) -> TaskUpdate:
        """The first task that is not signalled yet, else the last one."""
        return next(iter(self._open.values()), self._last)

    def check(self) -> None:
        """Raise `TaskContractError` if a task was not signalled: the graph would wait for ever."""
        if self._open:
            raise TaskContractError(
                "an update left tasks of its graph out, for which the device would wait for ever",
                got=f"{len(self._open)} without a signal: {_named(self._open.values())}",
                expected="every task of the graph, updated and signalled",
                advice="give metadata for each of its layers",
            )


def _named(updates: Any) -> str:
    names = [update.name for update in updates]
    return ", ".join(names[:4]) + ", …" * (len(names) > 4) or "no task"


def too_early(name: str) -> MissingCapabilityError:
    """The error where a launch comes first on a device that needs the update first."""
    return MissingCapabilityError(
        "this device needs the update of tasks before the launch of their graph",
        got=f"updates=DEFERRED for graph {name}, and no update before the call",
        expected="the update, then the call",
        advice="update before the call, or pass the updates with it",
    )
